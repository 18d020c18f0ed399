"""What the model runner refuses, a plan that does not fit what its slots hold, and what comes before the first step."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_prompt

from qwen_engine import LLM, SamplingParams, kernels
from qwen_engine.errors import QwenEngineError
from qwen_engine.kernels import reference
from qwen_engine.scheduling.step_plan import StepPlan


def test_a_plan_for_an_empty_slot_is_refused(tiny_model):
    with LLM(tiny_model, device="cpu", skip_tokenizer_init=True, max_num_seqs=4) as llm:
        runner = llm._core._executor.runner
        with pytest.raises(QwenEngineError, match="step 7 computes a slot of \\[2\\] that holds no request"):
            runner.execute(StepPlan(step=7, slots=[2], num_tokens=[1]))
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        next(stream)
        (request,) = llm._core.scheduler.running
        slot = request.slot
        with pytest.raises(QwenEngineError, match="holds no request"):
            runner.execute(StepPlan(step=8, slots=[slot], num_tokens=[1], freed_slots=[slot]))


class RecordedKernels:
    """The reference kernels, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name):
        def record(*args, **kwargs):
            self.calls.append((name, *map(_kind, args), *((key, _kind(value)) for key, value in kwargs.items())))
            return getattr(reference, name)(*args, **kwargs)

        return record


def _kind(value):
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def test_two_layers_launch_every_kernel_that_the_whole_model_does(make_tiny_model, monkeypatch):
    recorded = RecordedKernels()
    with LLM(make_tiny_model(num_hidden_layers=5), device="cpu", skip_tokenizer_init=True, max_num_seqs=4) as llm:
        runner = llm.core._executor.runner
        monkeypatch.setattr(kernels, "_backend", lambda *_: recorded)

        def run(size: int) -> list[tuple[object, ...]]:
            recorded.calls.clear()
            for call in runner.decode.calls.values():
                call(size)
            return list(recorded.calls)

        with torch.inference_mode():
            whole = run(3)
            with runner.model.shortened():
                short = run(3)
            again = run(3)
    assert set(short) == set(whole)
    assert len(short) < len(whole)
    assert again == whole


def test_what_is_launched_to_compile_kernels_leaves_no_trace(tiny_model):
    prompts = [random_prompt(length) for length in (3, 17, 30)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=6),
        SamplingParams(temperature=0.9, seed=6, top_p=0.8, logprobs=2, max_tokens=6),
    ]
    with LLM(tiny_model, device="cpu", skip_tokenizer_init=True, max_num_seqs=4, kv_cache_bytes=1 << 20) as llm:
        runner = llm.core._executor.runner
        num_blocks = runner.kv_cache.shape[2]
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        runner.compile_kernels(max_num_batched_tokens=40)
        assert runner.kv_cache is None
        runner.allocate_kv_cache(num_blocks)
        llm.reset_prefix_cache()
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)] == expected

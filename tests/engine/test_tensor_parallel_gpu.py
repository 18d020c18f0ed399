"""Two GPUs with NCCL give the tokens of one GPU, for every feature of the engine."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from test_tensor_parallel import FILTERED, PARAMS, PROMPTS, SHARED, seeded

from qwen_engine import LLM, SamplingParams
from qwen_engine.errors import EngineDeadError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def samples(llm: LLM) -> list[list[list[int]]]:
    """Of the requests that do not depend on what the engine has done before."""
    prompts = [*PROMPTS, *(SHARED + prompt for prompt in PROMPTS)]
    outputs = llm.generate(prompts, PARAMS * 2, use_tqdm=False)
    filtered = llm.generate(PROMPTS, FILTERED, use_tqdm=False)  # a batch of these has a graph of its own
    seen = seeded([([sample.token_ids for sample in out.outputs],) for out in outputs])
    return seen + [[out.outputs[0].token_ids] for out in filtered]


@pytest.mark.parametrize("max_num_batched_tokens", [64, 4096])
def test_two_gpus_give_the_tokens_of_one(max_num_batched_tokens, make_tiny_model):
    options = {
        "device": "cuda",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_bytes": 32 << 20,
    }
    with LLM(make_tiny_model(), enforce_eager=True, **options) as llm:
        expected = samples(llm)
    for enforce_eager in (False, True):
        with LLM(make_tiny_model(), tensor_parallel_size=2, enforce_eager=enforce_eager, **options) as llm:
            assert (llm.core._executor.runner.decode.graphs is None) == enforce_eager
            assert samples(llm) == expected
            assert samples(llm) == expected  # warm, and the ranks still in step
    with LLM(make_tiny_model(), tensor_parallel_size=2, debug_checks=True, **options) as llm:
        assert llm.core._executor.runner.tp.peers is not None
        assert samples(llm) == expected
    with LLM(make_tiny_model(), tensor_parallel_size=2, enable_custom_all_reduce=False, **options) as llm:
        assert llm.core._executor.runner.tp.peers is None
        assert samples(llm) == expected


def test_a_worker_that_dies_while_graphs_run_ends_the_call_with_its_reason_and_close_returns(make_tiny_model):
    options = {"device": "cuda", "skip_tokenizer_init": True, "kv_cache_bytes": 32 << 20, "tensor_parallel_size": 2}
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    with LLM(make_tiny_model(), **options) as llm:
        stream = llm.stream([PROMPTS[0]], params)
        for _ in range(5):
            next(stream)
        os.kill(llm.core._executor.worker_pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 died \(killed by SIGKILL\)"):
            list(stream)
    with LLM(make_tiny_model(), **options) as llm:
        assert len(llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].token_ids) == 400

"""What the model runner refuses: a plan that does not fit what its slots hold."""

from __future__ import annotations

import pytest

from qwen_engine import LLM, SamplingParams
from qwen_engine.errors import QwenEngineError
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

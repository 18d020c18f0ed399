"""Two GPUs with NCCL give the tokens of one GPU, for every feature of the engine."""

from __future__ import annotations

import pytest
import torch
from test_tensor_parallel import PARAMS, PROMPTS, SHARED

from qwen_engine import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def samples(llm: LLM) -> list[list[list[int]]]:
    prompts = [*PROMPTS, *(SHARED + prompt for prompt in PROMPTS)]
    outputs = llm.generate(prompts, PARAMS * 2, use_tqdm=False)
    return [[sample.token_ids for sample in out.outputs] for out in outputs]


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
    with LLM(make_tiny_model(), **options) as llm:
        expected = samples(llm)
    with LLM(make_tiny_model(), tensor_parallel_size=2, debug_checks=True, **options) as llm:
        assert samples(llm) == expected
        assert samples(llm) == expected  # warm, and the ranks still in step

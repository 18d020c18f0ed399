"""`deterministic=True` on GPUs: the bits of a request depend on the request alone, with graphs and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import plant
from tiny_models import random_prompt

from qwen_engine import LLM, SamplingParams
from qwen_engine.engine import mixed_step, rank
from qwen_engine.engine.cuda_graphs import GraphSizes

pytestmark = pytest.mark.gpu

CONFIG = {  # Qwen3-0.6B's shape, with few layers
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
SHARED = random_prompt(400, seed=9)
PROMPTS = [*(random_prompt(length) for length in (1, 16, 63, 255, 256, 257, 700)), SHARED + random_prompt(20)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.2},
]
PARAMS = [
    SamplingParams(
        **kind, seed=number, max_tokens=40, ignore_eos=True, logprobs=10, prompt_logprobs=3 if number % 3 == 1 else None
    )
    for number, kind in enumerate(KINDS * 2)
]
EVERYTHING = range(len(PROMPTS))


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def engine(folder: Path, dtype: str, **options: Any) -> LLM:
    options = {"max_num_seqs": 32, "kv_cache_bytes": 256 << 20, "deterministic": True, **options}
    return LLM(folder, load_format="dummy", device="cuda", dtype=dtype, skip_tokenizer_init=True, **options)


def bits(llm: LLM, numbers: Sequence[int]) -> list[tuple]:
    outputs = llm.generate([PROMPTS[n] for n in numbers], [PARAMS[n] for n in numbers], use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs) for out in outputs]


def alone(llm: LLM) -> list[tuple]:
    seen = []
    for number in EVERYTHING:
        llm.reset_prefix_cache()
        seen += bits(llm, [number])
    return seen


@pytest.fixture(scope="module")
def expected(dtype: str, folder: Path) -> list[tuple]:
    with engine(folder, dtype) as llm:
        return alone(llm)


def test_in_any_batch_cold_and_warm(dtype, folder, expected):
    with engine(folder, dtype) as llm:
        assert bits(llm, EVERYTHING) == expected
        assert bits(llm, EVERYTHING) == expected
        llm.reset_prefix_cache()
        for batch in ([7, 0], [3, 3, 3], [*EVERYTHING, *EVERYTHING, *EVERYTHING], [6, 5], [1]):
            assert bits(llm, batch) == [expected[number] for number in batch]


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 333, "max_late_chunk_tokens": 50},
        {"block_size": 64},
        {"max_num_seqs": 3},
        {"max_model_len": 1000},
        {"kv_cache_bytes": 1120 * 2 * 3 * 8 * 128 * 2, "max_num_batched_tokens": 256},
    ],
    ids=["eager", "small_chunks", "late_chunks", "block_64", "three_at_once", "short", "tiny_pool"],
)
def test_with_any_options(options, dtype, folder, expected):
    with engine(folder, dtype, **options) as llm:
        assert bits(llm, EVERYTHING) == expected
        if "kv_cache_bytes" in options:
            assert llm.core.scheduler.num_preemptions > 0


def test_in_fp32(folder):
    with engine(folder, "float32") as llm:
        expected = alone(llm)
    with engine(folder, "float32", max_num_batched_tokens=100, enforce_eager=True) as llm:
        assert bits(llm, EVERYTHING) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_sum_to_the_same_bits_through_peer_memory_and_nccl_whole_and_in_halves(
    dtype, folder, monkeypatch, tmp_path
):
    with engine(folder, dtype, tensor_parallel_size=2, debug_checks=True) as llm:
        assert llm.core._executor.runner.tp.peers is not None
        expected = alone(llm)
        assert bits(llm, EVERYTHING) == expected
    for options in ({"enable_custom_all_reduce": False}, {"enforce_eager": True, "max_num_batched_tokens": 333}):
        with engine(folder, dtype, tensor_parallel_size=2, **options) as llm:
            assert bits(llm, EVERYTHING) == expected
    monkeypatch.setenv("QWEN_ENGINE_OVERLAPPED_TOKENS", "64")  # for the other rank
    monkeypatch.setattr(mixed_step, "MIN_OVERLAPPED_TOKENS", 64)
    plant(tmp_path, "qwen_engine.engine.rank", "module.graph_sizes = lambda *_: module.GraphSizes()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rank, "graph_sizes", lambda *_: GraphSizes())  # padded steps have no halves
    with engine(folder, dtype, tensor_parallel_size=2) as llm:
        assert bits(llm, EVERYTHING) == expected

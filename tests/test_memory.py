"""How much memory goes to the KV cache, and what is said when there is too little."""

from __future__ import annotations

import pytest
import torch

from qwen_engine import LLM
from qwen_engine.config import ModelConfig
from qwen_engine.engine import memory, rank
from qwen_engine.errors import ConfigError

GIB = 1 << 30
CPU = torch.device("cpu")
TOTAL, WEIGHTS, ACTIVATIONS = 140 * GIB, 16 * GIB, 4 * GIB


def kv_bytes(free: int, utilization: float = 0.9, activations: int = ACTIVATIONS) -> int:
    return memory.gpu_kv_bytes(free_bytes=free, total_bytes=TOTAL, step_bytes=activations, utilization=utilization)


def test_gpu_kv_is_what_is_free_less_the_users_share_and_a_steps_needs():
    assert kv_bytes(TOTAL - WEIGHTS) == pytest.approx(0.9 * TOTAL - WEIGHTS - ACTIVATIONS, abs=1)
    assert kv_bytes(TOTAL - WEIGHTS, utilization=1.0) == TOTAL - WEIGHTS - ACTIVATIONS


@pytest.mark.parametrize("change", [5 * GIB, -5 * GIB])
def test_mem_01_another_process_moves_the_pool_by_what_it_takes_and_no_more(change):
    """There is one reading of free memory; what a step needs comes from this process's own allocator."""
    assert kv_bytes(TOTAL - WEIGHTS + change) - kv_bytes(TOTAL - WEIGHTS) == change


def test_mem_01_too_little_is_never_negative_and_the_error_gives_both_amounts():
    assert kv_bytes(GIB) == 0
    assert kv_bytes(0, activations=TOTAL) == 0
    for available in (0, 147456 * 16 - 1):
        with pytest.raises(ConfigError, match=f"needs {147456 * 16} bytes, {available} are left"):
            memory.num_kv_blocks(kv_bytes=available, bytes_per_token=147456, block_size=16)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_block_counts_fill_the_bytes(block_size):
    block = 100 * block_size
    for kv_bytes, blocks in ((block, 1), (10 * block - 1, 9), (10 * block, 10), (10**12, 10**12 // block)):
        assert memory.num_kv_blocks(kv_bytes=kv_bytes, bytes_per_token=100, block_size=block_size) == blocks


def test_cpu_kv_is_a_quarter_of_what_is_available_at_most_4_gib_and_what_requests_can_use():
    assert memory.cpu_kv_bytes(available_bytes=100 * GIB, useful_bytes=100 * GIB) == 4 * GIB
    assert memory.cpu_kv_bytes(available_bytes=4 * GIB, useful_bytes=100 * GIB) == GIB
    assert memory.cpu_kv_bytes(available_bytes=100 * GIB, useful_bytes=1000) == 1000
    assert 0 < memory.available_host_bytes() < 2**50


def test_a_cpu_pool_holds_every_running_request_at_full_length(tiny_model):
    with LLM(tiny_model, device="cpu", skip_tokenizer_init=True, max_num_seqs=3, max_model_len=100) as llm:
        assert llm._core.scheduler.block_manager.num_blocks >= 3 * -(-100 // 16)


def test_weights_that_do_not_fit_are_refused_with_both_amounts():
    memory.check_weights_fit(16 * GIB, 16 * GIB, CPU)
    with pytest.raises(ConfigError, match=r"cpu: the weights need 16.00 GiB, 8.00 GiB are free"):
        memory.check_weights_fit(16 * GIB, 8 * GIB, CPU)


def test_a_model_larger_than_memory_is_refused_before_anything_is_allocated(make_tiny_model, monkeypatch):
    monkeypatch.setattr(rank.memory, "available_host_bytes", lambda: 1000)
    monkeypatch.setattr(rank, "Qwen3Model", None)
    with pytest.raises(ConfigError, match="not enough memory on cpu"):
        LLM(make_tiny_model(), device="cpu", skip_tokenizer_init=True)


def test_a_kv_cache_larger_than_memory_is_refused_with_both_amounts(tiny_model):
    with pytest.raises(ConfigError, match=r"kv_cache_bytes is 1125899906842624 \(1048576.00 GiB\), .* GiB are free"):
        LLM(tiny_model, device="cpu", skip_tokenizer_init=True, kv_cache_bytes=2**50)


def test_a_kv_cache_below_one_block_is_refused_with_both_amounts(tiny_model):
    bytes_per_token = ModelConfig.from_folder(tiny_model).kv_bytes_per_token(4)
    options = {"device": "cpu", "skip_tokenizer_init": True, "block_size": 32}
    with pytest.raises(ConfigError, match=f"32 tokens needs {32 * bytes_per_token} bytes, 1000 are left"):
        LLM(tiny_model, kv_cache_bytes=1000, **options)
    with LLM(tiny_model, kv_cache_bytes=32 * bytes_per_token, **options) as llm:
        assert llm._core.scheduler.block_manager.num_blocks == 1


def test_a_pool_below_the_context_length_is_said_in_a_warning(tiny_model, caplog):
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_bytes": 100_000}
    with LLM(tiny_model, **options):
        assert "less than max_model_len 512" in caplog.text


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_the_pool_has_the_bytes_that_were_asked_for(dtype, size, tiny_model):
    with LLM(tiny_model, device="cpu", skip_tokenizer_init=True, dtype=dtype, kv_cache_bytes=10**6) as llm:
        pool = llm._core._executor.runner.kv_cache
        block_bytes = ModelConfig.from_folder(tiny_model).kv_bytes_per_token(size) * 16
        assert pool.nbytes == llm._core.scheduler.block_manager.num_blocks * block_bytes
        assert 10**6 - block_bytes < pool.nbytes <= 10**6

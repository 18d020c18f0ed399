"""The prefill kernel for Hopper, through the function that chooses it, against fp64 formulas."""

import kernel_checks as checks
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

from qwen_engine.kernels import gpu  # noqa: E402
from qwen_engine.kernels.gpu import common, prefill  # noqa: E402

if prefill.hopper_attention(torch.device("cuda", 0)) is None:
    pytest.skip("no Hopper GPU, or not the Triton that the kernel is written for", allow_module_level=True)

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
MIXED = [(300, 5000), (1, 900), (0, 0), (1000, 1000), (1, 16), (129, 129), (7, 411), (5, 0), (2, 127)]


@pytest.fixture
def hopper_calls(monkeypatch):
    """Arguments of every call of the kernel."""
    calls, real = [], prefill.hopper_attention

    def hopper_attention(device):
        attention = real(device)
        return attention and (lambda *arguments: (calls.append(arguments), attention(*arguments)))

    monkeypatch.setattr(prefill, "hopper_attention", hopper_attention)
    return calls


@pytest.fixture
def any_size(monkeypatch):
    """The kernel is chosen for steps of few tiles too."""
    monkeypatch.setattr(prefill, "fills_hopper", lambda *_: True)


@pytest.mark.parametrize("heads", checks.HEADS, ids=str)
def test_it_takes_any_group(any_size, hopper_calls, heads):
    for spans in (*checks.SPANS, MIXED):
        checks.check_prefill(gpu, "cuda", torch.bfloat16, spans, heads, 128, 16)
    assert len(hopper_calls) == len(checks.SPANS) + 1


@dtypes
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_it_takes_any_block_size(any_size, hopper_calls, dtype, block_size):
    for spans in (*checks.SPANS, MIXED):
        checks.check_prefill(gpu, "cuda", dtype, spans, (16, 2), 128, block_size)
    assert len(hopper_calls) == len(checks.SPANS) + 1


@pytest.mark.parametrize("heads", [(32, 4), (32, 8), (64, 8), (40, 8), (16, 8)], ids=str)
@pytest.mark.parametrize(
    "spans",
    [[(4400, 4400)], [(4300, 40960), (100, 100)], [(200, 3000)] * 22, [(17, 17 + row) for row in range(300)]],
    ids=["prompt", "long-prefix", "chunks", "300-rows"],
)
def test_it_is_chosen_for_steps_of_many_tiles(hopper_calls, heads, spans):
    checks.check_prefill(gpu, "cuda", torch.bfloat16, spans, heads, 128, 16)
    assert len(hopper_calls) == 1


@pytest.mark.parametrize("strangers", [(0, 40), (17, 0), (64, 300)], ids=str)
def test_it_leaves_queries_of_no_row_alone(any_size, hopper_calls, strangers):
    spans = [(20, 20), (0, 5), (9, 50), (0, 0), (1, 70), *[(0, 3)] * 50]
    for heads in ((32, 4), (40, 8)):
        checks.check_prefill(gpu, "cuda", torch.bfloat16, spans, heads, 128, 16, strangers)
    assert len(hopper_calls) == 2


def test_a_captured_call_gives_the_bits_of_a_call_of_the_rows_alone(hopper_calls):
    """As steps are captured: 64 rows, those without a chunk padding, and tokens in front of and behind the chunks."""
    tokens, heads, kv_heads, num_rows, longest = 1536, 32, 4, 64, 3000
    rng = checks.generator("cuda", 5)
    pages = checks.make_pages(
        rng, [longest] * 12, num_kv_heads=kv_heads, head_dim=128, block_size=16, dtype=torch.bfloat16
    )
    used = pages.block_tables[pages.slots.long(), : -(-longest // 16)].long()
    pages.k_cache[used] = checks.normal(rng, *used.shape, *pages.k_cache.shape[1:], dtype=torch.bfloat16)
    pages.v_cache[used] = checks.normal(rng, *used.shape, *pages.k_cache.shape[1:], dtype=torch.bfloat16)
    q = checks.normal(rng, tokens, heads + 2 * kv_heads, 128, dtype=torch.bfloat16)[:, :heads]
    caches = (pages.k_cache, pages.v_cache, pages.block_tables)
    slots = torch.full((num_rows,), -1, dtype=torch.int32, device="cuda")
    query_start = torch.zeros(num_rows + 1, dtype=torch.int32, device="cuda")
    seq_lens = slots.clone()
    out = torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device="cuda")
    arguments = (q, *caches, slots, query_start, seq_lens, 0.09, tokens, 40960, out)
    gpu.prefill_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.prefill_attention(*arguments)
    for first, spans in (
        (0, [(1536, 1536)]),
        (3, [(700, 3000), (500, 900), (2, 2), (130, 131)]),
        (60, [(2, 2999 - row) for row in range(12)]),
        (0, [(1400, 1400)]),
    ):
        num_queries = sum(count for count, _ in spans)
        starts = torch.tensor([first, *(count for count, _ in spans)], device="cuda").cumsum(0).int()
        lengths = torch.tensor([length for _, length in spans], dtype=torch.int32, device="cuda")
        slots.fill_(-1)[: len(spans)] = pages.slots[: len(spans)]
        seq_lens.fill_(-1)[: len(spans)] = lengths
        query_start.fill_(first + num_queries)[: len(spans) + 1] = starts
        out.fill_(checks.NAN)
        graph.replay()
        alone = torch.full_like(out, checks.NAN)
        rows = pages.slots[: len(spans)].clone()
        gpu.prefill_attention(q, *caches, rows, starts, lengths, 0.09, tokens, longest, alone)
        written = slice(first, first + num_queries)
        assert not alone[written].isnan().any()
        assert torch.equal(out[written], alone[written])
        assert out[:first].isnan().all()
        assert out[first + num_queries :].isnan().all()
    assert len(hopper_calls) == 6


def test_it_reaches_pages_past_2_to_the_31_elements(hopper_calls):
    heads, block_size, length = 8, 16, 4400
    num_blocks = 2_500_000_000 // (heads * 128 * block_size)
    k_cache = torch.empty(num_blocks, heads, block_size, 128, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.empty_like(k_cache)
    used = -(-length // block_size)
    k_cache[-used:].normal_()
    v_cache[-used:].normal_()
    table = torch.arange(num_blocks - used, num_blocks, dtype=torch.int32, device="cuda")[None]
    q = torch.randn(length, heads, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.zeros(1, dtype=torch.int32, device="cuda")
    query_start = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    out = gpu.prefill_attention(q, k_cache, v_cache, table, slots, query_start, slots + length, 0.1, length, length)
    assert len(hopper_calls) == 1
    k, v = (cache[-used:].transpose(1, 2).flatten(0, 1)[:length].double() for cache in (k_cache, v_cache))
    checks.assert_close(gpu, out, checks.naive_attention(q.double(), k, v, 0.1))


def test_the_environment_turns_it_off_and_outputs_stay_right(monkeypatch):
    device = torch.device("cuda", 0)
    spans = [(1200, 1200), (400, 5000)]
    checks.check_prefill(gpu, "cuda", torch.bfloat16, spans, (32, 4), 128, 16)
    monkeypatch.setenv("QWEN_ENGINE_HOPPER", "0")
    asked = (common.has_hopper_kernels, prefill.hopper_attention)
    try:
        for function in asked:
            function.cache_clear()
        assert prefill.hopper_attention(device) is None
        checks.check_prefill(gpu, "cuda", torch.bfloat16, spans, (32, 4), 128, 16)
    finally:
        monkeypatch.undo()
        for function in asked:
            function.cache_clear()


def test_descriptors_keep_no_cache_allocated(hopper_calls):
    length = 4400
    k_cache = torch.zeros(16 * length, 1, 16, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(-(-length // 16), dtype=torch.int32, device="cuda")[None]
    q = torch.zeros(length, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.zeros(1, dtype=torch.int32, device="cuda")
    query_start = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    gpu.prefill_attention(q, k_cache, k_cache, table, slots, query_start, slots + length, 0.1, length, length)
    assert len(hopper_calls) == 1
    hopper_calls.clear()
    size, before = k_cache.nbytes, torch.cuda.memory_allocated()
    del k_cache
    assert torch.cuda.memory_allocated() <= before - size

"""The compiled Triton kernels on a CUDA GPU against fp64 formulas, over a large grid."""

import random

import kernel_checks as checks
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

from qwen_engine import kernels  # noqa: E402
from qwen_engine.kernels import gpu, reference  # noqa: E402

dtypes = pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
head_shapes = pytest.mark.parametrize(
    ("head_dim", "block_size"), [(64, 16), (128, 8), (128, 16), (128, 128)], ids=lambda v: str(v)
)
REAL_HEADS = ((16, 8), (32, 8), (40, 8), (64, 8), (32, 4))


def lengths(batch: int, longest: int) -> list[int]:
    """Lengths spread over orders of magnitude, the longest among them."""
    rng = random.Random(batch * longest)
    return [longest, *(int(longest ** rng.random()) for _ in range(batch - 1))]


@dtypes
@pytest.mark.parametrize(("tokens", "hidden"), checks.ROWS + checks.LARGE_ROWS)
def test_norms_silu_and_embedding_equal_their_formula(dtype, tokens, hidden):
    checks.check_rms_norm(gpu, "cuda", dtype, tokens, hidden)
    checks.check_add_rms_norm(gpu, "cuda", dtype, tokens, hidden)
    checks.check_silu_mul(gpu, "cuda", dtype, tokens, hidden)
    checks.check_embed_tokens(gpu, "cuda", dtype, tokens, hidden)


def test_add_rms_norm_uses_the_sum_before_rounding():
    checks.check_norm_uses_the_sum_before_rounding(gpu, "cuda")


@dtypes
@head_shapes
@pytest.mark.parametrize("heads", checks.HEADS + REAL_HEADS, ids=str)
def test_rope_writes_only_the_pages_of_live_tokens(dtype, heads, head_dim, block_size):
    checks.check_qk_norm_rope_kv_write(gpu, "cuda", dtype, 67, heads, head_dim, block_size)


@dtypes
@head_shapes
@pytest.mark.parametrize("heads", checks.HEADS[::2], ids=str)
def test_attention_around_block_and_tile_edges_equals_fp64(dtype, heads, head_dim, block_size):
    for seq_lens in checks.SEQ_LENS:
        for programs in (None, 1, 3 * len(seq_lens) * heads[1]):
            checks.check_decode(gpu, "cuda", dtype, seq_lens, heads, head_dim, block_size, programs)
    for spans in checks.SPANS:
        checks.check_prefill(gpu, "cuda", dtype, spans, heads, head_dim, block_size)


@pytest.mark.parametrize("head_dim", [16, 32, 256])
@dtypes
def test_attention_takes_other_head_sizes(dtype, head_dim):
    checks.check_decode(gpu, "cuda", dtype, [130, 0, 70], (4, 2), head_dim, 16)
    checks.check_prefill(gpu, "cuda", dtype, [(130, 130), (0, 0), (1, 70), (40, 200)], (4, 2), head_dim, 16)
    checks.check_qk_norm_rope_kv_write(gpu, "cuda", dtype, 67, (4, 2), head_dim, 16)


@dtypes
@pytest.mark.parametrize("heads", REAL_HEADS, ids=str)
@pytest.mark.parametrize(("batch", "longest"), [(1, 4096), (3, 40960), (16, 16384), (64, 4096)])
def test_decode_attention_over_long_contexts_equals_fp64(dtype, heads, batch, longest):
    for programs in (None, 1, 4096):
        checks.check_decode(gpu, "cuda", dtype, lengths(batch, longest), heads, 128, 16, programs)


@dtypes
@pytest.mark.parametrize("heads", REAL_HEADS, ids=str)
@pytest.mark.parametrize(
    "spans",
    [
        [(2048, 2048)],
        [(513, 40960), (1, 1)],
        [(300, 5000), (1, 9000), (0, 0), (1000, 1000), (1, 16), (129, 129), (7, 4099)],
        [(1, length) for length in lengths(60, 4096)] + [(511, 1500)],
    ],
    ids=["prompt", "long-prefix", "mixed", "decodes-and-a-chunk"],
)
def test_prefill_attention_over_long_contexts_equals_fp64(dtype, heads, spans):
    checks.check_prefill(gpu, "cuda", dtype, spans, heads, 128, 16)


@dtypes
@pytest.mark.parametrize("strangers", [(0, 40), (17, 0), (64, 300)], ids=str)
def test_prefill_attention_leaves_queries_of_no_row_alone(dtype, strangers):
    spans = [(20, 20), (0, 5), (9, 50), (0, 0), (1, 70), *[(0, 3)] * 50]
    for heads in REAL_HEADS:
        checks.check_prefill(gpu, "cuda", dtype, spans, heads, 128, 16, strangers)


@dtypes
@pytest.mark.parametrize("seq_lens", [[7000, *[0] * 255], [1, 64, 33, 0], [0, 0], lengths(60, 4096) + [0] * 40])
def test_the_device_counts_the_live_rows_and_shares_out_the_programs(dtype, seq_lens):
    for heads in REAL_HEADS:
        checks.check_decode(gpu, "cuda", dtype, seq_lens, heads, 128, 16, max_seq_len=40960, live_rows=True)


def test_attention_reaches_pages_past_2_to_the_31_elements():
    """A pool of 2.5e9 elements whose last pages hold the sequence."""
    heads, head_dim, block_size, length = 8, 128, 16, 100
    num_blocks = 2_500_000_000 // (heads * head_dim * block_size)
    k_cache = torch.empty(num_blocks, heads, block_size, head_dim, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.empty_like(k_cache)
    used = -(-length // block_size)
    table = torch.arange(num_blocks - used, num_blocks, dtype=torch.int32, device="cuda")[None]
    k_cache[-used:].normal_()
    v_cache[-used:].normal_()
    q = torch.randn(length, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    slots = torch.zeros(1, dtype=torch.int32, device="cuda")
    seq_lens = slots + length
    query_start = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    out = gpu.prefill_attention(q, k_cache, v_cache, table, slots, query_start, seq_lens, 0.1, length, length)
    splits = checks.split_decodes(gpu, k_cache, v_cache, table, slots, seq_lens, length)
    last = gpu.decode_attention(q[-1:], k_cache, v_cache, table, slots, seq_lens, 0.1, splits)
    k, v = (cache[-used:].transpose(1, 2).flatten(0, 1)[:length].double() for cache in (k_cache, v_cache))
    expected = checks.naive_attention(q.double(), k, v, 0.1)
    checks.assert_close(gpu, out, expected)
    checks.assert_close(gpu, last, expected[-1:])


@dtypes
@pytest.mark.parametrize(
    ("rows", "vocab_size", "vocab_start"), [*checks.VOCABULARIES, (5, 20000, 75966), (64, 4096, 0)]
)
def test_gumbel_argmax_equals_the_noise_of_the_definition(dtype, rows, vocab_size, vocab_start):
    checks.check_gumbel_argmax(gpu, "cuda", dtype, min(rows, 8), vocab_size, vocab_start)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size", "vocab_start"), [*checks.VOCABULARIES, (5, 20000, 75966)])
def test_slot_argmax_equals_gumbel_argmax_of_the_slots(dtype, rows, vocab_size, vocab_start):
    checks.check_slot_argmax(gpu, "cuda", dtype, rows, vocab_size, vocab_start)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_the_largest_key_of_all_shards_is_the_winner_of_the_whole(num_shards):
    checks.check_keys_of_shards(gpu, "cuda", num_shards)


@pytest.mark.parametrize("rows", checks.BATCHES)
def test_cgr_01_decode_inputs_and_advance_leave_padding_alone(rows):
    checks.check_decode_inputs(gpu, "cuda", rows)
    checks.check_advance(gpu, "cuda", rows)


@pytest.mark.parametrize("max_seq_len", [64, 300, 40960])
def test_the_bound_of_the_lengths_is_only_a_bound(max_seq_len):
    checks.check_decode(gpu, "cuda", torch.float32, [1, 64, 0, 33], (4, 2), 64, 16, max_seq_len=max_seq_len)


def test_smp_08_greedy_takes_the_lowest_of_equal_maxima_in_any_batch():
    checks.check_greedy_ties_and_masks(gpu, "cuda")


def test_smp_04_noise_of_a_seeded_row_ignores_the_batch():
    checks.check_noise_ignores_the_batch(gpu, "cuda")


def test_sampled_tokens_equal_those_of_the_reference():
    """Flat logits of a real vocabulary: the noise alone decides, its far tail above all."""
    rows = 256
    logits = torch.zeros(rows, 151936, device="cuda")
    seeds = torch.arange(rows, device="cuda") * 2**33 + 5
    positions = torch.arange(rows, device="cuda") + 2**31
    heat = torch.ones(rows, device="cuda")
    chosen = gpu.gumbel_argmax(logits, heat, seeds, positions)
    expected = reference.gumbel_argmax(logits, heat, seeds, positions)
    # Two tokens may have the same 23 bits at the top, where one step of u moves the noise by 0.1 or more.
    assert torch.equal(chosen, expected)


@dtypes
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("vocab_size", "spread"), [(3, 1.0), (100, 3.0), (4097, 2.0), (20000, 5.0)])
def test_filters_keep_what_their_definitions_keep(dtype, vocab_size, spread, ties):
    checks.check_lowest_kept(gpu, "cuda", dtype, vocab_size, spread, ties=ties)


@dtypes
@pytest.mark.parametrize(("vocab_size", "top_k"), [(131, 70), (20011, 20), (20011, 6000), (151936, 50)])
def test_limits_of_rows_of_every_kind(dtype, vocab_size, top_k):
    checks.check_limits_of_rows(gpu, "cuda", dtype, vocab_size, top_k)


def test_captured_filters_follow_logits_and_parameters_that_change_on_the_device():
    rng = checks.generator("cuda", 3)
    logits = checks.normal(rng, 3, 20011, dtype=torch.float32)
    columns = [
        torch.tensor(column, device="cuda") for column in ([1.0] * 3, [5, 2**31, 50], [1.0, 0.9, 0.5], [0.0] * 3)
    ]
    gpu.lowest_kept(logits, *columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lowest = gpu.lowest_kept(logits, *columns)
    for heat in (1.0, 0.3, 0.0):
        logits.copy_(checks.normal(rng, 3, 20011, dtype=torch.float32) * 3)
        columns[0].fill_(heat)
        graph.replay()
        assert torch.equal(lowest, gpu.lowest_kept(logits, *columns))


@pytest.mark.parametrize("temperature", [0.6, 0.7, 0.8, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (40, 1.0), (20, 0.95), (151936, 0.95)])
def test_bounds_that_fall_on_tied_logits_are_the_same_for_all_launches(top_k, top_p, temperature):
    """In bf16 many logits are equal and lie on a grid, as the bounds of the search may."""
    rows, vocab_size = 64, 151936
    rng = torch.Generator("cuda").manual_seed(top_k)
    logits = (torch.randn(rows, vocab_size, device="cuda", generator=rng) * 3).bfloat16()
    heat, none = torch.full((rows,), temperature, device="cuda"), torch.zeros(rows, device="cuda")
    limits = (torch.full((rows,), top_k, device="cuda"), none + top_p, none)
    expected = reference.lowest_kept(logits, heat, *limits)
    for _ in range(3):
        torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda").fill_(float("nan"))  # what is never written
        actual = gpu.lowest_kept(logits, heat, *limits)
        scaled = logits.float() * heat.reciprocal()[:, None]
        kept = [(scaled >= limit[:, None]).sum(dim=1) for limit in (actual, expected)]
        if top_p == 1.0:
            assert torch.equal(*kept)
        else:  # sums of masses may end one logit, and its equals, apart
            assert ((kept[0] - kept[1]).abs() <= 0.01 * kept[1] + 2).all()


def test_a_filtered_draw_is_a_draw_from_what_is_left():
    checks.check_filtered_argmax(gpu, "cuda")


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 5), (9, 300), (5, 4099), (64, 151936)])
def test_masks_biases_and_penalties_change_their_rows_alone(dtype, rows, vocab_size):
    checks.check_adjust_logits(gpu, "cuda", dtype, rows, vocab_size)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 5), (3, 100), (64, 151936), (7, 4097)])
def test_token_logprobs_and_ranks_equal_log_softmax(dtype, rows, vocab_size):
    checks.check_token_logprobs(gpu, "cuda", dtype, rows, vocab_size)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size", "count"), [*checks.BEST, (70, 1000, 1000), (5, 151936, 20)])
def test_best_ids_come_in_the_order_of_a_sort(dtype, rows, vocab_size, count):
    checks.check_best_ids(gpu, "cuda", dtype, rows, vocab_size, count)


@pytest.mark.parametrize("count", [1, 5, 20, 64])
def test_best_ids_of_a_large_batch_are_those_of_the_reference(count):
    logits = torch.randn(300, 151936, device="cuda").bfloat16()  # with many equals
    assert torch.equal(gpu.best_ids(logits, count), reference.best_ids(logits, count))


def test_cuda_tensors_are_dispatched_to_triton():
    x, weight = torch.randn(2, 8, device="cuda"), torch.ones(8, device="cuda")
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), gpu.rms_norm(x, weight, 1e-6))


def test_a_captured_decode_follows_lengths_that_change_on_the_device():
    """The grid comes from the number of rows, the lengths from the device, so one graph serves them all."""
    rng = checks.generator("cuda", 9)
    pages = checks.make_pages(rng, [512, 512], num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    dense = []
    for row in range(2):
        blocks, rows = checks.cache_rows(pages, row, 512)
        k, v = (checks.normal(rng, 512, 2, 64, dtype=torch.float32) for _ in range(2))
        pages.k_cache[blocks, :, rows], pages.v_cache[blocks, :, rows] = k, v
        dense.append((k.double(), v.double()))
    q = checks.normal(rng, 2, 8, 64, dtype=torch.float32)
    seq_lens = torch.tensor([1, 1], dtype=torch.int32, device="cuda")
    tables = (pages.block_tables, pages.slots, seq_lens)

    def decode() -> torch.Tensor:
        splits = gpu.split_decodes(pages.k_cache, *tables, 512)
        queries = q.clone()  # a launch between the two
        return gpu.decode_attention(queries, pages.k_cache, pages.v_cache, *tables, 0.125, splits)

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    for pair in ([512, 3], [64, 65], [1, 300]):
        seq_lens.copy_(torch.tensor(pair))
        graph.replay()
        for row, length in enumerate(pair):
            k, v = (t[:length] for t in dense[row])
            checks.assert_close(gpu, out[row : row + 1], checks.naive_attention(q[row : row + 1].double(), k, v, 0.125))

"""The Triton kernels on the CPU, in Triton's interpreter, against fp64 formulas."""

import kernel_checks as checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if torch.cuda.is_available():
    pytest.skip("test_kernels_gpu.py runs the compiled kernels here", allow_module_level=True)
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from qwen_engine.kernels import gpu, reference  # noqa: E402
from qwen_engine.kernels.gpu import (  # noqa: E402
    filters,
    prefill,
    sampling,
)
from qwen_engine.kernels.gpu.common import num_sms  # noqa: E402
from qwen_engine.kernels.gpu.prefill import _rows_and_span  # noqa: E402
from qwen_engine.kernels.gpu.prefill_tiles import sorted_tiles  # noqa: E402
from qwen_engine.kernels.gpu.sampling import noise_bits  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # the interpreter computes for long; it waits for nothing
dtypes = pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)


@dtypes
@pytest.mark.parametrize(("tokens", "hidden"), checks.ROWS)
def test_norms_equal_their_formula(dtype, tokens, hidden):
    checks.check_rms_norm(gpu, "cpu", dtype, tokens, hidden)
    checks.check_add_rms_norm(gpu, "cpu", dtype, tokens, hidden)


def test_add_rms_norm_uses_the_sum_before_rounding():
    checks.check_norm_uses_the_sum_before_rounding(gpu, "cpu")


@dtypes
@pytest.mark.parametrize(("tokens", "width"), checks.ROWS)
def test_silu_mul_and_embedding_equal_their_formula(dtype, tokens, width):
    checks.check_silu_mul(gpu, "cpu", dtype, tokens, width)
    checks.check_embed_tokens(gpu, "cpu", dtype, tokens, width)


@dtypes
@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (5, 1), (16, 2)], ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 8), (64, 16)])
def test_rope_writes_only_the_pages_of_live_tokens(dtype, heads, head_dim, block_size):
    checks.check_qk_norm_rope_kv_write(gpu, "cpu", dtype, 9, heads, head_dim, block_size)


@dtypes
@pytest.mark.parametrize("seq_lens", checks.SEQ_LENS, ids=str)
@pytest.mark.parametrize("programs", [1, 30])
def test_decode_attention_equals_fp64(dtype, seq_lens, programs):
    checks.check_decode(gpu, "cpu", dtype, seq_lens, (4, 2), 64, 16, programs)


@pytest.mark.parametrize("heads", checks.HEADS, ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 8), (32, 64)])
def test_decode_attention_takes_any_group_head_and_block_size(heads, head_dim, block_size):
    checks.check_decode(gpu, "cpu", torch.float32, [130, 0, 70], heads, head_dim, block_size)


@dtypes
@pytest.mark.parametrize("spans", checks.SPANS, ids=str)
def test_prefill_attention_equals_fp64(dtype, spans):
    checks.check_prefill(gpu, "cpu", dtype, spans, (4, 2), 64, 16)


@pytest.mark.parametrize("heads", checks.HEADS, ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 8), (32, 64)])
def test_prefill_attention_takes_any_group_head_and_block_size(heads, head_dim, block_size):
    spans = [(20, 20), (9, 50), (0, 0), (1, 70)]
    checks.check_prefill(gpu, "cpu", torch.float16, spans, heads, head_dim, block_size)


def _hopper_tensors(*, dtype=torch.bfloat16, heads=(8, 1), head_dim=128, block_size=16, tokens=300):
    num_heads, num_kv_heads = heads
    q = torch.zeros(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)[:, :num_heads]
    caches = (torch.zeros(40, num_kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2))
    return q, *caches, torch.zeros(tokens, num_heads, head_dim, dtype=dtype)


def test_the_kernel_for_hopper_takes_what_it_is_written_for():
    q, k, v, out = _hopper_tensors()
    assert prefill.suits_hopper(q, k, v, out)
    assert prefill.suits_hopper(*_hopper_tensors(dtype=torch.float16, heads=(5, 5), block_size=8))
    assert not prefill.suits_hopper(*_hopper_tensors(dtype=torch.float32))
    assert not prefill.suits_hopper(*_hopper_tensors(head_dim=64))
    assert not prefill.suits_hopper(*_hopper_tensors(block_size=4))
    assert not prefill.suits_hopper(*_hopper_tensors(heads=(65, 1)))
    assert not prefill.suits_hopper(q, k[:, :, 8:], v, out)
    assert not prefill.suits_hopper(q, k, v[:, :, ::2], out)
    assert not prefill.suits_hopper(q, k.half(), v, out)
    assert not prefill.suits_hopper(q, k, v, out.half())
    assert not prefill.suits_hopper(q[:, ::2], k, v, out)
    assert not prefill.suits_hopper(q.flatten()[4 : 4 + 128 * 8].view(1, 8, 128), k, v, out)


def test_the_kernel_for_hopper_is_chosen_for_many_tiles_that_suit_it(monkeypatch):
    calls = []
    monkeypatch.setattr(prefill, "hopper_attention", lambda device: lambda *args: calls.append(args[0].shape[0]))
    least = prefill._HOPPER_ROWS_PER_SM * num_sms(torch.device("cpu")) // 8
    one = torch.zeros(1, dtype=torch.int32)
    steps = (
        (least, 256, torch.bfloat16),
        (least - 1, 256, torch.bfloat16),
        (least, 255, torch.bfloat16),
        (least, 256, torch.float32),
    )
    for tokens, max_seq_len, dtype in steps:
        q, k, v, out = _hopper_tensors(tokens=tokens, dtype=dtype)
        starts = torch.zeros(2, dtype=torch.int32)  # of a row without queries
        arguments = (q, k, v, torch.zeros(1, 40, dtype=torch.int32), one, starts, one, 0.1, 8, max_seq_len)
        assert gpu.prefill_attention(*arguments, out) is out
    assert calls == [least]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9000), st.booleans()), min_size=1, max_size=90),
    st.integers(0, 70),
    st.integers(0, 70),
    st.sampled_from([1, 2, 5, 8]),
)
def test_tiles_of_chunks_are_sorted_by_their_keys(rows, front, behind, group):
    """rows: (queries, context before them, padding); front, behind: queries of nobody."""
    counts, contexts, paddings = zip(*rows)
    starts = [front + sum(counts[:row]) for row in range(len(rows) + 1)]
    lengths = [count + context if count else 0 for count, context in zip(counts, contexts)]
    slots = [-1 if is_padding else 3 * row for row, is_padding in enumerate(paddings)]
    tokens, size = starts[-1] + behind, 2 * (64 // group)
    with checks.poisoned_allocations():
        tiles = sorted_tiles(torch.empty(256, 1), *map(_int32, (slots, starts, lengths)), tokens, group).tolist()
    found = [tuple(tile[:6]) for tile in tiles if 0 <= tile[2] < tile[1]]
    expected = []
    for start, count, length, slot in zip(starts, counts, lengths, slots):
        for first in range(0, count, size):
            keys = min(length - count + first + size, length)
            expected.append((start, count, first, slot, length, 0 if slot < 0 else keys))
    assert sorted(found) == sorted(expected)
    keys = [tile[5] for tile in tiles]
    assert keys == sorted(keys, reverse=True)


def _int32(values):
    return torch.tensor(values, dtype=torch.int32)


def test_a_cpu_has_no_kernel_for_hopper():
    assert prefill.hopper_attention(torch.device("cpu")) is None


@triton.jit
def _store_noise_bits(seed, position, out, first_id, COUNT: tl.constexpr):
    bits = noise_bits(tl.load(seed), tl.load(position), first_id, COUNT)
    tl.store(out + tl.arange(0, COUNT), bits.to(tl.int64))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 2**40 + 3), (2**63 - 1, 12345), (-(2**63), 1)])
def test_noise_bits_equal_the_reference(seed, position):
    out = torch.empty(64, dtype=torch.int64)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    _store_noise_bits[(1,)](seeds, positions, out, 152, COUNT=64)
    assert torch.equal(out, reference.noise_bits(seeds, positions, 152, 64)[0])


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size", "vocab_start"), checks.VOCABULARIES)
def test_gumbel_argmax_equals_the_noise_of_the_definition(dtype, rows, vocab_size, vocab_start):
    checks.check_gumbel_argmax(gpu, "cpu", dtype, rows, vocab_size, vocab_start)


def test_smp_08_greedy_takes_the_lowest_of_equal_maxima_in_any_batch():
    checks.check_greedy_ties_and_masks(gpu, "cpu")


def test_smp_04_noise_of_a_seeded_row_ignores_the_batch():
    checks.check_noise_ignores_the_batch(gpu, "cpu")


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks, tiles and passes, and too many candidates, without the interpreter's time for large rows."""
    for name, size in {"_CHUNK": 32, "_GROUPS": 4, "_TILE": 32, "_CANDIDATES": 16}.items():
        monkeypatch.setattr(filters, name, size)


@pytest.mark.parametrize("ties", [False, True])
def test_filters_keep_what_their_definitions_keep(small_chunks, ties):
    checks.check_lowest_kept(gpu, "cpu", torch.float32, 70, 2.0, ties=ties)


@pytest.mark.parametrize(("dtype", "top_k"), [(torch.float32, 5), (torch.bfloat16, 60)])
def test_limits_of_rows_of_every_kind(small_chunks, dtype, top_k):
    checks.check_limits_of_rows(gpu, "cpu", dtype, 101, top_k)


def test_a_filtered_draw_is_a_draw_from_what_is_left():
    checks.check_filtered_argmax(gpu, "cpu")


@pytest.mark.parametrize(
    ("rows", "vocab_size", "dtype"),
    [(1, 5, torch.float32), *((9, 300, dtype) for dtype in checks.DTYPES), (5, 4099, torch.bfloat16)],
    ids=str,
)
def test_masks_biases_and_penalties_change_their_rows_alone(dtype, rows, vocab_size):
    checks.check_adjust_logits(gpu, "cpu", dtype, rows, vocab_size)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size", "vocab_start"), checks.VOCABULARIES)
def test_slot_argmax_equals_gumbel_argmax_of_the_slots(dtype, rows, vocab_size, vocab_start):
    checks.check_slot_argmax(gpu, "cpu", dtype, rows, vocab_size, vocab_start)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_the_largest_key_of_all_shards_is_the_winner_of_the_whole(num_shards):
    checks.check_keys_of_shards(gpu, "cpu", num_shards)


@pytest.mark.parametrize("rows", checks.BATCHES)
def test_cgr_01_decode_inputs_and_advance_leave_padding_alone(rows):
    checks.check_decode_inputs(gpu, "cpu", rows)
    checks.check_advance(gpu, "cpu", rows)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size", "vocab_start"), checks.VOCABULARIES)
def test_token_logprobs_and_ranks_equal_log_softmax(dtype, rows, vocab_size, vocab_start):
    checks.check_token_logprobs(gpu, "cpu", dtype, rows, vocab_size)


@pytest.mark.parametrize(
    ("rows", "vocab_size", "count", "dtype"),
    [(*shape, torch.float32) for shape in checks.BEST]
    + [(*shape, dtype) for shape in ((7, 2047, 5), (5, 6200, 20)) for dtype in (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_best_ids_come_in_the_order_of_a_sort(dtype, rows, vocab_size, count):
    checks.check_best_ids(gpu, "cpu", dtype, rows, vocab_size, count)


@pytest.mark.parametrize("count", [3, 16, 17, 40])
def test_best_ids_of_many_chunks_and_more_than_a_chunk_has(count, monkeypatch):
    monkeypatch.setattr(sampling, "_BEST_CHUNK", 16)
    monkeypatch.setattr(sampling, "_MOST_BEST", 40)
    checks.check_best_ids(gpu, "cpu", torch.float32, 10, 301, count)


def _split(lengths, kv_heads, programs, live=None):
    """The pieces of each row, as (start, end), and what the kernel wrote for the rows in several."""
    cache = torch.empty(1, kv_heads, 16, 128, dtype=torch.bfloat16)
    slots = torch.tensor([-1 if n == 0 else row for row, n in enumerate(lengths)], dtype=torch.int32)
    live_rows = None if live is None else torch.tensor([live], dtype=torch.int32)
    with checks.poisoned_allocations():
        splits = gpu.split_decodes(
            cache,
            torch.empty(256, 1),
            slots,
            torch.tensor(lengths, dtype=torch.int32),
            max(lengths),
            live_rows,
            programs,
        )
    found, ended = [[] for _ in lengths], False
    first_of = {}
    for index, (row, slot, start, end, count, *_) in enumerate(splits.pieces.tolist()):
        assert not (ended and row >= 0), "a piece behind the end of the list"
        ended |= row < 0
        if row >= 0:
            assert slot == slots[row]
            first_of.setdefault(row, index)
            assert index - first_of[row] == len(found[row]) < count
            found[row].append((start, end))
    split_rows = splits.split_rows[: splits.num_split_rows.item()].tolist()
    joined = {row: (first, count) for row, first, count, _ in split_rows}
    assert joined == {row: (first_of[row], len(found[row])) for row in first_of if len(found[row]) > 1}
    return found


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.just(0), st.integers(1, 600), st.integers(1, 40960)), min_size=1, max_size=100),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 40, 528]),
)
def test_the_pieces_of_a_batch_are_its_rows(lengths, kv_heads, programs):
    for length, pieces in zip(lengths, _split(lengths, kv_heads, programs)):
        starts, ends = zip(*pieces)
        assert starts[0] == 0
        assert ends[-1] == length
        assert starts[1:] == ends[:-1]
        assert all(start % 16 == 0 for start in starts)
        assert len(pieces) == 1 or all(start < end for start, end in pieces)


def test_pieces_keep_the_device_busy_and_equal_rows_whole():
    """528 programs at once, as on 132 multiprocessors."""
    assert len(_split([4096], 8, 528)[0]) == 32  # of 128 tokens
    assert len(_split([40960], 1, 528)[0]) == 99  # not more, which have to be joined
    assert {len(pieces) for pieces in _split([1152] * 64, 8, 528)} == {1}
    assert {len(pieces) for pieces in _split([300] * 100, 8, 528)} == {1}
    assert {len(pieces) for pieces in _split([1152] * 16, 8, 528)} == {15}
    counts = [len(pieces) for pieces in _split([300] * 63 + [40960], 8, 528)]
    assert counts[:63] == [1] * 63
    assert counts[63] > 80


def test_only_live_rows_have_pieces():
    assert [len(pieces) for pieces in _split([70, 900, 50, 60], 2, 8, live=2)][2:] == [0, 0]
    assert _split([0, 0], 2, 8, live=0) == [[], []]


@pytest.mark.parametrize("seq_lens", [[700, 0, 0, 0], [1, 64, 330, 0], [0, 0], [33, 40]], ids=str)
@pytest.mark.parametrize("programs", [1, 7, 64, 512])
def test_the_device_counts_the_live_rows_and_shares_out_the_programs(seq_lens, programs):
    checks.check_decode(gpu, "cpu", torch.float32, seq_lens, (4, 2), 64, 16, programs, 4096, live_rows=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spans",
    [
        [(20, 2100), (3, 700), (0, 0), (0, 900), (1, 1300)],
        [(40, 545), (33, 512), (1, 513), (1, 1)],
        [(200, 1100)],
    ],
    ids=str,
)
def test_prefill_attention_splits_the_keys_of_a_few_tiles(dtype, spans, monkeypatch):
    checks.check_prefill(gpu, "cpu", dtype, spans, (4, 2), 64, 16)


@pytest.mark.parametrize("backend", [gpu, gpu.deterministic], ids=["default", "deterministic"])
def test_padding_of_any_length_gives_zeros(backend):
    q, cache = torch.randn(20, 4, 64), torch.randn(80, 2, 16, 64)
    tables = torch.arange(80, dtype=torch.int32).view(1, 80)
    slots, seq_lens = (torch.tensor([number], dtype=torch.int32) for number in (-1, 1200))
    starts = torch.tensor([0, 20], dtype=torch.int32)
    out = backend.prefill_attention(q, cache, cache, tables, slots, starts, seq_lens, 0.1, 20, 1200)
    assert torch.equal(out, torch.zeros_like(out))


@triton.jit
def _store_tiles_and_spans(query_start, seq_lens, out, rows, num_kv_heads, max_pieces):
    tiles, spans, span = _rows_and_span(query_start, seq_lens, rows, num_kv_heads, max_pieces, 64, 32, 64, True)
    row = tl.arange(0, 64)
    tl.store(out + row, tiles)
    tl.store(out + 64 + row, spans)
    tl.store(out + 128, span)


@pytest.mark.parametrize(
    ("rows", "tiles", "spans", "span"),
    [
        ([(20, 2100), (3, 700), (0, 0), (0, 900), (33, 1300)], [1, 1, 0, 0, 2], [5, 2, 1, 2, 3], 512),
        ([(64, 32_000)], [2], [16], 2048),  # 2 * 2 * 32000 keys in 64 pieces
        ([(1056, 32_000)], [33], [1], 2**30),  # enough tiles as it is
    ],
    ids=["short-spans", "long-spans", "none"],
)
def test_prefill_work_is_cut_into_as_many_pieces_as_even_out(rows, tiles, spans, span):
    query_lens, seq_lens = (torch.tensor(part, dtype=torch.int32) for part in zip(*rows))
    query_start = torch.cat((torch.zeros(1), query_lens.cumsum(0))).int()
    out = torch.full((129,), -1, dtype=torch.int32)
    _store_tiles_and_spans[(1,)](query_start, seq_lens, out, len(rows), 2, 64)
    assert out[: len(rows)].tolist() == tiles
    assert out[64 : 64 + len(rows)].tolist() == spans
    assert out[128] == span


@pytest.mark.parametrize("strangers", [(0, 9), (5, 0), (17, 40)], ids=str)
def test_prefill_attention_leaves_queries_of_no_row_alone(strangers):
    spans = [(20, 20), (0, 5), (9, 50), (0, 0), (1, 70), (0, 3)]
    checks.check_prefill(gpu, "cpu", torch.float32, spans, (4, 2), 64, 16, strangers)

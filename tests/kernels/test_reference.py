"""The torch reference against fp64 formulas."""

import kernel_checks as checks
import pytest
import torch

from qwen_engine import kernels
from qwen_engine.kernels import reference

dtypes = pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)


@dtypes
@pytest.mark.parametrize(("tokens", "hidden"), checks.ROWS)
def test_rms_norm_equals_its_formula(dtype, tokens, hidden):
    checks.check_rms_norm(reference, "cpu", dtype, tokens, hidden)


@dtypes
@pytest.mark.parametrize(("tokens", "hidden"), checks.ROWS)
def test_add_rms_norm_adds_in_place_and_norms_the_sum(dtype, tokens, hidden):
    checks.check_add_rms_norm(reference, "cpu", dtype, tokens, hidden)


def test_add_rms_norm_uses_the_sum_before_rounding():
    checks.check_norm_uses_the_sum_before_rounding(reference, "cpu")


@dtypes
@pytest.mark.parametrize(("tokens", "inter"), checks.ROWS)
def test_silu_mul_equals_its_formula(dtype, tokens, inter):
    checks.check_silu_mul(reference, "cpu", dtype, tokens, inter)


@dtypes
@pytest.mark.parametrize(("tokens", "hidden"), checks.ROWS)
def test_embedding_shards_sum_to_the_whole_and_padding_is_zero(dtype, tokens, hidden):
    checks.check_embed_tokens(reference, "cpu", dtype, tokens, hidden)


@dtypes
@pytest.mark.parametrize("heads", checks.HEADS, ids=str)
@pytest.mark.parametrize("block_size", [8, 16])
def test_rope_writes_only_the_pages_of_live_tokens(dtype, heads, block_size):
    checks.check_qk_norm_rope_kv_write(reference, "cpu", dtype, 19, heads, 24, block_size)


@dtypes
@pytest.mark.parametrize("seq_lens", checks.SEQ_LENS, ids=str)
@pytest.mark.parametrize("heads", checks.HEADS, ids=str)
def test_decode_attention_equals_fp64(dtype, seq_lens, heads):
    checks.check_decode(reference, "cpu", dtype, seq_lens, heads, 20, 8)


@dtypes
@pytest.mark.parametrize("spans", checks.SPANS, ids=str)
@pytest.mark.parametrize("heads", checks.HEADS, ids=str)
def test_prefill_attention_equals_fp64(dtype, spans, heads):
    checks.check_prefill(reference, "cpu", dtype, spans, heads, 64, 16)


@pytest.mark.parametrize("strangers", [(0, 9), (17, 40)], ids=str)
def test_prefill_attention_leaves_queries_of_no_row_alone(strangers):
    spans = [(20, 20), (0, 5), (9, 50), (0, 0), (1, 70), (0, 3)]
    checks.check_prefill(reference, "cpu", torch.float32, spans, (4, 2), 64, 16, strangers)


@dtypes
def test_attention_of_long_rows_equals_fp64(dtype):
    checks.check_prefill(reference, "cpu", dtype, [(700, 1500), (1, 2049)], (8, 2), 128, 32)
    checks.check_decode(reference, "cpu", dtype, [4097, 1], (8, 1), 128, 16)


def test_attention_of_a_row_ignores_the_rest_of_the_batch():
    """Bit for bit: the row alone, and the same row between others."""
    rng = checks.generator("cpu", 1)
    lengths = [40, 33, 0, 25]
    pages = checks.make_pages(rng, lengths, num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32)
    for row, length in enumerate(lengths):
        if length:
            blocks, rows = checks.cache_rows(pages, row, length)
            for cache in (pages.k_cache, pages.v_cache):
                cache[blocks, :, rows] = checks.normal(rng, length, 2, 32, dtype=torch.float32)
    q = checks.normal(rng, 4, 4, 32, dtype=torch.float32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    tables = (pages.k_cache, pages.v_cache, pages.block_tables)
    together = reference.decode_attention(q, *tables, pages.slots, seq_lens, 0.2, (40,))
    alone = reference.decode_attention(q[1:2], *tables, pages.slots[1:2], seq_lens[1:2], 0.2, (33,))
    assert torch.equal(together[1:2], alone)


def test_philox_gives_the_published_numbers():
    """The known-answer vectors that the authors of Random123 publish for philox4x32-10."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    vectors = (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones, ones, ones, ones), (ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    )
    for counter, key, expected in vectors:
        words = reference.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert tuple(map(int, words)) == expected
        assert tuple(checks.naive_philox(counter, key)) == expected


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 2**40 + 3), (2**63 - 1, 12345), (-(2**63), 1)])
def test_noise_bits_follow_seed_position_and_token(seed, position):
    bits = reference.noise_bits(torch.tensor([seed]), torch.tensor([position]), 6, 41)
    assert bits[0].tolist() == checks.naive_noise_bits(seed, position, 6, 41)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size", "vocab_start"), checks.VOCABULARIES)
def test_gumbel_argmax_equals_the_noise_of_the_definition(dtype, rows, vocab_size, vocab_start):
    checks.check_gumbel_argmax(reference, "cpu", dtype, rows, vocab_size, vocab_start)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size", "vocab_start"), checks.VOCABULARIES)
def test_slot_argmax_equals_gumbel_argmax_of_the_slots(dtype, rows, vocab_size, vocab_start):
    checks.check_slot_argmax(reference, "cpu", dtype, rows, vocab_size, vocab_start)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_the_largest_key_of_all_shards_is_the_winner_of_the_whole(num_shards):
    checks.check_keys_of_shards(reference, "cpu", num_shards)


@pytest.mark.parametrize("rows", checks.BATCHES)
def test_cgr_01_decode_inputs_and_advance_leave_padding_alone(rows):
    checks.check_decode_inputs(reference, "cpu", rows)
    checks.check_advance(reference, "cpu", rows)


def test_smp_08_greedy_takes_the_lowest_of_equal_maxima_in_any_batch():
    checks.check_greedy_ties_and_masks(reference, "cpu")


def test_smp_04_noise_of_a_seeded_row_ignores_the_batch():
    checks.check_noise_ignores_the_batch(reference, "cpu")


def test_smp_10_frequencies_of_sampled_tokens_match_the_softmax():
    """Chi-square with 7 degrees of freedom over 4000 seeds: 24.3 is passed by chance once in a thousand."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.0])
    draws = 4000
    zeros = torch.zeros(draws, dtype=torch.int64)
    heat = torch.full((draws,), 0.8)
    chosen = reference.gumbel_argmax(logits.expand(draws, -1), heat, torch.arange(draws), zeros)
    expected = torch.softmax(logits / 0.8, dim=0) * draws
    observed = torch.bincount(chosen, minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


@dtypes
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("vocab_size", "spread"), [(3, 1.0), (100, 3.0), (2500, 2.0)])
def test_filters_keep_what_their_definitions_keep(dtype, vocab_size, spread, ties):
    checks.check_lowest_kept(reference, "cpu", dtype, vocab_size, spread, ties=ties)


@dtypes
@pytest.mark.parametrize(("vocab_size", "top_k"), [(131, 70), (2500, 20)])
def test_limits_of_rows_of_every_kind(dtype, vocab_size, top_k):
    checks.check_limits_of_rows(reference, "cpu", dtype, vocab_size, top_k)


def test_a_filtered_draw_is_a_draw_from_what_is_left():
    checks.check_filtered_argmax(reference, "cpu")


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 5), (9, 300), (5, 4099)])
def test_masks_biases_and_penalties_change_their_rows_alone(dtype, rows, vocab_size):
    checks.check_adjust_logits(reference, "cpu", dtype, rows, vocab_size)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size", "vocab_start"), checks.VOCABULARIES)
def test_token_logprobs_and_ranks_equal_log_softmax(dtype, rows, vocab_size, vocab_start):
    checks.check_token_logprobs(reference, "cpu", dtype, rows, vocab_size)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size", "count"), [*checks.BEST, (70, 1000, 1000)])
def test_best_ids_come_in_the_order_of_a_sort(dtype, rows, vocab_size, count):
    checks.check_best_ids(reference, "cpu", dtype, rows, vocab_size, count)


def test_cpu_tensors_are_dispatched_to_the_reference():
    x = torch.randn(2, 8)
    weight = torch.ones(8)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))

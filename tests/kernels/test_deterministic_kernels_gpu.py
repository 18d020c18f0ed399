"""The deterministic kernels, compiled, on a CUDA GPU: right, and the same bits in any batch, tile and chunk."""

import kernel_checks as checks
import pytest
import row_checks
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

from qwen_engine.kernels import gpu  # noqa: E402
from qwen_engine.kernels.gpu.deterministic import attention, products  # noqa: E402

dtypes = pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
impl = gpu.deterministic
SPAN = attention._SPAN


@dtypes
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [*checks.PRODUCTS, (70, 40, 33), (300, 1000, 1024), (4096, 512, 2560)]
)
def test_products_equal_their_formula(dtype, tokens, rows, columns):
    rng = checks.generator("cuda", tokens, rows, columns)
    x = checks.normal(rng, tokens, columns + 16, dtype=dtype)[:, :columns]
    weight = checks.normal(rng, 2 * rows, columns, dtype=dtype) * columns**-0.5
    expected = x.double() @ weight.double().T
    gate, up = expected.chunk(2, dim=1)
    with checks.poisoned_allocations():
        checks.assert_close(impl, impl.linear(x, weight), expected)
        checks.assert_close(impl, impl.gated_linear(x, weight), gate * gate.sigmoid() * up)


@dtypes
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(70, 40, 33), (300, 1000, 1000), (4096, 1024, 2560), (2000, 2560, 640)]
)
def test_rows_of_products_have_the_same_bits_in_any_batch(dtype, tokens, rows, columns):
    for stretch in (0.0, 2.0):
        row_checks.check_products(impl, "cuda", dtype, tokens, rows, columns, stretch=stretch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_choice_of_tiles_gives_the_same_bits(dtype):
    rng = checks.generator("cuda", 7)
    x, weight = checks.normal(rng, 300, 2048, dtype=dtype), checks.normal(rng, 1024, 2048, dtype=dtype)
    for gated in (False, True):
        choices = products._FEW_ROWS[gated] + products._MANY_ROWS[gated]
        out = torch.empty(len(choices), 300, 512 if gated else 1024, dtype=dtype, device="cuda")
        for tiles, result in zip(choices, out):
            products._launch(x, weight, result, gated=gated, tiles=tiles)
        assert (out == out[0]).all(dim=(1, 2)).tolist() == [True] * len(choices)


@dtypes
def test_loads_through_pointers_give_the_bits_of_those_through_descriptors(dtype, monkeypatch):
    rng = checks.generator("cuda", 8)
    x, weight = checks.normal(rng, 300, 1024, dtype=dtype), checks.normal(rng, 512, 1024, dtype=dtype)
    expected = {rows: impl.linear(x[:rows], weight) for rows in (1, 30, 300)}
    monkeypatch.setattr(products, "_has_tma", lambda *_: False)
    for rows, out in expected.items():
        assert torch.equal(impl.linear(x[:rows], weight), out)


@dtypes
@pytest.mark.parametrize(("tokens", "hidden"), [(3, 64), (100, 1024), (700, 5120)])
def test_norms_are_right_and_have_the_same_bits_in_any_batch(dtype, tokens, hidden):
    row_checks.check_norms(impl, "cuda", dtype, tokens, hidden)
    row_checks.check_norms(gpu, "cuda", dtype, tokens, hidden)
    rng = checks.generator("cuda", tokens, hidden)
    x, residual = (checks.normal(rng, tokens, hidden, dtype=dtype) for _ in range(2))
    weight = checks.normal(rng, hidden, dtype=dtype)
    total = x.double() + residual.double()
    checks.assert_close(
        impl, impl.add_rms_norm(x[None], residual, weight, 1e-6), checks.naive_rms_norm(total, weight, 1e-6)
    )
    checks.assert_close(impl, residual, total)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size"), [(5, 503), (40, 151_936)])
def test_logprobs_and_filters_have_the_same_bits_in_any_batch(dtype, rows, vocab_size):
    row_checks.check_logprobs(gpu, "cuda", dtype, rows, vocab_size)
    row_checks.check_filters(gpu, "cuda", vocab_size)


@dtypes
@pytest.mark.parametrize("seq_lens", [*checks.SEQ_LENS, [SPAN - 1, SPAN, SPAN + 1, 0, 5000]], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (5, 1), (16, 1), (32, 8)], ids=str)
def test_decode_attention_equals_fp64(dtype, seq_lens, heads):
    for programs in (None, 1, 3 * len(seq_lens) * heads[1]):
        checks.check_decode(impl, "cuda", dtype, seq_lens, heads, 128, 16, programs)


@dtypes
@pytest.mark.parametrize("spans", [*checks.SPANS, [(70, 600), (SPAN, SPAN), (1, 3000), (900, 1100)]], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (5, 1), (16, 1), (32, 8)], ids=str)
def test_prefill_attention_equals_fp64(dtype, spans, heads):
    checks.check_prefill(impl, "cuda", dtype, spans, heads, 128, 16, strangers=(7, 40))


@dtypes
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 8), (128, 128), (256, 16)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (5, 1), (8, 1), (16, 8), (32, 8)], ids=str)
def test_tokens_have_the_same_bits_in_any_batch_and_chunk_and_decoding(dtype, head_dim, block_size, heads):
    length = 3 * SPAN + 77
    row_checks.check_attention(
        impl, "cuda", dtype, length=length, heads=heads, head_dim=head_dim, block_size=block_size,
        cuts=[[1], [15, 16, 17], [SPAN - 1, SPAN, SPAN + 1], [63, 400, 2 * SPAN + 64], list(range(50, length, 50))],
        decoded=range(1, length + 1),
    )  # fmt: skip


@dtypes
@pytest.mark.parametrize("seq_lens", [[7000, *[0] * 255], [1, 64, 33, 0], [0, 0]])
def test_the_device_counts_the_live_rows_and_shares_out_the_programs(dtype, seq_lens):
    checks.check_decode(impl, "cuda", dtype, seq_lens, (32, 8), 128, 16, max_seq_len=40960, live_rows=True)

"""The deterministic functions on the CPU, in torch and in Triton's interpreter: right, and the same in any batch."""

import kernel_checks as checks
import numpy as np
import pytest
import row_checks
import torch

if torch.cuda.is_available():
    pytest.skip("test_deterministic_kernels_gpu.py runs the compiled kernels here", allow_module_level=True)
pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

from qwen_engine.kernels import deterministic, gpu, reference
from qwen_engine.kernels.gpu.deterministic import attention, products

pytestmark = pytest.mark.timeout(300)  # the interpreter computes for long; it waits for nothing
dtypes = pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
impls = pytest.mark.parametrize("impl", [deterministic, gpu.deterministic], ids=["torch", "triton"])


@pytest.fixture
def short_spans(monkeypatch):
    """Several spans, merged in several turns, without the interpreter's time for long sequences."""
    monkeypatch.setattr(attention, "_SPAN", 64)
    monkeypatch.setattr(attention, "_MERGED_AT_ONCE", tl.constexpr(4))


@pytest.fixture
def tensor_core(monkeypatch):
    """Dots of the interpreter go along the columns by 16, rounding to fp32 each time, as those of a tensor core do;
    numpy's depend on the shape."""

    def create_dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
        total = acc.data
        for first in range(0, a.data.shape[1], 16):
            columns = slice(first, first + 16)
            exact = np.matmul(a.data[:, columns], b.data[columns], dtype=np.float64) + total
            total = exact.astype(np.float32)
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@impls
@dtypes
def test_products_equal_their_formula(impl, dtype):
    for tokens, rows, columns in (*checks.PRODUCTS, (70, 40, 33), (130, 70, 64)):
        rng = checks.generator("cpu", tokens, rows, columns)
        x = checks.normal(rng, tokens, columns + 16, dtype=dtype)[:, :columns]
        weight = checks.normal(rng, 2 * rows, columns, dtype=dtype) * columns**-0.5
        products = x.double() @ weight.double().T
        gate, up = products.chunk(2, dim=1)
        out = torch.empty(tokens, 2 * rows, dtype=dtype)
        with checks.poisoned_allocations():
            assert impl.linear(x, weight, out) is out
            checks.assert_close(impl, out, products)
            assert torch.equal(impl.linear(x, weight), out)
            checks.assert_close(impl, impl.gated_linear(x, weight), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_through_tensor_descriptors_are_those_through_pointers(dtype, monkeypatch):
    for tokens, rows, columns in ((1, 64, 64), (17, 72, 136), (130, 200, 72)):
        rng = checks.generator("cpu", tokens, rows, columns)
        x = checks.normal(rng, tokens, columns + 16, dtype=dtype)[:, :columns]
        weight = checks.normal(rng, 2 * rows, columns, dtype=dtype)
        expected = [gpu.deterministic.linear(x, weight), gpu.deterministic.gated_linear(x, weight)]
        with monkeypatch.context() as patch:
            patch.setattr(products, "_has_tma", lambda *_: True)
            assert torch.equal(gpu.deterministic.linear(x, weight), expected[0])
            assert torch.equal(gpu.deterministic.gated_linear(x, weight), expected[1])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_tiles_cover_any_product_and_stay_warp_group_wide(gated, dtype):
    for num_rows in (64, 1024, 5120, 75968):
        for x_rows in (1, 16, 17, 64, 65, 256, 1000, 8192):
            tiles = products.tiles_for(gated, num_rows, x_rows, dtype, sms=132)
            assert tiles.rows >= 64
            assert tiles.rows // 64 * 4 <= max(tiles.warps, 4)


@impls
@dtypes
@pytest.mark.parametrize("seq_lens", [*checks.SEQ_LENS, [600, 1, 0, 257]], ids=str)
def test_decode_attention_equals_fp64(impl, dtype, seq_lens, short_spans):
    checks.check_decode(impl, "cpu", dtype, seq_lens, (4, 2), 64, 16)


@pytest.mark.parametrize("seq_lens", [[63, 1, 64, 65], [127, 128, 0, 129], [600, 1, 0, 257]], ids=str)
@pytest.mark.parametrize("shares", [0, 3])
def test_programs_share_out_the_spans(seq_lens, shares, short_spans):
    """Too few programs for a row each, or three for every row and KV head."""
    programs = shares * len(seq_lens) * 2 or 1
    checks.check_decode(gpu.deterministic, "cpu", torch.float16, seq_lens, (4, 2), 64, 16, programs)


@impls
@dtypes
@pytest.mark.parametrize("spans", [*checks.SPANS, [(70, 600), (256, 256), (1, 257)]], ids=str)
def test_prefill_attention_equals_fp64(impl, dtype, spans, short_spans):
    checks.check_prefill(impl, "cpu", dtype, spans, (4, 2), 64, 16)


@impls
@pytest.mark.parametrize("heads", checks.HEADS, ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 8), (32, 64)])
def test_attention_takes_any_group_head_and_block_size(impl, heads, head_dim, block_size, short_spans):
    checks.check_decode(impl, "cpu", torch.float32, [130, 0, 70], heads, head_dim, block_size)
    checks.check_prefill(impl, "cpu", torch.float16, [(20, 20), (9, 50), (0, 0), (1, 70)], heads, head_dim, block_size)


@impls
@pytest.mark.parametrize("strangers", [(0, 5), (7, 0), (3, 30)], ids=str)
def test_prefill_attention_leaves_queries_of_no_row_alone(impl, strangers):
    spans = [(20, 20), (0, 5), (9, 50), (0, 0), (1, 70)]
    checks.check_prefill(impl, "cpu", torch.float32, spans, (4, 2), 32, 16, strangers)


@dtypes
@pytest.mark.parametrize("seq_lens", [[300, 0, 0, 0], [5, 64, 33, 0], [0, 0], [70]], ids=str)
def test_the_device_counts_the_live_rows(dtype, seq_lens, short_spans):
    checks.check_decode(gpu.deterministic, "cpu", dtype, seq_lens, (4, 2), 64, 16, max_seq_len=4096, live_rows=True)


def test_decode_attention_takes_as_many_rows_at_once_as_fit(monkeypatch):
    """Two at a time, of which the device knows how many are live."""
    monkeypatch.setattr(attention, "_PARTIAL_BYTES", 2 * 4 * (64 + 2) * 4)
    for live_rows in (False, True):
        checks.check_decode(
            gpu.deterministic,
            "cpu",
            torch.float32,
            [5, 64, 33, 0, 0],
            (4, 2),
            64,
            16,
            max_seq_len=256,
            live_rows=live_rows,
        )


@impls
@dtypes
def test_rows_of_products_have_the_same_bits_in_any_batch(impl, dtype, tensor_core):
    row_checks.check_products(impl, "cpu", dtype, 70, 96, 200)


@dtypes
@pytest.mark.parametrize("head_dim", [32, 64])
def test_tokens_have_the_same_bits_in_any_batch_and_chunk_and_decoding(dtype, head_dim):
    row_checks.check_attention(
        deterministic, "cpu", dtype, length=90, cuts=[[1], [15, 16, 17], [64, 65]], decoded=range(1, 91),
        heads=(4, 2), head_dim=head_dim, block_size=16,
    )  # fmt: skip


@dtypes
def test_tokens_have_the_same_bits_in_any_tile_and_share_of_the_spans(dtype, short_spans, tensor_core):
    row_checks.check_attention(
        gpu.deterministic, "cpu", dtype, length=140, cuts=[[1, 15], [64, 129]], decoded=[1, 17, 63, 64, 65, 140],
        heads=(4, 2), head_dim=32, block_size=16,
    )  # fmt: skip


@dtypes
@pytest.mark.parametrize(("tokens", "hidden"), [(5, 64), (40, 1000), (200, 4096)])
def test_norms_never_depend_on_the_batch(dtype, tokens, hidden):
    row_checks.check_norms(reference, "cpu", dtype, tokens, hidden)


@dtypes
@pytest.mark.parametrize(("rows", "vocab_size"), [(5, 503), (3, 70_000)])
def test_logprobs_never_depend_on_the_batch(dtype, rows, vocab_size):
    row_checks.check_logprobs(reference, "cpu", dtype, rows, vocab_size)


@pytest.mark.parametrize("vocab_size", [101, 5000])
def test_filters_never_depend_on_the_batch(vocab_size):
    row_checks.check_filters(reference, "cpu", vocab_size)

"""Products of a few rows on Hopper, through the functions that choose them, against fp64 formulas and cuBLAS."""

import itertools

import kernel_checks as checks
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

from qwen_engine.kernels import gpu  # noqa: E402
from qwen_engine.kernels.gpu import common, matrix_products  # noqa: E402
from qwen_engine.kernels.gpu.linear_tiles import MAX_FEW_ROWS, Tiles, tiles_for_few_rows  # noqa: E402

if not matrix_products.starts_early(1, torch.bfloat16, torch.device("cuda", 0)):
    pytest.skip("no Hopper GPU, or not the Triton that the kernel is written for", allow_module_level=True)

from qwen_engine.kernels.gpu import linear_hopper  # noqa: E402

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Of a weight: whole tiles, parts of tiles in both directions, less than a tile, several rounds of all programs.
SHAPES = [(256, 512), (6144, 4096), (4096, 12288), (200, 328), (96, 200), (16, 64), (34, 1000), (24576, 264)]


def operands(dtype, rows, num_rows, num_columns):
    """x is a view of wider rows. It is made last: a weight must not be what the launches before a product write."""
    rng = checks.generator("cuda", rows, num_rows, num_columns)
    weight = checks.normal(rng, num_rows, num_columns, dtype=dtype) * num_columns**-0.5
    return checks.normal(rng, rows, num_columns + 8, dtype=dtype)[:, :num_columns], weight


def check(x, weight, tiles=None):
    products = x.double() @ weight.double().T
    gate, up = products.chunk(2, dim=1)
    with checks.poisoned_allocations():
        if tiles is None:
            plain, parts, gated = gpu.linear(x, weight), gpu.linear_parts(x, weight), gpu.gated_linear(x, weight)
        else:
            parts, gated = linear_hopper.product(x, weight, tiles), None
            plain = parts.sum(dim=0).to(x.dtype)
            if tiles.splits == 1 and weight.shape[0] % 16 == 0:
                gated = linear_hopper.product(x, weight, tiles, gated=True)[0]
    assert parts.dtype == (x.dtype if len(parts) == 1 else torch.float32)
    checks.assert_close(gpu, plain, products)
    checks.assert_close(gpu, parts.double().sum(dim=0).to(x.dtype), products)
    if gated is not None and weight.shape[0] % 16 == 0:  # others go to cuBLAS, which rounds the halves
        checks.assert_close(gpu, gated, gate * gate.sigmoid() * up)


@pytest.fixture
def hopper_calls(monkeypatch):
    """Tiles of every call of the kernel."""
    calls = []

    def product(x, weight, tiles, out=None, **options):
        calls.append(tiles)
        return linear_hopper.product(x, weight, tiles, out, **options)

    monkeypatch.setattr(matrix_products, "_hopper_product", lambda _: product)
    return calls


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_few_rows_equal_their_formula(hopper_calls, dtype, shape):
    for rows in (1, 2, 7, 8, 9, 16, 31, 33, 64):
        check(*operands(dtype, rows, *shape))
    assert len(hopper_calls) == (27 if shape[0] % 16 == 0 else 18)


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(rows, x_rows, columns, stages, splits, programs)
        for rows, x_rows, (columns, stages), splits, programs in itertools.product(
            (64, 128), (8, 16, 32, 64, 128, 256), ((64, 2), (64, 5), (128, 3), (256, 2)), (1, 3), (1, 2)
        )
        if (rows + x_rows) * columns * stages <= 96 * 1024 and programs * x_rows <= 128 + 128 * (programs == 1)
    ],
    ids=str,
)
def test_any_tiles_give_the_product_of_any_rows(tiles):
    for shape in ((256, 512), (200, 328), (12288, 264)):
        for rows in (tiles.x_rows - 3, 3 * tiles.x_rows - 1):
            check(*operands(torch.bfloat16, rows, *shape), tiles)


@dtypes
@pytest.mark.parametrize(("rows", "num_rows", "num_columns"), [(4096, 512, 2048), (5000, 208, 2056), (2049, 1056, 328)])
def test_gated_products_of_many_rows_equal_their_formula(hopper_calls, dtype, rows, num_rows, num_columns):
    check(*operands(dtype, rows, num_rows, num_columns))
    assert len(hopper_calls) == 1


def test_what_they_are_not_for_goes_to_cublas(hopper_calls):
    four, own = operands(torch.bfloat16, 4, 256, 512)
    for x, weight in (
        operands(torch.bfloat16, MAX_FEW_ROWS + 1, 256, 512),
        operands(torch.bfloat16, 2000, 256, 512),
        operands(torch.float32, 3, 256, 512),
        operands(torch.bfloat16, 3, 256, 500),  # rows that do not begin at multiples of 16 bytes
        (four.reshape(-1)[1 : 1 + 3 * 512].view(3, 512), own),
        (four.t().contiguous().t(), own),
    ):
        product = torch.nn.functional.linear(x, weight)
        assert torch.equal(gpu.linear(x, weight), product)
        assert torch.equal(gpu.linear_parts(x, weight), product[None])
        assert torch.equal(gpu.gated_linear(x, weight), gpu.silu_mul(product))
    assert hopper_calls == []


def test_products_are_written_where_they_are_wanted(hopper_calls):
    x, weight = operands(torch.bfloat16, 5, 304, 512)
    out = torch.full((7, 304), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert gpu.linear(x, weight, out[1:6]).data_ptr() == out[1].data_ptr()
    assert torch.equal(out[1:6], gpu.linear(x, weight))
    assert out[[0, 6]].isnan().all()
    assert len(hopper_calls) == 2


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
def test_a_row_has_the_same_bits_in_any_place_and_run(rows):
    x, weight = operands(torch.bfloat16, rows, 4096, 4096)
    first, order = gpu.linear_parts(x, weight), torch.randperm(rows, device="cuda")
    for _ in range(20):
        assert torch.equal(gpu.linear_parts(x[order], weight), first[:, order])


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_weights_read_early_and_inputs_never(rows):
    """A chain as in a decoder layer, replayed with new inputs each time: a product that read its input too early would
    see that of the replay before."""
    rng = checks.generator("cuda", rows)
    sizes = [(1024, 512), (512, 1024)]  # small, so that a kernel ends soon after the next has started
    weights = [checks.normal(rng, *size, dtype=torch.bfloat16) * size[1] ** -0.5 for size in sizes * 8]
    scale = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(rows, 512, device="cuda", dtype=torch.bfloat16)

    def chain(sync):
        hidden, residual = x.clone(), torch.zeros_like(x)
        for up, down in zip(weights[::2], weights[1::2]):
            sync()
            hidden = gpu.linear(hidden, up)
            sync()
            parts = gpu.linear_parts(hidden, down)
            sync()
            hidden = gpu.add_rms_norm(parts, residual, scale, 1e-6)
        sync()
        return hidden

    chain(lambda: None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    for _ in range(300):
        x.copy_(checks.normal(rng, rows, 512, dtype=torch.bfloat16))
        graph.replay()
        graph.replay()
        assert torch.equal(out, chain(torch.cuda.synchronize))


def test_the_switch_leaves_all_products_to_cublas(monkeypatch):
    x, weight = operands(torch.bfloat16, 9, 512, 1024)
    with_kernel = gpu.linear(x, weight), gpu.gated_linear(x, weight)
    monkeypatch.setenv("QWEN_ENGINE_HOPPER", "0")
    asked = (common.has_hopper_kernels, matrix_products._hopper_product)
    try:
        for function in asked:
            function.cache_clear()
        assert not matrix_products.starts_early(1, torch.bfloat16, x.device)
        assert torch.equal(gpu.linear_parts(x, weight), torch.nn.functional.linear(x, weight)[None])
        for ours, cublas in zip(with_kernel, (gpu.linear(x, weight), gpu.gated_linear(x, weight))):
            assert checks.relative_error(ours, cublas.double()) < 6e-3
    finally:
        monkeypatch.undo()
        for function in asked:
            function.cache_clear()


def test_tiles_of_every_size_have_room():
    for rows, gated in itertools.product((1, 9, 17, 33), (False, True)):
        tiles = tiles_for_few_rows(4096, 4096, rows, 132, gated=gated, in_parts=not gated)
        check(*operands(torch.bfloat16, rows, 4096, 4096), tiles)

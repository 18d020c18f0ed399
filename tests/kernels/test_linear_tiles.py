"""How products of few rows are cut on Hopper, for every published size and number of ranks."""

import itertools

import pytest

pytest.importorskip("triton")

from qwen_engine.kernels.gpu.linear_tiles import MAX_FEW_ROWS, tiles_for_few_rows

SMS = 132
SHARED_BYTES = 227 * 1024
# hidden size, rows of q, k and v, rows of o's input, inner size
MODELS = [
    (1024, 4096, 2048, 3072),
    (2048, 4096, 2048, 6144),
    (2560, 6144, 4096, 9728),
    (4096, 6144, 4096, 12288),
    (5120, 7168, 5120, 17408),
    (5120, 10240, 8192, 25600),
]
SHAPES = [
    (num_rows, num_columns, gated, in_parts)
    for (hidden, qkv, heads, inner), ranks in itertools.product(MODELS, (1, 2, 4, 8))
    for num_rows, num_columns, gated, in_parts in (
        (qkv // ranks, hidden, False, False),
        (hidden, heads // ranks, False, True),
        (2 * inner // ranks, hidden, True, False),
        (hidden, inner // ranks, False, True),
    )
] + [(151936, 1024, False, False)]


@pytest.mark.parametrize("x_rows", [1, 8, 9, 16, 17, 32, 33, MAX_FEW_ROWS])
def test_tiles_fit_and_leave_no_program_without_work(x_rows):
    for num_rows, num_columns, gated, in_parts in SHAPES:
        tiles = tiles_for_few_rows(num_rows, num_columns, x_rows, SMS, gated=gated, in_parts=in_parts)
        assert tiles.x_rows // 2 < x_rows <= tiles.x_rows or x_rows < tiles.x_rows == 8
        turned = 4 * tiles.rows * tiles.x_rows
        assert 2 * (tiles.rows + tiles.x_rows) * tiles.columns * tiles.stages + turned < SHARED_BYTES
        assert (tiles.splits - 1) * -(-num_columns // (tiles.splits * tiles.columns)) * tiles.columns < num_columns
        assert tiles.splits == 1 or in_parts


def test_columns_are_shared_where_a_weight_has_few_tiles():
    splits = [
        tiles_for_few_rows(*shape, rows, SMS, gated=False, in_parts=True).splits
        for shape in ((1024, 2048), (4096, 4096), (4096, 12288), (5120, 25600), (20000, 12288))
        for rows in (1, 64)
    ]
    assert splits == [4, 1, 2, 1, 4, 2, 2, 2, 1, 1]

"""How `linear_hopper` cuts a product, which follows from its shape: by what `benchmarks/tune_linear.py` found."""

import dataclasses

from qwen_engine.kernels.gpu.common import cdiv, next_power_of_2

MAX_FEW_ROWS = 64
_MIN_X_ROWS = 8
_MAX_SPLITS = 4
_COLUMNS_PER_X_ROW = 64  # of a split, at least: the more rows of x, the more there is to write and add up
_MANY_COLUMNS = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of the weight (of a gated one: of both halves together) and of x in a tile, columns at a time; slots of the
    ring, programs that share a row of tiles, programs of a multiprocessor."""

    rows: int
    x_rows: int
    columns: int
    stages: int
    splits: int = 1
    programs: int = 1


# As many bytes of the weight in flight as fit. Large tiles read x less often, which counts where it has many rows.
_TILES = {
    8: Tiles(64, 8, 256, 6),
    16: Tiles(64, 16, 256, 5),
    32: Tiles(64, 32, 256, 4),
    64: Tiles(64, 64, 128, 6),
}
_LARGE_TILES = {32: Tiles(128, 32, 128, 5), 64: Tiles(128, 64, 128, 4)}
_LARGEST_TILES = Tiles(128, 256, 64, 4)
_MANY_X_ROWS = 4096
_MANY_X_ROWS_OF_FEW_COLUMNS = 2048
_FEW_COLUMNS = 2048


def tiles_for_few_rows(num_rows: int, num_columns: int, x_rows: int, sms: int, *, gated: bool, in_parts: bool) -> Tiles:
    """For x_rows rows of x, at most MAX_FEW_ROWS. in_parts: several programs may share the columns of a weight that has
    few tiles for so many multiprocessors."""
    x_rows = max(_MIN_X_ROWS, next_power_of_2(x_rows))
    tiles = _TILES[x_rows]
    large = _LARGE_TILES.get(x_rows)
    if gated and large is not None and cdiv(num_rows, large.rows) % sms > sms // 2:  # of the last round
        return large
    splits, row_tiles = 1, cdiv(num_rows, tiles.rows)
    while in_parts and splits < _MAX_SPLITS:
        columns, programs = num_columns // (2 * splits), 2 * splits * row_tiles
        if columns < _COLUMNS_PER_X_ROW * x_rows or programs > (2 * sms if columns >= _MANY_COLUMNS else sms):
            break
        splits *= 2
    return dataclasses.replace(tiles, splits=splits)


def tiles_for_many_rows(x_rows: int, num_columns: int) -> Tiles | None:
    """For a gated product; None where cuBLAS and a kernel for the rest are faster."""
    enough = _MANY_X_ROWS if num_columns >= _FEW_COLUMNS else _MANY_X_ROWS_OF_FEW_COLUMNS
    return _LARGEST_TILES if x_rows >= enough else None

"""Finds the tiles of `kernels/gpu/tiled_linear.py` for the products of a model on this GPU.

    PYTHONPATH=src python benchmarks/tune_linear.py --config-folder FOLDER [--tensor-parallel-size 2] [--rows 1,16]

For every product of a decoder layer and every number of rows it times cuBLAS and each choice of tiles (CUDA-graph
replays over enough copies of the weight to sweep past the L2), prints both, and at the end the rows of `TUNED` where
tiles win by more than MIN_GAIN. The gated product stands against cuBLAS plus the silu kernel. Many processes compile
the kernels first, into Triton's cache.
"""

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
from functools import cache, partial
from pathlib import Path

import torch
from kernels import DEVICE, DTYPE, normal, relative_error, rotation, time_us
from torch.nn import functional as F

from qwen_engine.config import ModelConfig
from qwen_engine.engine_args import HelpFormatter
from qwen_engine.kernels import gpu
from qwen_engine.kernels.gpu.tiled_linear import Tiles, gated_linear_tiled, linear_tiled

MIN_GAIN = 0.02
MAX_ERROR = 5e-3
CHOICES = [
    Tiles(rows, columns, splits, warps, stages)
    for rows, columns, splits, warps, stages in itertools.product(
        (16, 32, 64, 128), (64, 128, 256), (1, 2, 4), (4, 8), (3, 4, 5)
    )
    if 2048 <= rows * columns <= 16384 and (warps == 4 or rows * columns >= 8192)
]


def products(config: ModelConfig, num_ranks: int) -> list[tuple[str, str, int, int]]:
    """(name, kind, weight rows, weight columns) of one rank's decoder layer."""
    heads, kv_heads = config.num_heads // num_ranks, max(1, config.num_kv_heads // num_ranks)
    inter = config.intermediate_size // num_ranks
    return [
        ("qkv", "linear", (heads + 2 * kv_heads) * config.head_dim, config.hidden_size),
        ("o", "linear", config.hidden_size, heads * config.head_dim),
        ("gate_up", "gated", 2 * inter, config.hidden_size),
        ("down", "linear", config.hidden_size, inter),
    ]


def choices(kind: str, num_columns: int) -> list[Tiles]:
    """Those that make sense for a product."""
    return [
        tiles
        for tiles in CHOICES
        if tiles.splits * tiles.columns <= num_columns and (kind == "linear" or tiles.splits == 1)
    ]


def run_tiles(kind: str, x: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> torch.Tensor | None:
    """The product, or its parts, which the next kernel adds; None for tiles that do not fit into shared memory."""
    try:
        return (linear_tiled if kind == "linear" else gated_linear_tiled)(x, weight, tiles)
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return None


@cache
def operands(num_rows: int, num_columns: int, x_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(x_rows, num_columns), normal(num_rows, num_columns)


def compile_tiles(kind: str, num_rows: int, num_columns: int, x_rows: int, tiles: Tiles) -> None:
    run_tiles(kind, *operands(num_rows, num_columns, x_rows), tiles)


def compile_all(shapes: list[tuple[str, int, int]], rows: list[int]) -> None:
    """Compiles every choice of tiles for these products (kind, weight rows, columns), in as many processes as fit."""
    context = multiprocessing.get_context("spawn")
    num_processes = max(1, min(24, (os.cpu_count() or 1) - 2))
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        jobs = [
            pool.submit(compile_tiles, kind, num_rows, num_columns, x_rows, tiles)
            for kind, num_rows, num_columns in shapes
            for x_rows in {max(16, 1 << (count - 1).bit_length()) for count in rows}
            for tiles in choices(kind, num_columns)
        ]
        for job in jobs:
            job.result()


def tune(kind: str, num_rows: int, num_columns: int, x_rows: int, replays: int) -> tuple[float, float, Tiles]:
    """Microseconds of cuBLAS and of the best tiles, and these."""
    size = num_rows * num_columns * 2
    weights = [normal(num_rows, num_columns) * num_columns**-0.5 for _ in range(rotation(size))]
    x = normal(x_rows, num_columns)

    def library(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) if kind == "linear" else gpu.silu_mul(F.linear(x, weight))

    base = time_us([partial(library, weight) for weight in weights], replays)
    expected = library(weights[0])
    best, best_tiles = float("inf"), CHOICES[0]
    for tiles in choices(kind, num_columns):
        out = run_tiles(kind, x, weights[0], tiles)
        if out is None:
            continue
        if relative_error(out if kind == "gated" else out.float().sum(dim=0), expected) > 2 * MAX_ERROR:
            print(f"wrong result with {tiles}")
            continue
        us = time_us([partial(run_tiles, kind, x, weight, tiles) for weight in weights], replays)
        if us < best:
            best, best_tiles = us, tiles
    return base, best, best_tiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--config-folder", type=Path, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rows", default="1,4,8,16,32,64", help="numbers of rows of x (default: %(default)s)")
    parser.add_argument("--replays", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    config = ModelConfig.from_folder(args.config_folder)
    found: dict[tuple[str, int, int], dict[int, Tiles]] = {}
    rows = [int(count) for count in args.rows.split(",")]
    layer = products(config, args.tensor_parallel_size)
    compile_all([shape for _, *shape in layer], rows)
    for name, kind, num_rows, num_columns in layer:
        for x_rows in rows:
            base, best, tiles = tune(kind, num_rows, num_columns, x_rows, args.replays)
            rate = num_rows * num_columns * 2 / best / 1e6
            print(f"{name:8s} {num_rows} x {num_columns}, {x_rows:2d} rows: cuBLAS {base:6.1f} us, "
                  f"tiles {best:6.1f} us ({rate:.2f} TB/s) {tiles}", flush=True)  # fmt: skip
            if best < base * (1 - MIN_GAIN):
                found.setdefault((kind, num_rows, num_columns), {})[x_rows] = tiles
    for key, by_rows in found.items():
        print(f"    {key}: {by_rows},")


if __name__ == "__main__":
    assert torch.bfloat16 == DTYPE
    assert DEVICE == "cuda"
    main()

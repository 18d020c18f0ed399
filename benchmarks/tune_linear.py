"""Finds how `kernels/gpu/linear_hopper.py` should cut the products of a model on this GPU.

    PYTHONPATH=src python benchmarks/tune_linear.py --config-folder FOLDER [--tensor-parallel-size 2]

A few decoder layers run as in a decode step, from a CUDA graph, because how soon a product gets going depends on what
runs before it. There every product in turn takes each choice of tiles and cuBLAS, while the others keep what
`linear_tiles.py` says. Prints microseconds a layer: cuBLAS for all products, the rule, and the best for each of them.
Many processes compile the kernels first, into Triton's cache.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
from kernels import time_us

from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine_args import HelpFormatter
from qwen_engine.kernels.gpu import matrix_products
from qwen_engine.kernels.gpu.linear_tiles import Tiles
from qwen_engine.layers.attention import AttentionMetadata
from qwen_engine.models.qwen3 import Qwen3Model
from qwen_engine.models.weights import fill_dummy_weights

DEVICE = torch.device("cuda", 0)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 40_960
LAYER_BYTES = 4 << 30  # weights and KV of the layers that run
SHARED_BYTES = 227 << 10  # of a multiprocessor; a program of several takes another KiB
SHOWN = 3
CUBLAS = "cuBLAS"
Shape = tuple[int, int]  # rows and columns of a weight
Choice = Tiles | str


def choices(x_rows: int, *, gated: bool, in_parts: bool) -> list[Tiles]:
    """Those that make sense, with as many stages as there is room for."""
    box = max(8, 1 << (x_rows - 1).bit_length())
    found = []
    for rows, columns, programs, splits in itertools.product((64, 128), (64, 128, 256), (1, 2), (1, 2, 4)):
        scratch = (4 if gated or splits > 1 else 2) * rows * box  # to turn the products for their way to memory
        stages = (SHARED_BYTES // programs - 2048 - min(scratch, 64 << 10)) // (2 * (rows + box) * columns)
        if (in_parts or splits == 1) and 3 <= stages <= 16:
            found.append(Tiles(rows, box, columns, stages, splits, programs))
    return found


def products(config: ModelConfig) -> dict[str, Shape]:
    heads = config.num_heads + 2 * config.num_kv_heads
    return {
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "o": (config.hidden_size, config.num_heads * config.head_dim),
        "qkv": (heads * config.head_dim, config.hidden_size),
    }


@contextmanager
def chosen(table: dict[Shape, Choice]) -> Iterator[None]:
    """Inside, products with these weights are cut so, the others by the rule."""
    rule = matrix_products.hopper_product

    def product(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, *, gated: bool = False, **options: bool
    ) -> torch.Tensor | None:
        choice = table.get((weight.shape[0], weight.shape[1]))
        hopper = matrix_products._hopper_product(x.device)
        if choice is None or hopper is None:
            return rule(x, weight, out, gated=gated, **options)
        return hopper(x, weight, choice, out, gated=gated) if isinstance(choice, Tiles) else None

    matrix_products.hopper_product = product
    try:
        yield
    finally:
        matrix_products.hopper_product = rule


class Layers:
    """Decoder layers of one rank, and a batch of equally long rows."""

    def __init__(self, config: ModelConfig, rows: int, context: int) -> None:
        layer_bytes = 2 * sum(n * k for n, k in products(config).values())
        kv_bytes = 4 * config.num_kv_heads * config.head_dim * rows * context
        self.count = max(2, min(config.num_layers, LAYER_BYTES // (layer_bytes + kv_bytes)))
        config = dataclasses.replace(config, num_layers=self.count)
        here = {"dtype": torch.bfloat16, "device": DEVICE}
        self._model = Qwen3Model(config, tp=TPGroup(), max_model_len=MAX_MODEL_LEN, **here)
        fill_dummy_weights(self._model, seed=0)
        blocks = -(-context // BLOCK_SIZE)
        shape = (self.count, 2, rows * blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self._kv_cache = torch.randn(shape, **here)
        numbers = {"dtype": torch.int32, "device": DEVICE}
        slots, lengths = torch.arange(rows, **numbers), torch.full((rows,), context, **numbers)
        self._tokens = torch.zeros(rows, context, **numbers)
        self._batch = AttentionMetadata(
            token_slots=slots,
            positions=lengths - 1,
            block_tables=torch.randperm(rows * blocks, **numbers).view(rows, blocks),
            decode_slots=slots,
            decode_seq_lens=lengths,
            num_decodes=None,
            max_decode_len=MAX_MODEL_LEN,
            chunk_slots=slots[:0],
            query_start=slots[:0],
            chunk_seq_lens=slots[:0],
            max_query_len=0,
            max_chunk_len=0,
        )

    def step(self) -> torch.Tensor:
        return self._model(self._tokens, [self._batch], self._kv_cache)

    def us(self, table: dict[Shape, Choice], replays: int) -> float:
        """Microseconds of a layer, median over the replays."""
        with chosen(table), torch.inference_mode():
            return time_us([self.step], replays) / self.count


def compile_product(tiles: Tiles, gated: bool) -> str | None:
    """Into Triton's cache; says what is wrong if there is no room for it."""
    from qwen_engine.kernels.gpu import linear_hopper

    x, weight = (torch.zeros(n, 1024, dtype=torch.bfloat16, device=DEVICE) for n in (tiles.x_rows, 1024))
    try:
        linear_hopper.product(x, weight, tiles, gated=gated)
    except triton.OutOfResources as error:
        return str(error)
    return None


def compile_all(all_tiles: set[tuple[Tiles, bool]]) -> set[tuple[Tiles, bool]]:
    """Those that the GPU can run."""
    context = multiprocessing.get_context("spawn")
    num_processes = max(1, min(16, (os.cpu_count() or 1) - 1))
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        ordered = sorted(all_tiles, key=str)
        errors = pool.map(compile_product, *zip(*ordered))
        return {key for key, error in zip(ordered, errors) if error is None}


def shown(choice: Choice) -> str:
    if isinstance(choice, str):
        return choice
    extras = f" / {choice.splits}" * (choice.splits > 1) + f" x {choice.programs}" * (choice.programs > 1)
    return f"{choice.rows}x{choice.columns}, {choice.stages}{extras}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--config-folder", type=Path, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--loads", default="1x600,8x1024,16x4224,32x1152,64x1152", help="rows x context (default: %(default)s)"
    )
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    if not torch.cuda.is_available() or not matrix_products.starts_early(1, torch.bfloat16, DEVICE):
        parser.error("this benchmark needs a Hopper GPU and the Triton that the kernels in Gluon were written for")
    loads = [tuple(map(int, load.split("x"))) for load in args.loads.split(",")]
    whole, ranks = ModelConfig.from_folder(args.config_folder), args.tensor_parallel_size
    config = dataclasses.replace(
        whole,
        num_heads=whole.num_heads // ranks,
        num_kv_heads=max(1, whole.num_kv_heads // ranks),
        intermediate_size=whole.intermediate_size // ranks,
    )
    kinds = {name: {"gated": name == "gate_up", "in_parts": name in ("o", "down")} for name in products(config)}
    usable = compile_all(
        {(tiles, kind["gated"]) for rows, _ in loads for kind in kinds.values() for tiles in choices(rows, **kind)}
    )
    for rows, context in loads:
        layers = Layers(config, rows, context)
        library = layers.us(dict.fromkeys(products(config).values(), CUBLAS), args.replays)
        rule = layers.us({}, args.replays)
        print(f"{rows} x {context}: cuBLAS {library:.1f} us a layer, rule {rule:.1f}", flush=True)
        for name, shape in products(config).items():
            kind = kinds[name]
            tried = [tiles for tiles in choices(rows, **kind) if (tiles, kind["gated"]) in usable]
            found = [(layers.us({shape: choice}, args.replays), choice) for choice in [CUBLAS, *tried]]
            found.sort(key=lambda pair: pair[0])
            best = "; ".join(f"{us:.1f} {shown(choice)}" for us, choice in found[:SHOWN])
            print(
                f"  {name:8s} {best}; {next(us for us, choice in found if choice == CUBLAS):.1f} {CUBLAS}", flush=True
            )
        del layers


if __name__ == "__main__":
    main()

"""Errors and speeds of the kernels on one CUDA GPU.

    PYTHONPATH=src python benchmarks/kernels.py --mode correctness
    PYTHONPATH=src python benchmarks/kernels.py --mode benchmark [--only decode]

Both modes run every kernel in bf16 on the shapes of served models and print its error: the relative Frobenius norm
against the torch reference fed with fp32, or the share of other tokens for the sampler. The exit status is 1 if one is
larger than bf16 explains. (tests/kernels holds reference and kernels against fp64 on a wider grid.)

`benchmark` adds times: medians of CUDA-graph replays; a graph calls the kernel on enough different buffers to sweep
well past the 60 MB L2. Rates are shown against two ceilings measured first: the read bandwidth of a 4 GiB sum and
cuBLAS on 8192 x 8192 x 8192 in bf16.
"""

import argparse
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from qwen_engine.engine_args import HelpFormatter
from qwen_engine.kernels import gpu, reference

DTYPE = torch.bfloat16
DEVICE = "cuda"
ROTATION_BYTES = 256 * 2**20
MAX_ROTATION = 64
MAX_ERROR = 5e-3
VOCABULARY = 151936


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU does at best: bytes/s read and bf16 FLOP/s."""

    read_bytes_per_s: float
    flops_per_s: float


def time_us(calls: list[Callable[[], object]], replays: int = 30) -> float:
    """Median time of one call, in microseconds, over replays of a graph that makes all of them in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def measure_ceilings() -> Ceilings:
    words = torch.randn(2**30, device=DEVICE)
    read_us = time_us([words.sum], replays=10)
    read = words.numel() * words.element_size()
    del words
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    matmul_us = time_us([lambda: a @ b] * 5, replays=10)
    return Ceilings(read / read_us * 1e6, 2 * 8192**3 / matmul_us * 1e6)


def rotation(bytes_per_call: int) -> int:
    """Buffer sets to go through so that none is still in the L2 when its turn comes again."""
    return max(2, min(MAX_ROTATION, math.ceil(ROTATION_BYTES / bytes_per_call)))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(DTYPE)


class Table:
    """Prints one line per kernel and shape."""

    def __init__(self, ceilings: Ceilings | None) -> None:
        self.ceilings = ceilings
        self.all_right = True

    def row(
        self,
        name: str,
        shape: str,
        *,
        error: float,
        calls: list[Callable[[], object]],
        moved: float = 0.0,
        flops: float = 0.0,
        beside: dict[str, list[Callable[[], object]]] | None = None,
    ) -> None:
        """moved: bytes per call; flops: floating-point operations per call, which then set the rate shown."""
        self.all_right &= error <= MAX_ERROR
        line = f"{name:22s} {shape:34s} error {error:8.1e}"
        if self.ceilings is not None:
            us = time_us(calls)
            if flops:
                rate, ceiling, unit = flops / us * 1e6, self.ceilings.flops_per_s, "TFLOP/s"
            else:
                rate, ceiling, unit = moved / us * 1e6, self.ceilings.read_bytes_per_s, "TB/s"
            line += f" {us:9.1f} us {rate / 1e12:7.2f} {unit:7s} {rate / ceiling:5.0%}"
            for label, others in (beside or {}).items():
                line += f" | {label} {time_us(others):.1f} us"
        print(line, flush=True)


def bench_norms(table: Table) -> None:
    for tokens, hidden in ((1, 5120), (64, 5120), (8192, 5120)):
        size = tokens * hidden * 2
        weight = normal(hidden)
        sets = [(normal(tokens, hidden), normal(tokens, hidden)) for _ in range(rotation(2 * size))]
        x, residual = sets[0]
        expected = reference.rms_norm(x.float(), weight, 1e-6)
        table.row(
            "rms_norm",
            f"{tokens} x {hidden}",
            error=relative_error(gpu.rms_norm(x, weight, 1e-6), expected),
            calls=[partial(gpu.rms_norm, x, weight, 1e-6) for x, _ in sets],
            moved=2 * size,
        )
        expected = reference.add_rms_norm(x.float()[None], residual.float(), weight, 1e-6)
        table.row(
            "add_rms_norm",
            f"{tokens} x {hidden}",
            error=relative_error(gpu.add_rms_norm(x[None], residual.clone(), weight, 1e-6), expected),
            calls=[partial(gpu.add_rms_norm, x[None], residual, weight, 1e-6) for x, residual in sets],
            moved=4 * size,
        )


def bench_silu(table: Table) -> None:
    for tokens, inter in ((1, 12800), (64, 12800), (8192, 12800)):
        size = tokens * inter * 2
        sets = [normal(tokens, 2 * inter) for _ in range(rotation(3 * size))]
        table.row(
            "silu_mul",
            f"{tokens} x {inter}",
            error=relative_error(gpu.silu_mul(sets[0]), reference.silu_mul(sets[0].float())),
            calls=[partial(gpu.silu_mul, x) for x in sets],
            moved=3 * size,
        )


@dataclass(frozen=True, slots=True)
class Cache:
    """Random KV of `rows` sequences of `length` tokens each in shuffled blocks; slot = row."""

    k: torch.Tensor
    v: torch.Tensor
    block_tables: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.k, self.v, self.block_tables


def make_cache(rows: int, length: int, *, num_kv_heads: int, head_dim: int, block_size: int) -> Cache:
    blocks = math.ceil(length / block_size)
    k, v = (
        torch.empty(rows * blocks, num_kv_heads, block_size, head_dim, device=DEVICE, dtype=DTYPE).normal_()
        for _ in range(2)
    )
    return Cache(k, v, torch.randperm(rows * blocks, device=DEVICE).int().view(rows, blocks))


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bench_rope(table: Table) -> None:
    heads, kv_heads, head_dim, block_size = 32, 4, 128, 16
    weight = normal(head_dim)
    cos_sin = torch.randn(8192, head_dim, device=DEVICE)
    for tokens in (1, 64, 8192):
        cache = make_cache(1, 8192, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
        width = (heads + 2 * kv_heads) * head_dim
        moved = 2 * tokens * width * 2
        sets = [normal(tokens, width) for _ in range(rotation(moved))]
        slots, positions = int32([0] * tokens), torch.randperm(8192, device=DEVICE)[:tokens].int()

        norms = (weight, weight, 1e-6, cos_sin)
        places = (slots, positions, cache.block_tables, cache.k, cache.v, heads)
        expected = reference.qk_norm_rope_kv_write(sets[0].float(), *norms, *places)
        table.row(
            "qk_norm_rope_kv_write",
            f"{tokens} tokens, heads {heads}/{kv_heads}",
            error=relative_error(gpu.qk_norm_rope_kv_write(sets[0].clone(), *norms, *places), expected),
            calls=[partial(gpu.qk_norm_rope_kv_write, x, *norms, *places) for x in sets],
            moved=moved,
        )


def bench_embedding(table: Table) -> None:
    weight = normal(VOCABULARY // 2, 5120)
    for tokens in (64, 8192):
        ids = torch.randint(0, weight.shape[0], (1, tokens), device=DEVICE, dtype=torch.int32)
        arguments = (ids, int32([0] * tokens), torch.arange(tokens, device=DEVICE).int(), weight, 0)
        expected = reference.embed_tokens(*arguments)
        table.row(
            "embed_tokens",
            f"{tokens} x 5120",
            error=relative_error(gpu.embed_tokens(*arguments), expected),
            calls=[partial(gpu.embed_tokens, *arguments)] * 4,
            moved=2 * tokens * 5120 * 2,
        )


HEAD_DIM = 128
MAX_CONTEXT = 40960  # the bound that an engine with contexts this long gives to its graphs


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Lengths of the rows, 0 for padding, and heads of 128 in bf16."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int

    @property
    def shape(self) -> str:
        return f"{self.name}, heads {self.heads}/{self.kv_heads}"

    @property
    def moved(self) -> int:
        """Bytes of K and V."""
        return 2 * sum(self.lengths) * self.kv_heads * HEAD_DIM * 2


def even(rows: int, length: int, heads: int, kv_heads: int) -> DecodeBatch:
    return DecodeBatch(f"{rows} x {length}", (length,) * rows, heads, kv_heads)


def mixed(rows: int, shortest: int, longest: int, heads: int, kv_heads: int) -> DecodeBatch:
    rng = random.Random(rows)
    lengths = tuple(int(shortest * (longest / shortest) ** rng.random()) for _ in range(rows))
    return DecodeBatch(f"{rows} of {shortest}-{longest}", lengths, heads, kv_heads)


DECODE_BATCHES = (
    even(1, 640, 32, 4),
    even(1, 4096, 64, 8),
    even(1, 4096, 32, 4),
    even(1, 40960, 32, 4),
    even(2, 8192, 32, 4),
    DecodeBatch("5 x 4096 and 3 of padding", (4096,) * 5 + (0,) * 3, 32, 4),
    even(8, 512, 32, 8),
    even(16, 1024, 32, 8),
    even(16, 4096, 32, 4),
    even(16, 16384, 64, 8),
    even(64, 1024, 32, 4),
    even(64, 4096, 64, 8),
    even(256, 1024, 32, 4),
    even(256, 1024, 16, 8),
    mixed(8, 128, 16384, 32, 4),
    mixed(64, 256, 16384, 32, 4),
    mixed(64, 256, 16384, 64, 8),
    mixed(256, 64, 4096, 16, 8),
)


@dataclass(frozen=True, slots=True)
class DecodeTensors:
    """A batch over enough copies of its KV to sweep past the L2; `copies`: the slots of each."""

    q: torch.Tensor
    cache: Cache
    copies: list[torch.Tensor]
    seq_lens: torch.Tensor

    @classmethod
    def of(cls, batch: DecodeBatch) -> "DecodeTensors":
        needed = [math.ceil(length / 16) for length in batch.lengths]
        copies = rotation(batch.moved)
        cache = make_cache(1, copies * sum(needed) * 16, num_kv_heads=batch.kv_heads, head_dim=HEAD_DIM, block_size=16)
        tables = torch.zeros(copies * len(needed), MAX_CONTEXT // 16, dtype=torch.int32, device=DEVICE)
        for row, blocks in enumerate(cache.block_tables[0].split(needed * copies)):
            tables[row, : len(blocks)] = blocks
        slots = torch.arange(len(tables), dtype=torch.int32, device=DEVICE).view(copies, -1)
        seq_lens = int32(list(batch.lengths))
        slots[:, seq_lens == 0] = -1
        return cls(
            normal(len(needed), batch.heads, HEAD_DIM),
            Cache(cache.k, cache.v, tables),
            list(slots),
            seq_lens,
        )

    def split(self, slots: torch.Tensor) -> gpu.DecodeSplits:
        """What all layers of a step share."""
        return gpu.split_decodes(self.cache.k, self.cache.block_tables, slots, self.seq_lens, MAX_CONTEXT)

    def run(self, slots: torch.Tensor, splits: gpu.DecodeSplits) -> torch.Tensor:
        return gpu.decode_attention(self.q, *self.cache.tensors, slots, self.seq_lens, HEAD_DIM**-0.5, splits)

    def calls(self) -> list[Callable[[], object]]:
        """Enough that the launch of the graph does not count."""
        turns = [(slots, self.split(slots)) for slots in self.copies] * math.ceil(32 / len(self.copies))
        return [partial(self.run, *turn) for turn in turns]

    def error(self) -> float:
        """Of the longest row."""
        row = int(self.seq_lens.argmax())
        one = slice(row, row + 1)
        slots, splits = self.copies[0], self.split(self.copies[0])
        torch.cuda.synchronize()  # splits are not written by the launch before the one that reads them
        expected = reference.decode_attention(
            self.q[one].float(), *self.cache.tensors, slots[one], self.seq_lens[one], HEAD_DIM**-0.5, (MAX_CONTEXT,)
        )
        return relative_error(self.run(slots, splits)[one], expected)


def bench_decode(table: Table) -> None:
    for batch in DECODE_BATCHES:
        tensors = DecodeTensors.of(batch)
        table.row(
            "decode_attention",
            batch.shape,
            error=tensors.error(),
            calls=tensors.calls(),
            moved=batch.moved,
            beside={"split_decodes": [partial(tensors.split, slots) for slots in tensors.copies[:4]] * 8},
        )


def bench_prefill(table: Table) -> None:
    head_dim = 128
    shapes = (
        (1, 1024, 1024, 32, 4),
        (1, 4096, 4096, 32, 4),
        (1, 8192, 8192, 32, 4),
        (1, 16384, 16384, 32, 4),
        (1, 8192, 8192, 16, 8),
        (1, 2048, 16384, 32, 4),
        (8, 1024, 1024, 32, 4),
        (8, 200, 16584, 32, 4),
        (1, 128, 128, 32, 8),
        (1, 80, 32000, 32, 8),
    )
    for rows, queries, length, heads, kv_heads in shapes:
        cache = make_cache(rows, length, num_kv_heads=kv_heads, head_dim=head_dim, block_size=16)
        q = normal(rows * queries, heads, head_dim)
        out = torch.empty_like(q)
        slots = torch.arange(rows, device=DEVICE).int()
        query_start = torch.arange(rows + 1, device=DEVICE).int() * queries
        arguments = (
            *cache.tensors,
            slots,
            query_start,
            int32([length] * rows),
            head_dim**-0.5,
            queries,
            length,
        )

        run = partial(gpu.prefill_attention, q, *arguments, out)

        # The last 64 queries of the first row have the longest context.
        tail = q[queries - 64 : queries].float()
        one_row = (slots[:1], int32([0, 64]), int32([length]))
        expected = reference.prefill_attention(tail, *cache.tensors, *one_row, head_dim**-0.5, 64, length)
        beside = {}
        if queries == length:
            dense = [normal(rows, n, length, head_dim) for n in (heads, kv_heads, kv_heads)]
            dense[1:] = [t.repeat_interleave(heads // kv_heads, dim=1) for t in dense[1:]]
            beside["torch SDPA"] = [partial(F.scaled_dot_product_attention, *dense, is_causal=True)] * 3
        seen = queries * (length - queries) + queries * (queries + 1) / 2
        table.row(
            "prefill_attention",
            f"{rows} x {queries} of {length}, heads {heads}/{kv_heads}",
            error=relative_error(run()[queries - 64 : queries], expected),
            calls=[run] * 3,
            flops=4 * rows * seen * heads * head_dim,
            beside=beside,
        )


def peaked_logits(rows: int) -> torch.Tensor:
    """Like a language model's: nearly all of the mass on a few hundred ids."""
    logits = normal(rows, VOCABULARY).float()
    ids = torch.randint(VOCABULARY, (rows, 300), device=DEVICE)
    return logits.scatter_(1, ids, torch.linspace(18, 6, 300, device=DEVICE).expand(rows, -1)).to(DTYPE)


def bench_adjustments(table: Table) -> None:
    """Masks, biases and penalties, each of every row, and all together; slots have 1000 tokens behind them."""
    for rows in (1, 16, 256):
        size = rows * VOCABULARY
        sets = [normal(rows, VOCABULARY) * 3 for _ in range(rotation(6 * size))]
        slots = torch.arange(rows, device=DEVICE)
        bias = normal(rows, VOCABULARY).float()
        bits = torch.randint(2**31, (rows, VOCABULARY // 32), device=DEVICE, dtype=torch.int32) | 1
        counts = torch.zeros(rows, VOCABULARY, dtype=torch.int32, device=DEVICE)
        counts.scatter_(1, torch.randint(VOCABULARY, (rows, 1000), device=DEVICE), 1)
        in_prompt = counts.roll(7, dims=1) > 0
        factors = torch.full((3, rows), 0.1, device=DEVICE)
        presence, repetition = factors.clone(), factors.clone()
        presence[2], repetition[2] = 1.0, 1.1
        masks, biases = (slots.int(), bits), (torch.ones_like(slots), bias)
        kinds = {  # and bytes a token id beside those of the logits
            "masks": ({"masks": masks}, 1 / 8),
            "biases": ({"biases": biases}, 4),
            "presence": ({"penalties": (counts, in_prompt, presence)}, 4),
            "repetition": ({"penalties": (counts, in_prompt, repetition)}, 5),
            "all": ({"masks": masks, "biases": biases, "penalties": (counts, in_prompt, repetition)}, 9 + 1 / 8),
        }
        for kind, (options, read) in kinds.items():
            # Probabilities are compared, as the logits have infinities.
            outs = [impl.adjust_logits(sets[0], slots, **options).softmax(dim=1) for impl in (gpu, reference)]
            table.row(
                "adjust_logits",
                f"{rows} x {VOCABULARY}, {kind}",
                error=relative_error(*outs),
                calls=[partial(gpu.adjust_logits, x, slots, **options) for x in sets],
                moved=size * (6 + read),
            )


def bench_filters(table: Table) -> None:
    """top-k, top-p and both, beside a full sort."""
    off = 2**31
    kinds = {
        "peaked": (peaked_logits, 0.6),
        "flat": (lambda rows: normal(rows, VOCABULARY) * 3, 0.6),
        "very flat": (lambda rows: normal(rows, VOCABULARY), 1.0),
    }
    for rows in (1, 16, 256):
        size = rows * VOCABULARY * 2
        none = torch.zeros(rows, device=DEVICE)
        for kind, (make, temperature) in kinds.items():
            sets = [make(rows) for _ in range(rotation(size))]
            heat = torch.full((rows,), temperature, device=DEVICE)
            for top_k, top_p in ((20, 1.0), (off, 0.95), (20, 0.95)):
                columns = (torch.full((rows,), value, device=DEVICE) for value in (top_k, top_p))
                filters = (heat, *columns, none)
                few = [column[:16] for column in filters]
                lowest = gpu.lowest_kept(sets[0], *filters)
                table.row(
                    "lowest_kept",
                    f"{rows}, {kind}, k {'off' if top_k == off else top_k}, p {top_p:g}",
                    error=relative_error(lowest[:16], reference.lowest_kept(sets[0][:16], *few)),
                    calls=[partial(gpu.lowest_kept, x, *filters) for x in sets],
                    moved=size,
                    beside={"torch sort": [partial(torch.sort, x, dim=1) for x in sets[:2]]} if top_k == off else None,
                )


def bench_sampling(table: Table) -> None:
    for rows in (1, 16, 64, 256):
        size = rows * VOCABULARY * 2
        sets = [normal(rows, VOCABULARY) * 4 for _ in range(rotation(size))]
        heat = torch.full((rows,), 0.6, device=DEVICE)
        seeds, positions = torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE) + 100
        few = min(rows, 16)
        chosen = gpu.gumbel_argmax(sets[0], heat, seeds, positions)
        expected = reference.gumbel_argmax(sets[0][:few], heat[:few], seeds[:few], positions[:few])
        table.row(
            "gumbel_argmax",
            f"{rows} x {VOCABULARY}",
            error=(chosen[:few] != expected).double().mean().item(),
            calls=[partial(gpu.gumbel_argmax, x, heat, seeds, positions) for x in sets],
            moved=size,
        )
        logprobs = gpu.token_logprobs(sets[0], chosen)[0]
        table.row(
            "token_logprobs",
            f"{rows} x {VOCABULARY}",
            error=relative_error(logprobs, reference.token_logprobs(sets[0], chosen)[0]),
            calls=[partial(gpu.token_logprobs, x, chosen) for x in sets],
            moved=size,
        )
        for count in (1, 5, 20):
            best = gpu.best_ids(sets[0], count)
            table.row(
                "best_ids",
                f"{rows} x {VOCABULARY}, {count}",
                error=(best != reference.best_ids(sets[0], count)).double().mean().item(),
                calls=[partial(gpu.best_ids, x, count) for x in sets],
                moved=size,
            )


BENCHES = {
    "norms": bench_norms,
    "silu": bench_silu,
    "rope": bench_rope,
    "embedding": bench_embedding,
    "decode": bench_decode,
    "prefill": bench_prefill,
    "sampling": bench_sampling,
    "adjustments": bench_adjustments,
    "filters": bench_filters,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--mode", choices=("correctness", "benchmark"), default="benchmark")
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHES), default=list(BENCHES))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    ceilings = None
    if options.mode == "benchmark":
        ceilings = measure_ceilings()
        print(
            f"{torch.cuda.get_device_name()}: read {ceilings.read_bytes_per_s / 1e12:.2f} TB/s, "
            f"cuBLAS bf16 {ceilings.flops_per_s / 1e12:.0f} TFLOP/s"
        )
    table = Table(ceilings)
    for name in options.only:
        BENCHES[name](table)
    if not table.all_right:
        raise SystemExit(f"an error is larger than {MAX_ERROR}")


if __name__ == "__main__":
    main()

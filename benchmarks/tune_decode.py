"""Finds the `Shares` of `kernels/gpu/decode.py` on this GPU.

    PYTHONPATH=src python benchmarks/tune_decode.py [--replays 10] [--only 16]

Times every choice on the decode batches of `benchmarks/kernels.py` (CUDA-graph replays past the L2). Prints the best
ones of each batch, and for each choice its loss against the best of each batch: the mean over the batches with few
items (rows times KV heads), with many and over all, and the largest. --only N: batches of N rows. Many processes
compile the kernels first, into Triton's cache.
"""

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
import statistics

from kernels import DECODE_BATCHES, MAX_ERROR, DecodeBatch, DecodeTensors, time_us

from qwen_engine.kernels.gpu.decode import SHARES, Shares

FEW_ITEMS = 33  # up to here four programs of one per multiprocessor or more share an item
WARPS_PER_SM = 8  # what the registers of a multiprocessor suffice for
STEPS = {  # warps, warp_tokens → stages
    (1, 16): (4, 6, 8),
    (1, 32): (4,),
    (2, 16): (4, 6),
    (4, 16): (3, 4, 6),
    (4, 32): (3,),
    (8, 16): (3, 4),
}
CHOICES = [
    Shares(warps, warp_tokens, stages, programs_per_sm, min_tokens)
    for (warps, warp_tokens), depths in STEPS.items()
    for stages, programs_per_sm, min_tokens in itertools.product(depths, (1, 2, 3, 4, 6, 8), (64, 128, 256))
    if WARPS_PER_SM // 2 <= warps * programs_per_sm <= WARPS_PER_SM
]


def brief(shares: Shares) -> str:
    return (
        f"{shares.warps} warps x {shares.warp_tokens} tokens, {shares.stages} stages, "
        f"{shares.programs_per_sm} per SM, from {shares.min_tokens}"
    )


def run_once(batch: DecodeBatch, shares: Shares) -> None:
    DecodeTensors.of(batch).calls(shares=shares)[0]()


def compile_all(batches: list[DecodeBatch]) -> None:
    """Compiles every choice for the head counts of these batches, in as many processes as fit."""
    smallest = {}
    for batch in sorted(batches, key=lambda batch: -sum(batch.lengths)):
        smallest[batch.heads, batch.kv_heads] = batch
    context = multiprocessing.get_context("spawn")
    num_processes = max(1, min(24, (os.cpu_count() or 1) - 2))
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        jobs = [
            pool.submit(run_once, batch, shares)
            for batch in smallest.values()
            for shares in CHOICES
            if shares.min_tokens == CHOICES[0].min_tokens
        ]
        for job in jobs:
            job.result()


def tune(batch: DecodeBatch, replays: int) -> dict[Shares, float]:
    """Microseconds of every choice."""
    tensors = DecodeTensors.of(batch)
    times = {}
    for shares in dict.fromkeys((SHARES, *CHOICES)):
        error = tensors.error(shares=shares)
        if not error <= MAX_ERROR:
            print(f"wrong result, error {error:.1e}: {brief(shares)}")
            continue
        times[shares] = time_us(tensors.calls(shares=shares), replays)
    best = sorted(times, key=times.__getitem__)[:3]
    print(f"{batch.shape:38s} floor {batch.moved / 4.3e6:6.1f} us, default {times[SHARES]:6.1f}", flush=True)
    for shares in best:
        print(f"    {times[shares]:6.1f} us  {brief(shares)}", flush=True)
    return times


def print_losses(times: dict[DecodeBatch, dict[Shares, float]]) -> None:
    losses = {}
    for shares in dict.fromkeys((SHARES, *CHOICES)):
        of = {batch: row[shares] / min(row.values()) - 1 for batch, row in times.items() if shares in row}
        few = [loss for batch, loss in of.items() if len(batch.lengths) * batch.kv_heads <= FEW_ITEMS]
        many = [loss for batch, loss in of.items() if len(batch.lengths) * batch.kv_heads > FEW_ITEMS]
        if len(of) == len(times):
            losses[shares] = [statistics.mean(part) if part else 0.0 for part in (few, many, few + many)]
            losses[shares].append(max(of.values()))
    print("loss against the best of each batch: few items, many, all, largest")
    for column, label in enumerate(("few", "many", "all")):
        print(f"best by {label}:")
        for shares in sorted(losses, key=lambda shares: losses[shares][column])[:12]:
            print("    " + " ".join(f"{loss:7.1%}" for loss in losses[shares]) + f"  {brief(shares)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--only", type=int, help="batches of this many rows")
    options = parser.parse_args()
    batches = [batch for batch in DECODE_BATCHES if options.only in (None, len(batch.lengths))]
    compile_all(batches)
    print_losses({batch: tune(batch, options.replays) for batch in batches})


if __name__ == "__main__":
    main()

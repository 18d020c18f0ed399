"""Cost of scheduling on the host: a decode step of many running requests, a prefix match, and a large pool's start.

python benchmarks/scheduler.py [--num-seqs 256] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from struct import pack

from qwen_engine.engine_args import HelpFormatter
from qwen_engine.request import Request, SamplingParams
from qwen_engine.scheduling.block_manager import BlockManager, extend_block_keys
from qwen_engine.scheduling.scheduler import Scheduler


def decode_step_us(num_seqs: int, num_steps: int = 400) -> float:
    """Median microseconds of schedule + apply with `num_seqs` decoding requests."""
    scheduler = Scheduler(
        BlockManager(num_blocks=200_000, block_size=16),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=1 << 20,
        max_model_len=8192,
        vocab_size=151_936,
    )
    params = SamplingParams(max_tokens=4096, temperature=0.0)
    for index in range(num_seqs):
        prompt = [(index * 131 + i) % 50_000 for i in range(512 + index % 16)]
        scheduler.add(Request(f"r{index}", prompt, params, eos_token_ids=(151_645, 151_643)))
    times = []
    for step in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduler.apply(plan.step, [step % 50_000] * len(plan.slots))
        times.append(time.perf_counter() - start)
        if step == 0:
            times.clear()  # the prompts
    return statistics.median(times) * 1e6


def match_us_per_block(num_blocks: int = 2048, repeats: int = 20) -> float:
    """Microseconds per cached block: keys of a fresh prompt, packed as it came, computed, looked up and referenced."""
    manager = BlockManager(num_blocks=2 * num_blocks, block_size=16)
    token_ids = [i % 30_000 for i in range(num_blocks * 16)]
    packed_ids = pack(f"{len(token_ids)}i", *token_ids)
    keys: list = []
    extend_block_keys(keys, packed_ids, 16, None)
    blocks = manager.allocate(num_blocks)
    for block_id, key in zip(blocks, keys):
        manager.publish(block_id, key)
    manager.release(blocks)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        keys = []
        extend_block_keys(keys, packed_ids, 16, None)
        matched = manager.match(keys)
        manager.num_unreferenced(matched)
        manager.acquire(matched)
        times.append(time.perf_counter() - start)
        assert len(matched) == num_blocks
        manager.release(matched)
    return statistics.median(times) / num_blocks * 1e6


def shared_prefix_ms(num_requests: int = 64, shared: int = 16_384, own: int = 200) -> float:
    """Milliseconds to schedule requests that share a cached prefix, all in one step: keys, hits, block tables, plan."""
    scheduler = Scheduler(
        BlockManager(num_blocks=20_000, block_size=16),
        max_num_seqs=num_requests,
        max_num_batched_tokens=1 << 20,
        max_model_len=1 << 20,
        vocab_size=151_936,
    )
    rng = random.Random(0)
    prefix = rng.choices(range(150_000), k=shared)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    scheduler.add(Request("first", [*prefix, 1], params))
    scheduler.apply(scheduler.schedule().step, [0])
    for index in range(num_requests):
        scheduler.add(Request(f"r{index}", [*prefix, *rng.choices(range(150_000), k=own)], params))
    start = time.perf_counter()
    plan = scheduler.schedule()
    took_s = time.perf_counter() - start
    assert sum(plan.num_tokens) == num_requests * own
    return took_s * 1e3


def pool_start_s(num_blocks: int = 1_000_000) -> float:
    start = time.perf_counter()
    BlockManager(num_blocks=num_blocks, block_size=16)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    figures = {
        "num_seqs": args.num_seqs,
        "decode_step_us": round(decode_step_us(args.num_seqs), 1),
        "match_us_per_block": round(match_us_per_block(), 3),
        "shared_prefix_ms": round(min(shared_prefix_ms() for _ in range(5)), 2),
        "pool_start_s": round(pool_start_s(), 3),
    }
    print(f"schedule + apply, {args.num_seqs} decoding requests  {figures['decode_step_us']:8.1f} us   (goal 300)")
    print(f"prefix match, per cached block                {figures['match_us_per_block']:8.3f} us   (goal 1.5)")
    print(f"64 requests that share 16,384 tokens          {figures['shared_prefix_ms']:8.2f} ms   (goal 2)")
    print(f"pool of 1,000,000 blocks starts in            {figures['pool_start_s']:8.3f} s    (goal 1)")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

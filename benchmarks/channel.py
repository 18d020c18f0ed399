"""Cost of bringing a plan from the driver to a worker process: latency at two paces, throughput, CPU while idle.

python benchmarks/channel.py [--num-seqs 256] [--num-messages 2000] [--num-subscribers 1] [--spin] [--json FILE]

The message is an encoded plan of steadily decoding rows. Latency runs from before `publish` to after `receive`, on the
clock that all processes of a host share. The processes need a core each; a busy machine shows in the p99.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import timeit
from pathlib import Path

import msgpack

from qwen_engine.engine.channel import Publisher, connect, open_publisher, ring
from qwen_engine.engine_args import HelpFormatter
from qwen_engine.scheduling.plan_codec import decode_plan, encode_plan
from qwen_engine.scheduling.step_plan import StepPlan

PACES_S = {"1 ms": 0.001, "10 ms": 0.010}
IDLE_S = 2.0


def steady_plan(num_seqs: int) -> StepPlan:
    """Every row decodes one token; every 16th gets a block."""
    slots = list(range(num_seqs))
    return StepPlan(
        step=100_000, slots=slots, num_tokens=[1] * num_seqs, new_blocks=[(slot, 90_000 + slot) for slot in slots[::16]]
    )


def subscribe(address: str, index: int, *, spin: bool) -> None:
    """The worker side: arrival times of each batch of messages (an empty one ends it), CPU time of an idle wait."""
    if spin:
        ring.has_cores_for = lambda _: True
    with connect(address, index=index) as subscriber:
        batches: list[list[int]] = [[]]
        while (message := subscriber.receive(60)) != b"idle":
            if message:
                batches[-1].append(time.monotonic_ns())
            else:
                batches.append([])
        start = time.process_time()
        subscriber.receive(60)
        idle_cpu = (time.process_time() - start) / IDLE_S
    sys.stdout.buffer.write(msgpack.packb([batches[:-1], idle_cpu]))


def send(publisher: Publisher, message: bytes, num_messages: int, pace_s: float) -> list[int]:
    """Publishes one message each `pace_s`; returns the times. 0 is back to back."""
    times = []
    start = time.monotonic()
    for number in range(num_messages):
        while (early := start + number * pace_s - time.monotonic()) > 0:
            time.sleep(early)
        times.append(time.monotonic_ns())
        publisher.publish(message)
    publisher.publish(b"")
    return times


def measure(kind: str, message: bytes, *, num_messages: int, num_subscribers: int, spin: bool) -> dict[str, float]:
    with open_publisher(kind, num_subscribers=num_subscribers) as publisher:
        readers = [
            subprocess.Popen(
                [sys.executable, __file__, "--subscriber", str(index), *(["--spin"] if spin else [])],
                env={**os.environ, "CHANNEL_ADDRESS": publisher.address},
                stdout=subprocess.PIPE,
            )
            for index in range(num_subscribers)
        ]
        send(publisher, message, 100, 0.0)  # waits for the readers to start
        time.sleep(1.0)
        counts = [num_messages, num_messages // 4, 10 * num_messages]
        sent = [send(publisher, message, count, pace) for count, pace in zip(counts, [*PACES_S.values(), 0.0])]
        publisher.publish(b"idle")
        time.sleep(IDLE_S)
        publisher.publish(b"awake")
        results = [msgpack.unpackb(reader.communicate(timeout=60)[0]) for reader in readers]
    figures = {}
    for position, (name, published) in enumerate(zip(PACES_S, sent), start=1):
        delays = sorted(
            (after - before) / 1e3
            for arrivals, _ in results
            for before, after in zip(published, arrivals[position], strict=True)
        )
        figures[f"latency_us_median_{name}"] = round(statistics.median(delays), 1)
        figures[f"latency_us_p99_{name}"] = round(delays[int(0.99 * len(delays))], 1)
    spans = [(arrivals[-1][-1] - sent[-1][0]) / 1e9 for arrivals, _ in results]
    figures["messages_per_s"] = round(len(sent[-1]) / max(spans))
    figures["idle_cpu_percent"] = round(100 * max(idle_cpu for _, idle_cpu in results), 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--num-messages", type=int, default=2000, help="at a pace of 1 ms; others in proportion")
    parser.add_argument("--num-subscribers", type=int, default=1)
    parser.add_argument("--spin", action="store_true", help="readers spin as if there were cores for all to spare")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--subscriber", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.subscriber is not None:
        subscribe(os.environ["CHANNEL_ADDRESS"], args.subscriber, spin=args.spin)
        return
    plan = steady_plan(args.num_seqs)
    message = encode_plan(plan)
    figures: dict[str, object] = {
        "plan_bytes": len(message),
        "encode_us": round(min(timeit.repeat(lambda: encode_plan(plan), number=200, repeat=10)) / 200 * 1e6, 1),
        "decode_us": round(min(timeit.repeat(lambda: decode_plan(message), number=200, repeat=10)) / 200 * 1e6, 1),
    }
    print(f"plan of {args.num_seqs} decoding rows: {len(message)} bytes (goal 4096)")
    print(f"encode {figures['encode_us']} us, decode {figures['decode_us']} us")
    for kind in ("ring", "zmq"):
        found = measure(
            kind, message, num_messages=args.num_messages, num_subscribers=args.num_subscribers, spin=args.spin
        )
        figures[kind] = found
        for name in PACES_S:
            median, p99 = found[f"latency_us_median_{name}"], found[f"latency_us_p99_{name}"]
            print(f"{kind:5}one message each {name:6}  median {median:8.1f} us  p99 {p99:8.1f} us   (goal: median 50)")
        print(f"{kind:5}back to back          {found['messages_per_s']:8} messages/s")
        print(f"{kind:5}idle subscriber       {found['idle_cpu_percent']:8.2f} % of a core")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

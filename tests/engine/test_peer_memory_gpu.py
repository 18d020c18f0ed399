"""Sums through the memory of two GPUs: exact, the same bits on both, thousands of times, and never for ever."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from qwen_engine import kernels
from qwen_engine.distributed.peer_memory import PeerMemory, open_peer_memory
from qwen_engine.distributed.tp_group import LOOPBACK, open_store
from qwen_engine.engine.rank import try_peer_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SIZE = 2
EPS = 1e-6
SHAPES = [(1, 5120), (3, 4096), (16, 5120), (7, 1000), (64, 1026), (256, 5120), (1, 2), (2, 64), (409, 5120)]
REPLAYS = 3000


def push(peers: PeerMemory, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, site: int) -> torch.Tensor:
    return kernels.push_add_rms_norm(x[None], residual, weight, EPS, peers, site)


def inputs(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The parts of all ranks and the residual, many of the parts +0.0 or -0.0."""
    rng = torch.Generator("cuda").manual_seed(seed)
    parts = []
    for _ in range(SIZE):
        part = torch.randn(shape, device="cuda", generator=rng)
        part[torch.rand(shape, device="cuda", generator=rng) < 0.5] = 0.0
        part[torch.rand(shape, device="cuda", generator=rng) < 0.1] = -0.0
        parts.append(part.to(dtype))
    return parts, torch.randn(shape, device="cuda", generator=rng).to(dtype)


def check_exact_sums(peers: PeerMemory, same_everywhere: Callable[[torch.Tensor], None]) -> None:
    site = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for seed, shape in enumerate(SHAPES):
            parts, residual = inputs(shape, dtype, seed)
            if not peers.fits(parts[0], dtype):
                continue
            weight = torch.randn(shape[1], device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)
            total = torch.zeros(shape, device="cuda")
            for part in parts:
                total += part
            total += residual
            out = push(peers, parts[peers.rank], residual, weight, site)
            site = 1 - site
            assert torch.equal(residual, total.to(dtype)), (dtype, shape)
            expected = total.double() * (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
            # In fp32 it is the order in which the squares are added that counts, not the last rounding.
            torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=max(2 * torch.finfo(dtype).eps, 1e-5))
            same_everywhere(out)


def check_replays(peers: PeerMemory, same_everywhere: Callable[[torch.Tensor], None]) -> None:
    """A graph of several sums, replayed with new inputs each time, beside a plain sum of the same."""
    rows, hidden, layers = 16, 5120, 8
    x, residual = (torch.zeros(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def layer_sums() -> torch.Tensor:
        out = x
        for layer in range(layers):
            out = push(peers, out, residual, weight, layer % 2)
        return out

    layer_sums()
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = layer_sums()
    digest = torch.zeros((), device="cuda", dtype=torch.int64)
    for replay in range(REPLAYS):
        parts, start = inputs((rows, hidden), torch.bfloat16, replay)
        x.copy_(parts[peers.rank])
        residual.copy_(start)
        graph.replay()
        digest += out.view(torch.int16).long().sum() * (replay + 1)
        if replay % 500 == 0:
            replayed = out.clone()
            residual.copy_(start)
            assert torch.equal(layer_sums(), replayed)
    same_everywhere(digest)
    first = torch.zeros(rows, hidden, device="cuda")
    for part in parts:
        first += part
    x.copy_(parts[peers.rank])
    residual.copy_(start)
    push(peers, x, residual, weight, 0)
    assert torch.equal(residual, (first + start).bfloat16())
    push(peers, x, residual, weight, 1)


def check_layers(peers: PeerMemory, same_everywhere: Callable[[torch.Tensor], None]) -> None:
    """Products that a sum lets in before it has its own input: replays give what launches one at a time do."""
    rows, hidden = 16, 1024
    rng = torch.Generator("cuda").manual_seed(peers.rank)
    weights = [torch.randn(hidden, hidden, device="cuda", generator=rng).mul(hidden**-0.5).bfloat16() for _ in range(8)]
    scale = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(rows, hidden, device="cuda", dtype=torch.bfloat16)

    def layers(sync: Callable[[], None]) -> torch.Tensor:
        out, residual = x.clone(), torch.zeros_like(x)
        for site, weight in enumerate(weights):
            sync()
            parts = kernels.linear_parts(out, weight)
            sync()
            out = kernels.push_add_rms_norm(parts, residual, scale, EPS, peers, site % 2)
        sync()
        return out

    layers(torch.cuda.synchronize)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = layers(lambda: None)
    for replay in range(REPLAYS // 10):
        x.copy_(inputs((rows, hidden), torch.bfloat16, replay)[1])
        graph.replay()
        graph.replay()
        assert torch.equal(out, layers(torch.cuda.synchronize))
    same_everywhere(out)


def check_abort(peers: PeerMemory, same_everywhere: Callable[[torch.Tensor], None]) -> None:
    """A rank that waits for one that never comes is let go."""
    del same_everywhere
    if peers.rank == 0:
        x = torch.ones(2, 64, device="cuda", dtype=torch.bfloat16)
        push(peers, x, x.clone(), x[0], 0)
        done = torch.cuda.Event()
        done.record()
        for _ in range(1000):
            assert not done.query()
        peers.abort()
        done.synchronize()


CHECKS = {"sums": check_exact_sums, "replays": check_replays, "layers": check_layers, "abort": check_abort}


def rank_main(name: str, rank: int, port: int, results: multiprocessing.Queue) -> None:
    try:
        torch.cuda.set_device(rank)
        store = dist.TCPStore(LOOPBACK, port, SIZE, is_master=False)
        device = torch.device("cuda", rank)
        peers = open_peer_memory(store, rank=rank, size=SIZE, device=device, self_test=try_peer_memory)
        assert peers is not None
        counter = iter(range(10**6))

        def same_everywhere(x: torch.Tensor) -> None:
            key, value = f"value/{next(counter)}", str(x.flatten().view(torch.uint8).long().cumsum(0)[-1:].tolist())
            store.set(f"{key}/{rank}", value)
            assert store.get(f"{key}/{1 - rank}").decode() == value, key

        CHECKS[name](peers, same_everywhere)
        torch.cuda.synchronize()
        store.set(f"done/{rank}", "1")
        store.get(f"done/{1 - rank}")
        peers.close()
        results.put("")
    except BaseException:
        results.put(f"rank {rank}: {traceback.format_exc()}")


def on_two_gpus(name: str) -> list[str]:
    """What went wrong, if anything; the other ranks are not waited for then."""
    server = open_store(SIZE)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    problems = ["no answer"]
    processes = [context.Process(target=rank_main, args=(name, rank, server.port, results)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    try:
        problems.clear()
        while len(problems) < SIZE and not any(problems):
            problems.append(results.get(timeout=90))
        return problems
    finally:
        for process in processes:
            process.join(0 if any(problems) else 5)
            process.kill()


@pytest.mark.parametrize("name", CHECKS)
def test_sums_through_peer_memory(name):
    assert on_two_gpus(name) == ["", ""]

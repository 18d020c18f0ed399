"""Ranks agree on peer memory: all of them have it, or none has."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from qwen_engine.distributed import peer_memory

SIZE = 3


class FakePeerMemory:
    """Memory that can fail at any step on one rank."""

    failing: ClassVar[dict[str, int]] = {}

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.opened: list[bytes] = []
        self.closed = 0
        self._step("allocate")
        made[rank] = self

    def handle(self) -> bytes:
        self._step("handle")
        return b"handle \0 %d" % self.rank

    def open(self, handles: list[bytes]) -> None:
        self._step("open")
        self.opened = handles

    def test(self) -> None:
        self._step("test")

    def close(self) -> None:
        self.closed += 1

    def _step(self, name: str) -> None:
        if self.failing.get(name) == self.rank:
            raise RuntimeError(f"{name} fails here")


made: dict[int, FakePeerMemory] = {}


@pytest.fixture
def logged(monkeypatch) -> list[str]:
    """What is logged, whatever other tests have made of the loggers."""
    lines: list[str] = []
    monkeypatch.setattr(peer_memory.logger, "log", lambda level, text, *args: lines.append(text % args))
    return lines


@pytest.fixture
def on_all_ranks(monkeypatch):
    """What `open_peer_memory` gives on every rank, with the rank on which each named step fails."""
    monkeypatch.setattr(peer_memory, "PeerMemory", FakePeerMemory)

    def run(**failing: int) -> list[FakePeerMemory | None]:
        made.clear()
        monkeypatch.setattr(FakePeerMemory, "failing", failing)
        store, results = dist.HashStore(), [None] * SIZE

        def rank_main(rank: int) -> None:
            results[rank] = peer_memory.open_peer_memory(
                store, rank=rank, size=SIZE, device=torch.device("cpu"), self_test=FakePeerMemory.test
            )

        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results

    return run


def test_every_rank_opens_the_memory_of_all(on_all_ranks):
    results = on_all_ranks()
    assert [peers.rank for peers in results] == list(range(SIZE))
    handles = [b"handle \0 %d" % rank for rank in range(SIZE)]
    assert all(peers.opened == handles and not peers.closed for peers in results)


@pytest.mark.parametrize("step", ["allocate", "handle", "open", "test"])
@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_that_cannot_is_enough_for_none_to_have_it(step, rank, on_all_ranks, logged):
    assert on_all_ranks(**{step: rank}) == [None] * SIZE
    assert all(peers.closed == 1 for peers in made.values())
    assert sum(f"no peer memory (RuntimeError: {step} fails here)" in line for line in logged) == 1
    assert sum(f"no peer memory (rank {rank} has none)" in line for line in logged) == SIZE - 1


def test_ranks_of_several_hosts_have_none(on_all_ranks, monkeypatch, logged):
    hosts = threading.local()
    counter = iter(range(SIZE))

    def host_id() -> bytes:
        if not hasattr(hosts, "name"):
            hosts.name = b"host %d\n" % min(next(counter), 1)
        return hosts.name

    monkeypatch.setattr(peer_memory, "_host_id", host_id)
    assert on_all_ranks() == [None] * SIZE
    assert all("the ranks are on several hosts" in line for line in logged)
    assert not any(peers.opened for peers in made.values())

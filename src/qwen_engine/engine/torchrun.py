"""Ranks that torchrun started: the same program on every rank, rank 0 drives and the others serve it."""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from qwen_engine.distributed.tp_group import LOOPBACK

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_engines = itertools.count()


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """This process's place among torchrun's ranks."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    master_host: str
    master_port: int

    @property
    def is_multi_host(self) -> bool:
        return self.local_size < self.size

    @property
    def host(self) -> str:
        """This host's address as the other hosts see it; loopback when there are none."""
        if not self.is_multi_host:
            return LOOPBACK
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.master_host, self.master_port))  # sends nothing; picks the route
            return probe.getsockname()[0]

    @classmethod
    def current(cls) -> TorchrunRank | None:
        """None when this process was not started by torchrun, or alone."""
        if any(name not in os.environ for name in _VARIABLES) or int(os.environ["WORLD_SIZE"]) == 1:
            return None
        rank, local_rank, size, local_size = (int(os.environ[name]) for name in _VARIABLES[:4])
        return cls(rank, local_rank, size, local_size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def open_store(self) -> dist.Store:
        """A key-value store of the next engine of this program; every rank creates its engines in the same order."""
        use_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_master = self.rank == 0 and not use_agent_store
        store = dist.TCPStore(
            self.master_host, self.master_port, self.size, is_master=is_master, wait_for_workers=False
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives ranks that are restarted
        return dist.PrefixStore(f"qwen-engine/{attempt}/{next(_engines)}", store)

"""The tensor-parallel group: which rank this is, and the collectives the layers need.

Passed to layers and loader explicitly; there is no global group, so two engines can live in one process. A group of one
rank does nothing and needs no torch.distributed.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from qwen_engine.distributed.peer_memory import PeerMemory
from qwen_engine.distributed.progress import Progress

LOOPBACK = "127.0.0.1"
GLOO_CONNECT_TIMEOUT_S = 30.0
"""Short, because nothing can end a wait for a rank that dies while it connects: gloo tries five times as long."""
_WAIT_SLICE = timedelta(milliseconds=50)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """For collectives beside computation; urgent, or they would start behind all programs of a running product."""
    return torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True, slots=True)
class TPGroup:
    """Rank `rank` of `size`. `process_group` does the communication; None for a single rank.

    peers: for sums that go through the memory of the ranks' GPUs. progress: counts the collectives.
    check: called while a CPU waits in one; what it raises ends the wait.
    Collectives of GPUs run on the current stream (asyncOp off), so that a captured graph has them in line.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    progress: Progress = field(default_factory=Progress, compare=False)
    check: Callable[[], None] | None = field(default=None, compare=False)
    peers: PeerMemory | None = None

    def all_reduce(self, x: torch.Tensor, *, in_rank_order: bool = False) -> torch.Tensor:
        """Sum of `x` over all ranks, in place.

        in_rank_order: added in fp32 and rounded once. Else the order may depend on the size of x.
        """
        if in_rank_order and self.size > 2:  # a sum of two has no order
            parts = self.all_gather_last_dim(x).unflatten(-1, (self.size, -1)).float().unbind(-2)
            return x.copy_(functools.reduce(torch.add, parts))
        return self._reduce(x, dist.ReduceOp.SUM)

    def start_all_reduce(self, x: torch.Tensor, *, in_rank_order: bool = False) -> Callable[[], None]:
        """`all_reduce` on a stream of its own, beside what the current one does next. What is returned lets the current
        stream wait for it; `x` is kept until then. On a CPU it is done at once."""
        if not x.is_cuda:
            self.all_reduce(x, in_rank_order=in_rank_order)
            return lambda: None
        stream, current = _side_stream(x.device), torch.cuda.current_stream(x.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.all_reduce(x, in_rank_order=in_rank_order)
        done = stream.record_event()
        return lambda: torch.cuda.current_stream(x.device).wait_event(done)

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum of `x` over all ranks, in place."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] on each rank → [..., size * n], in rank order, on every rank."""
        if self.process_group is None:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        self.progress.enter_collective()
        self._finish(self.process_group.allgather([parts], [x.contiguous()], options), x)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of rank 0, in place, on every rank."""
        if self.process_group is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
            self.progress.enter_collective()
            self._finish(self.process_group.broadcast([x], options), x)
        return x

    def _reduce(self, x: torch.Tensor, op: dist.ReduceOp) -> torch.Tensor:
        if self.process_group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp, options.asyncOp = op, False
            self.progress.enter_collective()
            self._finish(self.process_group.allreduce([x], options), x)
        return x

    def abort(self) -> None:
        """Ends collectives that wait for a dead rank. The group cannot be used afterwards."""
        if self.peers is not None:
            self.peers.abort()
        if self.process_group is not None:
            with contextlib.suppress(RuntimeError):  # gloo does not; there the dead rank's sockets end the wait
                self.process_group.abort()

    def close(self) -> None:
        """Frees the peer memory; after `abort`, and when no kernel can use it any more."""
        if self.peers is not None:
            self.peers.close()

    def _finish(self, work: dist.Work | None, x: torch.Tensor) -> None:
        """Lets what follows on `x` see the result of a collective.

        On a GPU it is in line on the current stream, and there may be no `work` to wait for. A CPU waits here, in
        slices: inside torch an interrupt would not be heard, and a rank that hangs would make it wait for long.
        """
        if x.is_cuda:
            return
        assert work is not None
        while True:
            try:
                work.wait(_WAIT_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what went wrong; nothing if it ended just after the slice
                    return
            if self.check is not None:
                self.check()


def connect(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    progress: Progress,
    check: Callable[[], None] | None = None,
    host: str = LOOPBACK,
) -> TPGroup:
    """Joins the group of `size` ranks that share `store`: NCCL between GPUs, gloo between CPUs. All call it at once.

    timeout_s: how long a gloo collective waits for its peers. host: this machine's address for gloo's sockets.
    progress, check: see TPGroup.
    """
    if size == 1:
        return TPGroup()
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
    else:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=GLOO_CONNECT_TIMEOUT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        group = dist.ProcessGroupGloo(store, rank, size, options)
        group._set_default_timeout(timedelta(seconds=timeout_s))
    return TPGroup(rank, size, group, progress, check)


def open_store(size: int) -> dist.TCPStore:
    """A key-value store that the ranks of this host meet at: on a port the system chooses, listening on loopback.

    Use it through clients only: when this object goes, all that they wait for breaks off.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=size)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )

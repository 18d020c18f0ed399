"""CUDA graphs of the parts of a step, by size: captured once at the start, replayed from then on.

All graphs share one memory pool, which the largest, captured first, makes big enough. They may share it because
replays follow one another on one stream and what one leaves there is read before the next. Every rank captures the
same calls in the same order, for the collectives among them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from qwen_engine.errors import QwenEngineError, summary

logger = logging.getLogger(__name__)

MIB = 1 << 20
_FIXED_SIZES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, *range(32, 129, 8))


_MIXED_SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Rows of decode steps and tokens of mixed steps, each ascending."""

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes worth a graph, ascending up to max_num_seqs: close together where a padding row costs most."""
    sizes = {*_FIXED_SIZES, *range(144, max_num_seqs, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def mixed_sizes(max_num_tokens: int, largest_step: int) -> tuple[int, ...]:
    """Numbers of tokens up to max_num_tokens worth a graph, none beyond that which the largest step needs."""
    needed = bisect_left(_MIXED_SIZES, largest_step) + 1
    return tuple(size for size in _MIXED_SIZES[:needed] if size <= max_num_tokens)


Calls = Mapping[str, Callable[[int], None]]
"""Parts of a step by name: functions of the size that launch kernels on the current stream, do not synchronise, and at
the time of the capture touch no live state."""
Part = tuple[Calls, Sequence[int]]
"""Calls and the sizes that they are captured at."""


_capture_lock = threading.Lock()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: cuBLAS keeps 32 MiB for every stream it has seen, until the process ends.

    That engines share this workspace is no danger: they all replay on the default stream, one graph after another.
    """
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """One capture at a time, and no garbage collection, which would free what belongs to others in the middle of it."""
    with _capture_lock:
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class CudaGraphs:
    """Graphs by the name of a part and the size. CUDA only.

    warming_up: entered while a call runs ahead of its capture; it may make the call shorter, if it still launches all
    kernels, and takes no less memory, than the whole.
    """

    def __init__(
        self, device: torch.device, warming_up: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        self._device = device
        self._warming_up = warming_up
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._pool: tuple[int, int] | None = None

    def capture(self, *parts: Part) -> None:
        """Captures every call at its sizes. QwenEngineError, naming the size, if one of them fails."""
        start, free_before = time.perf_counter(), self._free_bytes()
        with _capturing():
            for calls, sizes in parts:
                for size in sorted(sizes, reverse=True):
                    self._capture_size(calls, size)
        torch.cuda.empty_cache()  # what the calls took before they were captured
        logger.info(
            "captured %d graphs in %.1f s, %d MiB",
            len(self._graphs),
            time.perf_counter() - start,
            (free_before - self._free_bytes()) // MIB,
        )

    def replay(self, name: str, size: int) -> None:
        """Launches a captured call on the current stream."""
        self._graphs[name, size].replay()

    def measure(self, *parts: Part) -> int:
        """Bytes that the graphs of `capture` will take, from two sizes of each part, captured and freed again.

        first + second * (n - 1) for each: the largest fills the shared pool and takes `first` bytes; `second` is what
        the next one takes on top, an upper estimate for each of the smaller ones.
        """
        total, free = 0, self._free_bytes()
        with _capturing():
            for calls, sizes in parts:
                for size, times in zip(sorted(sizes, reverse=True)[:2], (1, len(sizes) - 1)):
                    self._capture_size(calls, size)
                    torch.cuda.empty_cache()
                    free, before = self._free_bytes(), free
                    total += max(0, before - free) * times
        self._graphs.clear()
        self._pool = None
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return total

    def _capture_size(self, calls: Calls, size: int) -> None:
        try:
            stream = _capture_stream(self._device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                with self._warming_up():  # compiles kernels and loads libraries, which a capture cannot
                    for call in calls.values():
                        call(size)
                for name, call in calls.items():
                    self._graphs[name, size] = self._captured(call, size)
            torch.cuda.current_stream(self._device).wait_stream(stream)
        except Exception as error:
            raise QwenEngineError(
                f"capturing the CUDA graph of {size} tokens failed ({summary(error)}); enforce_eager=True runs without "
                "graphs"
            ) from error

    def _captured(self, call: Callable[[int], None], size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, such as NCCL's watchdog, is none of this capture's business.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            call(size)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what ended the call is the reason to tell
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

"""What the host launches, and how all of it is compiled before the first step.

Triton compiles a kernel where it is first launched, one after the other, which takes ten seconds for those of a model.
`compile_launched` has them compiled by as many threads as there are cores: most of that time goes into compiler passes,
ptxas and the C compiler, which run side by side.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)
_ZEROED = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}


def only_compiles() -> bool:
    """Whether this is inside `compile_launched`, where what Triton calls a kernel is a promise of one."""
    return _only_compiles.get()


class Kernel:
    """A Triton function that the host launches, as kernel[grid](...); inside `compile_launched` it is only compiled."""

    def __init__(self, function: triton.JITFunction) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self.function.run, grid=grid, warmup=only_compiles())


def compile_launched(steps: Callable[[], object], device: torch.device) -> None:
    """Runs `steps` without its launches, and returns when all that it would have launched is ready on the device.

    Tensors that kernels would have written are zero. A kernel that does not compile says so when it is launched.
    """
    with _Compilers(device) as compilers:
        copy_context().run(_ask, steps, compilers)


def _ask(steps: Callable[[], object], compilers: Executor) -> None:
    """In a context of its own, which the modes that it sets end with, however it ends."""
    _only_compiles.set(True)
    with triton.AsyncCompileMode(compilers, ignore_errors=True), _EmptyIsZero():
        steps()


class _EmptyIsZero(TorchFunctionMode):
    """What no kernel has written may be an index of what follows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ZEROED.get(func, func)(*args, **(kwargs or {}))


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and load them on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="qwen-engine-compiler")
        self._device = device

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        """What AsyncCompileMode calls, once for each kernel that this process has not compiled yet."""
        return super().submit(self._load, compile_kernel)

    def _load(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        with torch.cuda.device(self._device):
            kernel.run  # noqa: B018 (the first look at it builds the launcher and loads the code)
        return kernel

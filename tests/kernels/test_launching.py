"""Kernels compiled ahead of their first launch: all that is asked for, nothing launched, nothing compiled again."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from qwen_engine.kernels import gpu
from qwen_engine.kernels.gpu.launching import Kernel

# A driver that compiles for a Hopper GPU and counts what is loaded and launched stands in for CUDA's.
COMPILE_AHEAD = """
import contextlib
import json
import threading

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

loaded, launched = [], []


class Utils:
    def load_binary(self, name, *_):
        loaded.append((name, threading.current_thread().name))
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, _):
        return {"max_shared_mem": 232448}


class Driver:
    utils = Utils()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def launcher_cls(self, source, _):
        return lambda *_: launched.append(source.name)


driver.set_active(Driver())
torch.cuda.device = lambda _: contextlib.nullcontext()

from qwen_engine import kernels
from qwen_engine.kernels import gpu
from qwen_engine.kernels.gpu import bookkeeping, compile_launched, elementwise
from qwen_engine.kernels.gpu.launching import Kernel


@Kernel
@triton.jit
def _broken_kernel(x):
    tl.store(x, no_such_name)


results = []


def steps():
    for rows in (1, 3, 16, 300):
        slots, numbers = torch.zeros(rows, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        bookkeeping.decode_inputs(slots, numbers, slots, slots)
        bookkeeping.advance(slots.long(), slots, torch.zeros(4, 32, dtype=torch.int32), numbers)
    results.append(elementwise.silu_mul(torch.ones(2, 64)).abs().max().item())


def all_steps():
    steps()
    _broken_kernel[(1,)](torch.zeros(1))


kernels._backend = lambda _: gpu
kernels.load_compiler(torch.device("cpu"))
first = [name for name, _ in loaded]
compile_launched(all_steps, torch.device("cpu"))
ahead = {"loaded": sorted(name for name, _ in loaded), "launched": list(launched), "result": results[0]}
threads = {thread for _, thread in loaded}
steps()
try:
    _broken_kernel[(1,)](torch.zeros(1))
except triton.CompilationError as error:
    broken = "no_such_name" in str(error)
print(json.dumps({
    "first": first,
    "ahead": ahead,
    "threads": all("compiler" in name for name in threads),
    "loaded later": len(loaded) - len(ahead["loaded"]),
    "launched later": len(launched),
    "broken": broken,
}))
"""


def test_kernels_are_compiled_ahead_and_not_launched(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    script = tmp_path / "ahead.py"  # the compiler wants to read the source of a kernel
    script.write_text(COMPILE_AHEAD)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["first"] == ["_decode_inputs_kernel"]
    # One of each, whatever the number of rows.
    assert found["ahead"]["loaded"] == ["_advance_kernel", "_decode_inputs_kernel", "_silu_mul_kernel"]
    assert found["ahead"]["launched"] == []
    assert found["ahead"]["result"] == 0
    assert found["threads"]
    assert found["loaded later"] == 0
    assert found["launched later"] == 9
    assert found["broken"]


def test_every_kernel_that_the_host_launches_is_one_that_can_be_compiled_ahead():
    modules = [importlib.import_module(f"{gpu.__name__}.{info.name}") for info in pkgutil.iter_modules(gpu.__path__)]
    kernels = {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    assert len(kernels) > 20
    assert [name for name, value in kernels.items() if not isinstance(value, Kernel)] == []

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
DRIVER = """
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
"""

COMPILE_AHEAD = (
    DRIVER
    + """
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


compile_launched(all_steps, torch.device("cpu"))
ahead = {"loaded": sorted(name for name, _ in loaded), "launched": list(launched), "result": results[0]}
threads = {thread for _, thread in loaded}
steps()
try:
    _broken_kernel[(1,)](torch.zeros(1))
except triton.CompilationError as error:
    broken = "no_such_name" in str(error)
print(json.dumps({
    "ahead": ahead,
    "threads": all("compiler" in name for name in threads),
    "loaded later": len(loaded) - len(ahead["loaded"]),
    "launched later": len(launched),
    "broken": broken,
}))
"""
)


# Steps of a small engine, of all kinds and sizes; the compiler is a list of what it was asked for.
STEPS = (
    DRIVER
    + """
import functools
import sys
from pathlib import Path

import triton.compiler

EAGER, DETERMINISTIC, COMPILED = (argument == "True" for argument in sys.argv[1:])
asked = []


class Compiled:
    function = packed_metadata = None

    def launch_metadata(self, *_):
        return None

    def run(self, *_):
        launched.append(self)


def compile_nothing(source, **_):
    asked.append(source.name)
    return Compiled()


if not COMPILED:
    triton.compiler.compile = compile_nothing


class Product:  # a kernel of `linear_hopper`, which only the Triton that it was written for compiles
    def __getitem__(self, grid):
        return lambda *_: launched.append(self)


@functools.cache
def product_kernel(*variant):
    asked.append(f"product {variant}")
    return Product(), ()


from qwen_engine import kernels
from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine.cuda_graphs import GraphSizes, decode_sizes, mixed_sizes
from qwen_engine.engine.model_runner import ModelRunner
from qwen_engine.engine.rank import RankSetup
from qwen_engine.kernels import gpu
from qwen_engine.kernels.gpu import decode, linear_hopper, matrix_products, prefill
from qwen_engine.kernels.gpu.launching import _EmptyIsZero
from qwen_engine.models.qwen3 import Qwen3Model
from qwen_engine.request import SamplingParams
from qwen_engine.scheduling.block_manager import block_table
from qwen_engine.scheduling.step_plan import SlotInit, StepPlan

kernels._backend = lambda _, deterministic=False: gpu.deterministic if deterministic else gpu
prefill.num_sms = decode.num_sms = matrix_products.num_sms = lambda _: 132
if not COMPILED:
    linear_hopper._compile = linear_hopper._compiled = product_kernel
    matrix_products._hopper_product = lambda _: linear_hopper.product
SEQS, TOKENS, LENGTH = 200, 3000, 4096
config = ModelConfig.from_folder(Path(__file__).parent)
here = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
model = Qwen3Model(config, tp=TPGroup(), max_model_len=LENGTH, deterministic=DETERMINISTIC, **here)
sizes = GraphSizes(() if EAGER else decode_sizes(SEQS), mixed_sizes(200, TOKENS))
runner = ModelRunner(
    model, config, tp=TPGroup(), max_num_seqs=SEQS, max_model_len=LENGTH, block_size=16, graph_sizes=sizes, **here
)
options = EngineConfig(model="", max_num_seqs=SEQS, max_num_batched_tokens=TOKENS, deterministic=DETERMINISTIC)
RankSetup(options, Path(), config, max_model_len=LENGTH, **here)._compile_prefill()
slowest = asked.copy()
runner.compile_kernels(TOKENS)
ahead = len(asked)
variants = asked.count("_prefill_kernel")
runner.allocate_kv_cache(8)


def run(lengths, params, step, context=0):
    slots = list(range(len(lengths)))
    added = [
        SlotInit(
            slot=slot,
            first_token=0,
            token_ids=[1] * (context + length),
            num_prompt_tokens=context + length,
            num_computed_tokens=context,
            prefix=None,
            block_ids=block_table([0] * -(-(context + length) // 16)),
            params=params[slot % len(params)],
            seed=0,
            stop_ids=(),
            bad_word_ids=(),
        )
        for slot, length in enumerate(lengths)
    ]
    runner.execute(StepPlan(step=step, slots=slots, num_tokens=lengths, added=added))
    runner.execute(StepPlan(step=step + 1, slots=slots, num_tokens=[1] * len(slots)))


plain, greedy = SamplingParams(), SamplingParams(temperature=0.0)
filtered, penalised = SamplingParams(top_k=5, top_p=0.9), SamplingParams(repetition_penalty=1.2)
kinds = [
    [plain], [greedy], [filtered], [penalised], [plain, filtered, penalised], [SamplingParams(logit_bias={3: 1.0})],
    [SamplingParams(logprobs=3)], [SamplingParams(logprobs=1), SamplingParams(logprobs=16)],
    [SamplingParams(prompt_logprobs=2)], [SamplingParams(min_p=0.1, logprobs=0)],
]
with _EmptyIsZero():
    for number, params in enumerate(kinds):
        for lengths in ([5], [7, 33, 100], [2900], [10] * 70, [16] * 100, [9, 1, 1]):
            run(lengths, params, 2 * number)
            run(lengths[:70], params, 2 * number, context=600)
print(json.dumps({
    "slowest": slowest,
    "variants": variants,
    "products": sum(name.startswith("product") for name in asked),
    "ahead": ahead,
    "late": asked[ahead:],
    "launched": len(launched),
}))
"""
)


def run_script(folder, text, *arguments):
    """What the last line of its output says."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    script = folder / "script.py"  # a file, because the compiler reads the source of kernels
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write_config(folder):
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_kernels_are_compiled_ahead_and_not_launched(tmp_path):
    found = run_script(tmp_path, COMPILE_AHEAD)
    # One of each, whatever the number of rows.
    assert found["ahead"]["loaded"] == ["_advance_kernel", "_decode_inputs_kernel", "_silu_mul_kernel"]
    assert found["ahead"]["launched"] == []
    assert found["ahead"]["result"] == 0
    assert found["threads"]
    assert found["loaded later"] == 0
    assert found["launched later"] == 9
    assert found["broken"]


def test_what_steps_launch_compiles_for_a_hopper_gpu(tmp_path):
    """The interpreter takes more than the compiler does. (Of the deterministic kernels other tests see the code.)"""
    write_config(tmp_path)
    found = run_script(tmp_path, STEPS, True, False, True)
    assert found["launched"] > 0


@pytest.mark.parametrize(("eager", "deterministic"), [(False, False), (True, False), (False, True)])
def test_no_step_compiles_a_kernel_once_the_engine_is_ready(eager, deterministic, tmp_path):
    write_config(tmp_path)
    found = run_script(tmp_path, STEPS, eager, deterministic, False)
    assert found["slowest"] == ["_prefill_kernel"]
    # With and without spans, for few rows and for many; the slowest is one of them. Deterministic spans are the same.
    assert found["variants"] == (2 if deterministic else 4)
    assert found["products"] > 8
    assert found["ahead"] > 20
    assert found["late"] == []
    assert found["launched"] > 0


def test_every_kernel_that_the_host_launches_is_one_that_can_be_compiled_ahead():
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(gpu.__path__, f"{gpu.__name__}.")]
    kernels = {
        f"{module.__name__}.{name}": value
        for module in modules
        if not module.__name__.endswith("_hopper")  # which sees to it itself
        for name, value in vars(module).items()
        if name.endswith("_kernel")
    }
    assert len(kernels) > 20
    assert [name for name, value in kernels.items() if not isinstance(value, Kernel)] == []

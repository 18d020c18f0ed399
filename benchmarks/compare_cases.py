"""The cases of `compare.py` as data: loads, what each measures and could measure at best, and the figures to beat.

A case measures any engine that can `run` a batch, so that all are measured alike. t1 is the wall time of a batch that
ends at its first token (best of two), t2 that of an equal batch that goes on; a decode step is (t2 - t1) / (out - 1).
Figures are flat: `<case>_<figure>`, the figure's name says its unit and, to `results compare`, which way is better.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from qwen_engine.bench.load import PromptSource
from qwen_engine.bench.roofline import Ceiling, decode_parts, floor_s, prefill_parts
from qwen_engine.config import ModelConfig

NUM_FIRST_RUNS = 2
NUM_WARM_RUNS = 3


class Engine(Protocol):
    """What a case needs of an engine."""

    vocab_size: int

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int], *, temperature: float = 0.0) -> float:
        """Seconds until every prompt has exactly its output tokens. Raises RuntimeError if one has not."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What floors depend on beside the case: the model's shape, its split, bytes of a number, one device's limits."""

    model: ModelConfig
    ceiling: Ceiling
    dtype_bytes: int
    num_ranks: int

    def decode_s(self, num_rows: int, context_tokens: float) -> float:
        parts = decode_parts(
            self.model,
            num_rows=num_rows,
            context_tokens=context_tokens,
            dtype_bytes=self.dtype_bytes,
            num_ranks=self.num_ranks,
        )
        return floor_s(parts, self.ceiling)

    def prefill_s(self, num_rows: int, new_tokens: int, cached_tokens: int = 0) -> float:
        parts = prefill_parts(
            self.model,
            num_rows=num_rows,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            dtype_bytes=self.dtype_bytes,
            num_ranks=self.num_ranks,
        )
        return floor_s(parts, self.ceiling)


@dataclass(frozen=True, slots=True)
class Load:
    """A batch of equal requests: prefill, first token, decode."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int

    figures: ClassVar[dict[str, str]] = {
        "decode_step_ms": "decode step, ms",
        "prefill_tok_s": "prefill, tok/s",
        "first_token_ms": "first token, ms",
    }

    @property
    def label(self) -> str:
        return f"{self.num_requests} × ({self.prompt_tokens} + {self.output_tokens})"

    @property
    def num_context_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def scaled(self, scale: float) -> Load:
        requests = _shrunk(self.num_requests, scale, least=min(self.num_requests, 2))
        return Load(requests, _shrunk(self.prompt_tokens, scale), _shrunk(self.output_tokens, scale, least=2))

    def measure(self, engine: Engine, source: PromptSource) -> dict[str, float | None]:
        def run(output_tokens: int) -> float:
            prompts = source.draw("load", [self.prompt_tokens] * self.num_requests)
            return engine.run(prompts, [output_tokens] * self.num_requests)

        run(2)
        t1 = min(run(1) for _ in range(NUM_FIRST_RUNS))
        t2 = run(self.output_tokens)
        # On a busy machine a small batch can take longer to its first token than an equal one to its end.
        step_s = (t2 - t1) / (self.output_tokens - 1) if t2 > t1 else None
        return {
            "concurrency": self.num_requests,
            "decode_step_ms": None if step_s is None else 1e3 * step_s,
            "decode_tok_s": None if step_s is None else self.num_requests / step_s,
            "prefill_tok_s": self.num_requests * self.prompt_tokens / t1,
            "first_token_ms": 1e3 * t1,
            "total_s": t2,
        }

    def floors(self, machine: Machine) -> dict[str, float]:
        prefill_s = machine.prefill_s(self.num_requests, self.prompt_tokens)
        return {
            "decode_step_ms": 1e3 * self._step_s(machine),
            "prefill_tok_s": self.num_requests * self.prompt_tokens / prefill_s,
            "first_token_ms": 1e3 * prefill_s,
        }

    def floor_s(self, machine: Machine) -> float:
        """Least time of the whole measurement: the warm-up, the runs to the first token and the whole one."""
        prefill_s = machine.prefill_s(self.num_requests, self.prompt_tokens)
        return (2 + NUM_FIRST_RUNS) * prefill_s + self.output_tokens * self._step_s(machine)

    def _step_s(self, machine: Machine) -> float:
        context_tokens = self.num_requests * (self.prompt_tokens + self.output_tokens / 2)
        return machine.decode_s(self.num_requests, context_tokens)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Requests behind one long shared prefix, to their first tokens: all new, then with the prefix in the cache."""

    num_requests: int
    prefix_tokens: int
    own_tokens: int

    figures: ClassVar[dict[str, str]] = {
        "warm_s": "first tokens behind the cached prefix, s",
        "cold_s": "the same with nothing cached, s",
    }

    @property
    def label(self) -> str:
        return f"{self.num_requests} × ({self.prefix_tokens} shared + {self.own_tokens})"

    @property
    def num_context_tokens(self) -> int:
        return self.prefix_tokens + self.own_tokens + 1

    def scaled(self, scale: float) -> Prefix:
        return Prefix(
            _shrunk(self.num_requests, scale, least=2),
            _shrunk(self.prefix_tokens, scale, least=64),
            _shrunk(self.own_tokens, scale),
        )

    def measure(self, engine: Engine, source: PromptSource) -> dict[str, float | None]:
        def run(count: int, prefix: Sequence[int] = ()) -> float:
            prompts = source.draw("prefix", [self.prefix_tokens + self.own_tokens] * count, prefix)
            return engine.run(prompts, [1] * count)

        (prefix,) = source.draw("shared", [self.prefix_tokens])
        run(1)
        cold_s = run(self.num_requests)
        run(1, prefix)
        warm_s = min(run(self.num_requests, prefix) for _ in range(NUM_WARM_RUNS))
        return {"cold_s": cold_s, "warm_s": warm_s, "speedup": cold_s / warm_s}

    def floors(self, machine: Machine) -> dict[str, float]:
        cold_s = machine.prefill_s(self.num_requests, self.prefix_tokens + self.own_tokens)
        warm_s = machine.prefill_s(self.num_requests, self.own_tokens, self.prefix_tokens)
        return {"cold_s": cold_s, "warm_s": warm_s}

    def floor_s(self, machine: Machine) -> float:
        one_s = machine.prefill_s(1, self.prefix_tokens + self.own_tokens)
        floors = self.floors(machine)
        return 2 * one_s + floors["cold_s"] + NUM_WARM_RUNS * floors["warm_s"]


@dataclass(frozen=True, slots=True)
class NanoBench:
    """nano-vllm's own benchmark: prompts and outputs of 100 to 1024 tokens, from Python's generator with seed 0."""

    num_requests: int
    least_tokens: int
    most_tokens: int
    temperature: float = 0.6

    figures: ClassVar[dict[str, str]] = {"output_tok_s": "output, tok/s"}

    @property
    def label(self) -> str:
        return (
            f"{self.num_requests} × ({self.least_tokens}…{self.most_tokens} + {self.least_tokens}…{self.most_tokens})"
        )

    @property
    def num_context_tokens(self) -> int:
        return 2 * self.most_tokens

    def scaled(self, scale: float) -> NanoBench:
        return dataclasses.replace(
            self,
            num_requests=_shrunk(self.num_requests, scale, least=2),
            least_tokens=_shrunk(self.least_tokens, scale),
            most_tokens=_shrunk(self.most_tokens, scale, least=2),
        )

    def draw(self, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """Prompts and output lengths, the same in every run: nothing else may have put them into the prefix cache."""
        generator = random.Random(0)
        most_id = min(10_000, vocab_size - 1)

        def length() -> int:
            return generator.randint(self.least_tokens, self.most_tokens)

        prompts = [[generator.randint(0, most_id) for _ in range(length())] for _ in range(self.num_requests)]
        return prompts, [length() for _ in range(self.num_requests)]

    def measure(self, engine: Engine, source: PromptSource) -> dict[str, float | None]:
        prompts, output_tokens = self.draw(engine.vocab_size)
        warm_up = source.draw("warm-up", [len(prompt) for prompt in prompts])
        engine.run(warm_up, [2] * self.num_requests, temperature=self.temperature)
        total_s = engine.run(prompts, output_tokens, temperature=self.temperature)
        return {"output_tok_s": sum(output_tokens) / total_s, "total_s": total_s}

    def floors(self, machine: Machine) -> dict[str, float]:
        prefill_s, decode_s, num_output = self._floor_parts(machine)
        return {"output_tok_s": num_output / (prefill_s + decode_s)}

    def floor_s(self, machine: Machine) -> float:
        prefill_s, decode_s, _ = self._floor_parts(machine)
        return 2 * prefill_s + decode_s

    def _floor_parts(self, machine: Machine) -> tuple[float, float, int]:
        """Least time of all prompts, of all decode steps with every request in the batch, and the output tokens."""
        prompts, output_tokens = self.draw(machine.model.vocab_size)
        prefill_s = sum(machine.prefill_s(1, len(prompt)) for prompt in prompts)
        decode_s = 0.0
        for step in range(1, max(output_tokens)):
            contexts = [len(prompt) + step for prompt, count in zip(prompts, output_tokens) if count > step]
            decode_s += machine.decode_s(len(contexts), sum(contexts))
        return prefill_s, decode_s, sum(output_tokens)


Case = Load | Prefix | NanoBench

# In the order they are run: what fits into little time comes first.
CASES: dict[str, Case] = {
    "1x128_512": Load(1, 128, 512),
    "prefix": Prefix(8, 16_384, 200),
    "nano_bench": NanoBench(256, 100, 1024),
    "64x1024_256": Load(64, 1024, 256),
    "16x4096_256": Load(16, 4096, 256),
    "2x8192_1024": Load(2, 8192, 1024),
    "256x128_1024": Load(256, 128, 1024),
    "256x1024_256": Load(256, 1024, 256),
}
FIGURE_ORDER = ("decode_step_ms", "prefill_tok_s", "first_token_ms", "output_tok_s", "warm_s", "cold_s")
START_FIGURES = {"ready_s": "start to ready, s", "kv_cache_tokens": "KV cache, tokens"}
"""Of the engine itself; every run has them."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure of one model to beat on TARGET_DEVICE. vllm, best: what vLLM and the best of four engines reached there
    (2026-11-30, random weights)."""

    model: tuple[int, int, int]  # layers, hidden size, ranks
    figure: str
    target: float
    stretch: float
    vllm: float | None
    best: tuple[float, str]


TARGET_DEVICE = "NVIDIA H200"
_32B, _8B, _06B = (64, 5120, 2), (36, 4096, 1), (28, 1024, 1)
_SGLANG, _NANO, _MINI, VLLM = "SGLang 0.5.14", "nano-vllm bb823b3", "mini-sglang 20fcd7f", "vLLM 0.24.0"
TARGETS = (
    Target(_32B, "1x128_512_decode_step_ms", 8.9, 8.4, 11.18, (10.56, _SGLANG)),
    Target(_32B, "2x8192_1024_decode_step_ms", 9.5, 9.0, 11.84, (11.35, _SGLANG)),
    Target(_32B, "16x4096_256_decode_step_ms", 11.3, 10.8, 13.69, (13.47, _SGLANG)),
    Target(_32B, "64x1024_256_decode_step_ms", 12.2, 11.6, 14.92, (14.30, _SGLANG)),
    Target(_32B, "256x1024_256_decode_step_ms", 25.5, 24, 30.36, (30.36, VLLM)),
    Target(_8B, "1x128_512_decode_step_ms", 4.2, 4.0, 5.23, (5.04, _SGLANG)),
    Target(_8B, "16x4096_256_decode_step_ms", 6.4, 6.1, 7.61, (7.38, _SGLANG)),
    Target(_8B, "64x1024_256_decode_step_ms", 7.1, 6.8, 8.34, (8.21, _SGLANG)),
    Target(_8B, "256x1024_256_decode_step_ms", 16.5, 15.8, 20.65, (18.67, _MINI)),
    Target(_06B, "1x128_512_decode_step_ms", 1.05, 0.8, 1.955, (1.663, _MINI)),
    Target(_06B, "16x4096_256_decode_step_ms", 2.6, 2.4, 3.55, (3.27, _SGLANG)),
    Target(_06B, "256x1024_256_decode_step_ms", 8.7, 8.2, 11.65, (9.99, _MINI)),
    Target(_06B, "256x128_1024_decode_step_ms", 5.8, 5.2, 8.64, (6.78, _MINI)),
    Target(_32B, "16x4096_256_prefill_tok_s", 19_500, 21_000, 16_900, (17_900, _NANO)),
    Target(_32B, "64x1024_256_prefill_tok_s", 20_500, 22_000, 17_600, (18_700, _NANO)),
    Target(_32B, "256x1024_256_prefill_tok_s", 20_500, 22_000, 17_700, (18_600, _NANO)),
    Target(_8B, "64x1024_256_prefill_tok_s", 47_000, 49_000, 42_600, (43_900, _MINI)),
    Target(_06B, "256x1024_256_prefill_tok_s", 520_000, 600_000, 394_000, (475_000, _MINI)),
    Target(_32B, "prefix_warm_s", 0.12, 0.10, 0.239, (0.179, _SGLANG)),
    Target(_32B, "1x128_512_first_token_ms", 15, 11, 27.7, (27.7, VLLM)),
    Target(_8B, "1x128_512_first_token_ms", 7, 5, 12.1, (11.3, _MINI)),
    Target(_06B, "1x128_512_first_token_ms", 4, 3, 9.9, (8.6, _MINI)),
    Target(_32B, "ready_s", 20, 12, 132, (56, _NANO)),
    Target(_8B, "ready_s", 12, 8, 89, (18, _MINI)),
    Target(_06B, "ready_s", 10, 6, 85, (17, _MINI)),
    Target(_06B, "nano_bench_output_tok_s", 27_000, 30_000, None, (22_600, _MINI)),
    Target(_32B, "kv_cache_tokens", 780_000, 780_000, 761_808, (761_808, VLLM)),
)


def targets_of(model: ModelConfig, num_ranks: int) -> dict[str, Target]:
    """The targets of a model of this shape, split over so many ranks, by figure."""
    shape = (model.num_layers, model.hidden_size, num_ranks)
    return {target.figure: target for target in TARGETS if target.model == shape}


def cases_of(model: ModelConfig, num_ranks: int) -> list[str]:
    """Names of the cases that have a target for this model; all, if none has."""
    figures = targets_of(model, num_ranks)
    return [name for name in CASES if any(figure.startswith(f"{name}_") for figure in figures)] or list(CASES)


def _shrunk(value: int, scale: float, least: int = 1) -> int:
    return max(least, round(value * scale))

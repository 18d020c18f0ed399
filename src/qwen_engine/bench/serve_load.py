"""The load of `bench serve`: which prompts, and when each is sent.

Prompts are drawn from one random generator, so a seed fixes them; lengths are in tokens. Without a tokenizer a random
prompt is made of common words of about one token each, and only the server knows its exact length. Arrivals are
offsets in seconds from the start of the run. `run_load` is the only place that waits: on the event loop's clock.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qwen_engine.errors import ConfigError, shown
from qwen_engine.tokenization.tokenizer import Tokenizer

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")

# Conversations outside of these lengths are left out, as vLLM's client does.
MIN_SHAREGPT_TOKENS = 4
MAX_SHAREGPT_PROMPT_TOKENS = 1024
MAX_SHAREGPT_TOKENS = 2048
_COMMON_WORDS = """
about after again air all animal answer any ask back ball before big bird black blue boat body book both box boy bread
bring build car carry cat change child city clear close cold color come cook could country cut dark day deep door down
draw dry early earth east eat egg end even every eye face fact fall family far farm fast father field find fire first
fish five flower fly follow food foot form found four free friend front game garden girl give glass gold good grass
great green ground group grow half hand happy hard head hear heart heat help here high hill hold home horse hot hour
house ice idea island job keep kind king know lake land large last late laugh lead learn leave left letter light line
list little live long look lost love low machine make man map mark measure milk mind money moon morning mother
mountain mouth move music name near night north note number ocean old open order paper park part people picture piece
place plan plant play point power problem question rain read red rest rice ride right river road rock room rule run
sail salt sand school sea season seed ship shop short side simple sing sister size sleep small snow song sound south
space star start stone story street strong summer sun table tail talk teach tell ten thing three time top town train
tree true turn two under unit voice wait walk wall warm watch water west wheel white wind window winter wood word work
world write year
"""
_WORDS = _COMMON_WORDS.split()


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt (text, or token ids), its length where the client knows it, and how many tokens to ask for."""

    prompt: str | list[int]
    num_prompt_tokens: int | None
    max_tokens: int


class PromptMaker:
    """Random prompts of a wanted length: token ids, or text where `as_text` is set or there is no tokenizer."""

    def __init__(self, rng: np.random.Generator, tokenizer: Tokenizer | None, *, as_text: bool) -> None:
        self._rng = rng
        self._tokenizer = tokenizer
        self._as_text = as_text
        if tokenizer is not None:
            special = np.array(sorted(tokenizer.special_ids), dtype=np.int64)
            self._ids = np.setdiff1d(np.arange(tokenizer.vocab_size), special)

    def draw(self, num_tokens: int) -> list[Any]:
        """A random piece of a prompt: token ids, or words."""
        if self._tokenizer is not None:
            return self._rng.choice(self._ids, size=num_tokens).tolist()
        return [_WORDS[i] for i in self._rng.integers(len(_WORDS), size=num_tokens)]

    def sample(self, pieces: list[Any], max_tokens: int) -> Sample:
        if self._tokenizer is None:
            return Sample(" ".join(pieces), None, max_tokens)
        if not self._as_text:
            return Sample(pieces, len(pieces), max_tokens)
        # Random ids decoded and encoded again are often more ids than before.
        ids = self._tokenizer.encode(self._tokenizer.decode(pieces), add_special_tokens=False)[: len(pieces)]
        return Sample(self._tokenizer.decode(ids), None, max_tokens)


def random_samples(
    maker: PromptMaker,
    rng: np.random.Generator,
    num_prompts: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
) -> list[Sample]:
    """Prompts of `prefix_len` shared tokens and `input_len` of their own; lengths vary by ± `range_ratio` of each."""

    def lengths(mean: int) -> list[int]:
        low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
        return rng.integers(max(low, 1), max(high, 1), size=num_prompts, endpoint=True).tolist()

    prefix = maker.draw(prefix_len)
    pairs = zip(lengths(input_len), lengths(output_len), strict=True)
    return [maker.sample(prefix + maker.draw(num_own), max_tokens) for num_own, max_tokens in pairs]


def prefix_repetition_samples(
    maker: PromptMaker,
    rng: np.random.Generator,
    num_prompts: int,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
) -> list[Sample]:
    """`num_prefixes` random prefixes used equally often, each time with another suffix, in random order."""
    prefixes = [maker.draw(prefix_len) for _ in range(num_prefixes)]
    order = rng.permutation(num_prompts) % num_prefixes
    return [maker.sample(prefixes[i] + maker.draw(suffix_len), output_len) for i in order]


def custom_samples(path: Path, *, output_len: int) -> list[Sample]:
    """The prompts of a JSON-lines file in its order; a line may give its own `output_tokens`."""
    samples = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, max_tokens = row["prompt"], int(row.get("output_tokens", output_len))
        except (ValueError, TypeError, LookupError, AttributeError):
            raise ConfigError(f'{path}:{number} must be like {{"prompt": "..."}}, not {shown(line)}') from None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{path}:{number}: the prompt must be a text, not {shown(prompt)}")
        samples.append(Sample(prompt, None, max_tokens))
    return samples


def sharegpt_samples(
    path: Path, rng: np.random.Generator, tokenizer: Tokenizer | None, *, num_prompts: int, output_len: int | None
) -> list[Sample]:
    """First questions of random ShareGPT conversations, with the answer's length unless `output_len` is given."""
    if tokenizer is None and output_len is None:
        raise ConfigError("sharegpt takes the lengths of its answers: pass --tokenizer, or --sharegpt-output-len")
    try:
        turns = [row.get("conversations") or [] for row in json.loads(_read(path))]
        pairs = [(turn[0]["value"], turn[1]["value"]) for turn in turns if len(turn) >= 2]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ConfigError(f"{path} is no ShareGPT file: a JSON list of rows with 'conversations'") from None
    rng.shuffle(pairs)
    samples: list[Sample] = []
    for question, answer in pairs:
        if len(samples) == num_prompts:
            break
        if tokenizer is None:
            samples.append(Sample(question, None, output_len or 0))
            continue
        num_prompt, num_answer = len(tokenizer.encode(question)), output_len or len(tokenizer.encode(answer))
        is_long = num_prompt > MAX_SHAREGPT_PROMPT_TOKENS or num_prompt + num_answer > MAX_SHAREGPT_TOKENS
        if min(num_prompt, num_answer) >= MIN_SHAREGPT_TOKENS and not is_long:
            samples.append(Sample(question, None, num_answer))
    return samples


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the dataset {path}: {error}") from None


def arrival_offsets_s(
    num_requests: int, *, request_rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """When to send each request, in seconds from the start; the first at 0.

    Gaps follow a gamma distribution with mean 1/`request_rate` and shape `burstiness`: 1 is a Poisson process, less is
    burstier, more is steadier. An infinite rate sends all at once.
    """
    if math.isinf(request_rate) or num_requests == 0:
        return [0.0] * num_requests
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (request_rate * burstiness), size=num_requests - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


async def run_load(
    send: Callable[[_Request], Awaitable[_Result]],
    requests: Sequence[_Request],
    *,
    offsets_s: Sequence[float],
    max_concurrency: int | None,
    on_result: Callable[[_Result], None],
) -> None:
    """Sends each request at its offset, or when one of `max_concurrency` slots is free if that is later.

    `on_result` is called as each ends, so a cancelled run keeps what is done. `send` must not raise.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    slots = asyncio.Semaphore(max_concurrency or max(len(requests), 1))

    async def send_one(request: _Request) -> None:
        try:
            on_result(await send(request))
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for request, offset_s in zip(requests, offsets_s, strict=True):
            if (wait_s := start_s + offset_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            await slots.acquire()
            group.create_task(send_one(request))

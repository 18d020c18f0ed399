"""From what a user sends to what the engine takes: tokenizes, checks against the model, fixes the seeds.

Safe to share between threads. What only the scheduler can know (room for the prompt, a full queue) it checks itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from qwen_engine.checks import plain
from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.errors import RequestError
from qwen_engine.request import Request, RequestSpec, SamplingParams, packed_ids
from qwen_engine.tokenization.structured import GrammarCompiler
from qwen_engine.tokenization.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (a list or an array), or a mapping with "prompt" or "prompt_token_ids" and, optionally, "cache_salt"
and "priority"."""

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "priority"}


class InputProcessor:
    """Makes the requests of one engine; their ids count up. `tokenizer` is None if the engine works with ids only."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._model_config = model_config
        self._numbers = itertools.count()
        self._grammars = None if tokenizer is None else GrammarCompiler(tokenizer, vocab_size=model_config.vocab_size)

    def process(self, prompt: Prompt, params: SamplingParams) -> RequestSpec:
        """Checks and tokenizes one request. Raises RequestError."""
        prompt = as_mapping(prompt)
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params is {type(params).__name__}; it must be a SamplingParams", param="sampling_params"
            )
        config, model = self._config, self._model_config
        eos_token_ids = () if params.ignore_eos else model.eos_token_ids
        params.check_model(vocab_size=model.vocab_size, max_logprobs=config.max_logprobs, eos_token_ids=eos_token_ids)
        params = params.with_counts(model.vocab_size)
        text = prompt.get("prompt")
        token_ids = plain(prompt.get("prompt_token_ids"))
        if token_ids is None:
            token_ids = self.needs_tokenizer().encode(text)
        packed_prompt = None
        if isinstance(token_ids, list | tuple):
            packed_prompt = packed_ids(token_ids)
            if packed_prompt is None:  # scalars of numpy, say
                token_ids = [*map(plain, token_ids)]
        if params.stop:
            self.needs_tokenizer()
        if params.structured_outputs is not None:
            self._needs_grammars().check(params.structured_outputs)
        number = next(self._numbers)
        seed = params.seed
        if seed is None or seed == -1:
            seed = config.seed * 2**32 + number
        return RequestSpec(
            request_id=str(number),
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            priority=prompt.get("priority", 0),
            cache_salt=prompt.get("cache_salt"),
            eos_token_ids=eos_token_ids,
            bad_word_ids=self._bad_word_ids(params.bad_words),
            packed_prompt=packed_prompt,
        )

    def constrain(self, sequence: Request) -> None:
        """Gives a sequence that asks for structured output its constraint, before it is queued. Raises RequestError.

        The first one takes a second, to build the vocabulary; a new grammar milliseconds.
        """
        if sequence.params.structured_outputs is not None:
            self._needs_grammars().constrain(sequence)

    def _needs_grammars(self) -> GrammarCompiler:
        self.needs_tokenizer()
        assert self._grammars is not None
        return self._grammars

    def needs_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "text needs a tokenizer, but the engine was made with skip_tokenizer_init=True; give token ids"
            )
        return self.tokenizer

    def _bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as it is written at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                try:
                    ids = self.needs_tokenizer().encode(text, add_special_tokens=False)
                except RequestError as error:
                    raise error.renamed({"prompt": "bad_words"}) from error
                if ids and ids not in found:
                    found.append(ids)
        return found


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt in any form → a list of it; a list of prompts stays."""
    prompts = plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is {type(prompts).__name__}; give text, token ids or a list of prompts", "prompt")
    if prompts and isinstance(plain(prompts[0]), int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def as_mapping(prompt: Prompt) -> Mapping[str, Any]:
    """One prompt in any form → its mapping form, checked."""
    prompt = plain(prompt)
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        if not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is {type(prompt).__name__}; give text or token ids", "prompt")
        return {"prompt_token_ids": prompt}
    unknown = set(prompt) - _PROMPT_KEYS
    if unknown:
        raise RequestError(
            f"prompt has unknown key {min(unknown)!r}; known: {', '.join(sorted(_PROMPT_KEYS))}", "prompt"
        )
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise RequestError("a prompt mapping needs 'prompt' or 'prompt_token_ids'", "prompt")
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt is {type(text).__name__}; it must be text", "prompt")
    return prompt

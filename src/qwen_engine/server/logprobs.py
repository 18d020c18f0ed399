"""Log-probabilities in OpenAI's two shapes, from the engine's per-position maps.

Values are raw (log-softmax of the logits, before penalties and temperature). JSON has no infinity: a masked token's is
LOGPROB_FLOOR. A token that is part of a character has no text of its own and is written in OpenAI's way,
`bytes:\\xe2\\x82`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from qwen_engine.outputs import Logprob, PositionLogprobs
from qwen_engine.tokenization.tokenizer import Tokenizer

LOGPROB_FLOOR = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[PositionLogprobs], num_top: int
) -> list[dict[str, Any]]:
    """The list under `logprobs.content`: one object for each token."""
    return [
        {
            **_chat_token(tokenizer, token_id, entry[token_id]),
            "top_logprobs": [_chat_token(tokenizer, id_, value) for id_, value in _top(entry, num_top)],
        }
        for token_id, entry in zip(token_ids, entries)
    ]


class CompletionLogprobs:
    """The `logprobs` object of one completion choice, piece by piece.

    text_offset: where a token begins in the choice's text (prompt included if echoed), counted in characters. Of a
    character made of several tokens, each has the place of the character.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], entries: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """The piece of an echoed prompt, special tokens shown; nothing is known of its first token."""
        return self._piece(token_ids, entries, frozenset())

    def output(self, token_ids: Sequence[int], entries: Sequence[PositionLogprobs]) -> dict[str, Any]:
        """The piece of the next tokens."""
        return self._piece(token_ids, entries, self._hidden_ids)

    def _piece(
        self, token_ids: Sequence[int], entries: Sequence[PositionLogprobs | None], hidden_ids: frozenset[int]
    ) -> dict[str, Any]:
        piece: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries):
            piece["tokens"].append(token_text(self._tokenizer, token_id))
            piece["text_offset"].append(self._offset)
            if token_id not in hidden_ids:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
            if entry is None:
                piece["token_logprobs"].append(None)
                piece["top_logprobs"].append(None)
                continue
            piece["token_logprobs"].append(finite(entry[token_id].logprob))
            top = dict(_top(entry, self._num_top))
            top.setdefault(token_id, entry[token_id])
            # Reversed, so that of two tokens with one text the likelier one is kept.
            ranked = sorted(top.items(), key=lambda item: item[1].rank, reverse=True)
            texts = {token_text(self._tokenizer, id_): finite(value.logprob) for id_, value in ranked}
            piece["top_logprobs"].append(dict(reversed(texts.items())))
        return piece


def join_pieces(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two successive pieces as one."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(entries: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """One map per prompt token, id → value, rank and text; None for the first token."""
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": finite(value.logprob),
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token_id, value in entry.items()
        }
        for entry in entries
    ]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    text = tokenizer.token_str(token_id)
    if "\ufffd" not in text or tokenizer.token_bytes(token_id) == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))


def finite(logprob: float) -> float:
    """Infinity and NaN have no place in JSON."""
    return logprob if logprob >= LOGPROB_FLOOR else LOGPROB_FLOOR


def _top(entry: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens of a position, best first."""
    return sorted(entry.items(), key=lambda item: item[1].rank)[:count]


def _chat_token(tokenizer: Tokenizer, token_id: int, value: Logprob) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": finite(value.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }

"""Token ids of one sequence to text, piece by piece.

Invariant: the pieces joined are the one-shot decoding of all ids, however they were grouped, and no piece shows a
character before all its bytes are there. With a byte-level tokenizer the cost per token does not depend on how much
came before. Used by `OutputText`.
"""

import codecs
from collections.abc import Sequence

from qwen_engine.tokenization.tokenizer import Tokenizer

_MAX_PENDING_BYTES = 3  # a UTF-8 character has at most 4 bytes, so at most 3 can wait for more


class IncrementalDetokenizer:
    """Streams the text of one output.

    A prompt may end inside a character; its bytes are completed by the output, and the whole character then counts as
    output. Special tokens of the prompt end such a character whatever `skip_special_tokens` says, which is about the
    output only. Tokenizers that are not byte-level decode the output on its own.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream: _ByteStream | _DecodeStream
        if tokenizer.is_byte_level:
            self._stream = _ByteStream(tokenizer, prompt_token_ids)
        else:
            self._stream = _DecodeStream(tokenizer)

    def append(self, token_ids: Sequence[int]) -> str:
        """Text that these ids make certain; bytes of an unfinished character wait. Accepts any integer as an id."""
        if not self._hidden_ids.isdisjoint(token_ids):
            token_ids = [id_ for id_ in token_ids if id_ not in self._hidden_ids]
        return self._stream.append(token_ids)

    def finish(self) -> str:
        """What still waits, as one-shot decoding shows it: U+FFFD for an unfinished character. Call once, last."""
        return self._stream.finish()


class _ByteStream:
    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._bytes_of_id = tokenizer.bytes_of_id
        self._has_output = False
        tail = b""
        for id_ in reversed(prompt_token_ids):
            tail = self._bytes_of_id[id_] + tail
            if len(tail) >= _MAX_PENDING_BYTES:
                break
        _, num_bytes = codecs.utf_8_decode(tail, "replace", False)  # stops before an unfinished last character
        self._pending = tail[num_bytes:]

    def append(self, token_ids: Sequence[int]) -> str:
        new_bytes = b"".join(map(self._bytes_of_id.__getitem__, token_ids))
        if not new_bytes:
            return ""
        self._has_output = True
        data = self._pending + new_bytes
        text, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_bytes:]
        return text

    def finish(self) -> str:
        # A broken character that is all the prompt's is not output.
        return self._pending.decode(errors="replace") if self._has_output else ""


class _DecodeStream:
    """For decoders that see neighbours (word joining, byte fallback): decodes a short window twice and shows the rest.

    [ shown last, for context | waiting, then new ]
    0                      _shown          len(_window)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0  # of the window

    def append(self, token_ids: Sequence[int]) -> str:
        text = ""
        for id_ in token_ids:
            self._window.append(id_)
            text += self._advance(final=False)
        return text

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._window[: self._shown])
        after = self._decode(self._window)
        if not final and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)  # those to skip never get here

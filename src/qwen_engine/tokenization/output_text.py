"""The text of one sequence as its tokens arrive: detokenizing, stop strings, stop tokens, min_tokens.

Invariant: text, stop string and number of tokens used depend on the tokens only, not on how they were grouped into
calls; the joined deltas are the text. Every token is looked at on its own when there are stop strings, so a stop
string cuts at the same token whether it arrives alone or among others. Called by the engine's output side.
"""

from collections.abc import Sequence

from qwen_engine.request import SamplingParams
from qwen_engine.tokenization.detokenizer import IncrementalDetokenizer
from qwen_engine.tokenization.reasoning import Part, ReasoningSplitter
from qwen_engine.tokenization.stop import StopChecker
from qwen_engine.tokenization.tokenizer import Tokenizer


class OutputText:
    """Text of one sequence. Without a tokenizer, or with `detokenize=False`, every token counts and the text is "".

    A stop string that ends within the first `min_tokens` tokens is ignored; one that begins there and ends later
    counts. With `reasoning`, a splitter of its own, stop strings are looked for in the answer only: thinking and its
    tags are text like any other, but cannot end it. The splitter reads all text, so that it can count the tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        reasoning: ReasoningSplitter | None = None,
    ) -> None:
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stop: StopChecker | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            if params.stop:
                self._stop = StopChecker(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
        self._reasoning = reasoning
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._finished = False
        self._parts: list[str] = []
        self.num_tokens_used = 0
        """Tokens of the latest call that belong to the output; those after the one that completed a stop do not."""

    @property
    def text(self) -> str:
        """All deltas so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def append(self, token_ids: Sequence[int], *, finish_reason: str | None) -> tuple[str, str | None]:
        """Take the next tokens; returns the text they add and the stop string they complete, if any.

        `finish_reason` is why generation ends with these tokens, None while it goes on. With "stop" the last of them is
        the stop token and stays out of the text unless `include_stop_str_in_output`. A call with a reason flushes all
        held text. A returned stop string ends the sequence, and takes precedence over the caller's reason. After the
        end further tokens are ignored.
        """
        self.num_tokens_used = 0
        if self._finished:
            return "", None
        shown_ids = token_ids[:-1] if finish_reason == "stop" and not self._include_stop else token_ids
        delta, matched = self._read(shown_ids)
        if matched is None:
            self.num_tokens_used = len(token_ids)
            if finish_reason is not None:
                tail, matched = self._flush(num_shown=self._num_tokens + len(shown_ids))
                delta += tail
        self._num_tokens += self.num_tokens_used
        self._finished = finish_reason is not None or matched is not None
        if delta:
            self._parts.append(delta)
        return delta, matched

    def _read(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        if self._stop is None and self._reasoning is None:
            return self._detokenizer.append(token_ids), None
        delta = ""
        for count, id_ in enumerate(token_ids, start=1):
            can_match = self._num_tokens + count > self._min_tokens
            safe, matched = self._find_stop(self._detokenizer.append((id_,)), can_match=can_match)
            delta += safe
            if matched is not None:
                self.num_tokens_used = count
                return delta, matched
        return delta, None

    def _flush(self, num_shown: int) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        can_match = num_shown > self._min_tokens
        delta, matched = self._find_stop(self._detokenizer.finish(), can_match=can_match, final=True)
        return delta + (self._stop.flush() if self._stop is not None else ""), matched

    def _find_stop(self, text: str, *, can_match: bool, final: bool = False) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string if one is complete. `text` is a token's, or the final rest."""
        if self._reasoning is None:
            parts = [(Part.CONTENT, text)]
        else:
            parts = self._reasoning.split(text, 0 if final else 1)
            if final:
                parts += self._reasoning.flush()
        if self._stop is None:
            return text, None
        safe = ""
        for part, piece in parts:
            if part is not Part.CONTENT:
                safe += piece
                continue
            shown, matched = self._stop.feed(piece, can_match=can_match)
            safe += shown
            if matched is not None:
                return safe, matched
        return safe, None

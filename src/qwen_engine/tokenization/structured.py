"""Structured output: which tokens may come next for the text to stay within a grammar.

`GrammarCompiler` turns the constraint of a request (`StructuredOutputs`) into one `TokenMatcher` per sequence, which
gives a bit mask over the vocabulary before each token and takes the token that was chosen. Invariants: the text of the
allowed tokens always is the beginning of a text that the grammar accepts; ids that end the output are allowed exactly
when the text is complete; special tokens are never part of it. Thinking is free: with an open `<think>` block the
grammar begins after it.

Grammars come from users. Sizes are checked first, then the grammar is compiled once in a process of its own with hard
limits (`grammar_check`); only what survives is compiled here, and a step that hangs nevertheless is given up. The work
is done by llguidance, imported at first use.
"""

from __future__ import annotations

import enum
import json
import logging
import queue
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from qwen_engine import child_process
from qwen_engine.errors import RequestError, shown, summary
from qwen_engine.request import Request
from qwen_engine.structured_outputs import StructuredOutputs
from qwen_engine.tokenization import grammar_check
from qwen_engine.tokenization.grammar_size import PARAM, check_lark, check_regex, check_schema
from qwen_engine.tokenization.reasoning import (
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_CALL_OPEN,
    TURN_START,
    Thinking,
    generation_prefix,
)
from qwen_engine.tokenization.tokenizer import Tokenizer
from qwen_engine.tokenization.tool_calls import TOOL_CALL_CLOSE

if TYPE_CHECKING:
    import llguidance

logger = logging.getLogger(__name__)
T = TypeVar("T")

CHECK_CPU_S = 2
CHECK_TIMEOUT_S = 60.0  # a busy machine may take long over little
STEP_LIMIT_S = 10.0  # for what takes a millisecond, on a busy machine
MAX_CACHED_GRAMMARS = 64
MAX_ERROR_CHARS = 300
_NEAR_CHARS = 16
# As the library writes them: the second with a line and a column.
_REGEX_ERROR = re.compile(r"regex parse error:\n {4}(?P<pattern>.*)\n {4}(?P<indent> *)\^+\nerror: (?P<reason>.*)")
_PLACE = re.compile(r"(?:at )?(?P<line>\d+)\(\d+\): (?P<reason>.*)")
_UNQUOTED = re.compile(r"(?P<reason>Invalid type|Unknown format): (?P<value>.*)", flags=re.DOTALL)
_JSON_SPACE = r" |\r?\n[ \t]{0,24}"  # endless space is the easiest way never to finish
_ANY_OBJECT = {"type": "object"}
_MAX_LINE_BREAKS = 2  # between thinking and answer


class GrammarCompiler:
    """Compiles constraints for one tokenizer and model. Safe to share between threads.

    Call `check` for what comes from users, once and in whatever process knows them; then `constrain` for each sequence,
    where it is computed. vocab_size: of the model, which may be more than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutputs, llguidance.LLMatcher] = OrderedDict()

    def check(self, spec: StructuredOutputs) -> None:
        """Raises RequestError if the constraint is malformed, cannot be satisfied, or costs too much.

        Takes a fraction of a second for a new one, seconds at most: not for the thread of an event loop.
        """
        if not self._tokenizer.is_byte_level:
            raise RequestError("structured output needs a byte-level tokenizer; this checkpoint's is not", PARAM)
        _check(spec)

    def load(self) -> None:
        """Builds the vocabulary, a second's work for Qwen3's, which the first grammar would have to wait for."""
        if self._tokenizer.is_byte_level:
            with self._lock:
                self._load_vocabulary()

    def constrain(self, request: Request) -> None:
        """Gives a request its matcher if it asks for structured output. Raises RequestError."""
        spec = request.params.structured_outputs
        if spec is not None:
            request.constraint = self.matcher(
                spec, prompt_token_ids=request.token_ids[: request.num_prompt_tokens], end_ids=request.stop_ids
            )

    def matcher(
        self, spec: StructuredOutputs, *, prompt_token_ids: Sequence[int], end_ids: Collection[int]
    ) -> TokenMatcher:
        """A matcher at the beginning of an output. end_ids: tokens that end it, at least one."""
        return TokenMatcher(
            self._base(spec).deep_copy(),
            thinking=self._thinking(prompt_token_ids),
            think_ids=(self._tokenizer.token_id(THINK_OPEN), self._tokenizer.token_id(THINK_CLOSE)),
            line_break_ids=self._line_break_ids(),
            end_ids=end_ids,
            vocab_size=self._vocab_size,
        )

    def _thinking(self, prompt_token_ids: Sequence[int]) -> Thinking:
        """A prompt that is no chat is continued, not answered: nothing is thought before."""
        tokenizer = self._tokenizer
        if tokenizer.token_id(THINK_OPEN) is None or tokenizer.token_id(THINK_CLOSE) is None:
            return Thinking.CLOSED
        if tokenizer.token_id(TURN_START) not in prompt_token_ids:
            return Thinking.CLOSED
        return Thinking.of_prompt(generation_prefix(tokenizer, prompt_token_ids))

    def _line_break_ids(self) -> dict[int, int]:
        """Tokens that are line breaks and nothing else → how many."""
        ids = {}
        for count in range(1, _MAX_LINE_BREAKS + 1):
            encoded = self._tokenizer.encode("\n" * count, add_special_tokens=False)
            if len(encoded) == 1:
                ids[encoded[0]] = count
        return ids

    def _base(self, spec: StructuredOutputs) -> llguidance.LLMatcher:
        """The matcher to copy. The lock also keeps many new grammars from being compiled at once."""
        with self._lock:
            base = self._compiled.get(spec)
            if base is None:
                base = self._compile(_grammar_of(spec))
                self._compiled[spec] = base
                if len(self._compiled) > MAX_CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(spec)
            return base

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._load_vocabulary(), grammar, log_level=0, limits=grammar_check.parser_limits())
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher

    def _load_vocabulary(self) -> llguidance.LLTokenizer:
        if self._vocabulary is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
            self._vocabulary = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=self._vocab_size + 1)
        return self._vocabulary


class _Vocabulary:
    """The tokenizer as llguidance wants to see it.

    Its end of sequence is an id behind the model's: which tokens end an output is the request's business. Tokens that
    only look special (<think>, <tool_call>) are text like any other.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.tokens = [tokenizer.token_bytes(id_) for id_ in range(vocab_size)] + [b"<end>"]
        self.special_token_ids = [*(id_ for id_ in tokenizer.special_ids if id_ < vocab_size), vocab_size]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # llguidance asks which of the two it may pass
            raise TypeError(f"text must be a string, not {type(text).__name__}")
        return self._tokenizer.encode(text, add_special_tokens=False)


class _State(enum.Enum):
    UNDECIDED = enum.auto()  # the output may begin with a block of thinking
    THINKING = enum.auto()
    SEPARATOR = enum.auto()  # line breaks may come before the answer
    ANSWER = enum.auto()


class TokenMatcher:
    """One output's way through its grammar. Not thread-safe."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        *,
        thinking: Thinking,
        think_ids: tuple[int | None, int | None],
        line_break_ids: dict[int, int],
        end_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        self._matcher = matcher
        self._open_id, self._close_id = think_ids
        self._line_break_ids = line_break_ids
        self._num_line_breaks = 0
        self._end_ids = frozenset(end_ids)
        self._num_bytes = 4 * -(-vocab_size // 32)
        self._end_of_grammar = vocab_size  # llguidance's own end of sequence
        states = {
            Thinking.OPEN: _State.THINKING,
            Thinking.CLOSED: _State.ANSWER,
            Thinking.UNDECIDED: _State.UNDECIDED,
        }
        self._state = states[thinking]
        self.error: str | None = None
        """Why the grammar cannot be followed any further (a limit was hit); the output has to end."""

    @property
    def is_complete(self) -> bool:
        """The output so far is one that the grammar accepts."""
        return self.error is None and self._state is not _State.THINKING and self._matcher.is_accepting()

    def mask(self) -> bytes:
        """Bits of the allowed ids, [ceil(vocab_size / 32)] little-endian uint32; after an error those that end."""
        if self._state is _State.THINKING:
            bits = bytearray(b"\xff" * self._num_bytes)
            for id_ in self._end_ids:
                bits[id_ >> 3] &= ~(1 << (id_ & 7))
            return bytes(bits)
        bits = bytearray(self._num_bytes)
        if self.error is None:
            mask = self._bounded(self._matcher.compute_bitmask)
            if mask is not None:
                bits[:] = mask[: self._num_bytes]
                if self._end_of_grammar >> 3 < self._num_bytes:
                    bits[self._end_of_grammar >> 3] &= ~(1 << (self._end_of_grammar & 7))
                if self._matcher.is_error() or not (self.is_complete or bits.strip(b"\0")):
                    self._fail(self._matcher.get_error())
        extra = set(self._end_ids) if self.error is not None or self.is_complete else set()
        if self._state is _State.UNDECIDED and self._open_id is not None:
            extra.add(self._open_id)
        if self._state is _State.SEPARATOR:
            extra |= {id_ for id_ in self._line_break_ids if self._has_room(id_)}
        for id_ in extra:
            bits[id_ >> 3] |= 1 << (id_ & 7)
        return bytes(bits)

    def accept(self, token_id: int) -> None:
        """Takes the next token of the output. One that `mask` did not allow is an error."""
        match self._state:
            case _State.THINKING:
                if token_id == self._close_id:
                    self._state = _State.SEPARATOR
                return
            case _State.UNDECIDED if token_id == self._open_id:
                self._state = _State.THINKING
                return
            case _State.SEPARATOR if token_id in self._line_break_ids and self._has_room(token_id):
                self._num_line_breaks += self._line_break_ids[token_id]
                return
        self._state = _State.ANSWER
        is_end = token_id in self._end_ids and self.is_complete
        if self.error is None and not is_end:
            num_taken = self._bounded(lambda: self._matcher.try_consume_tokens([token_id]))
            if num_taken == 0:
                self._fail(self._matcher.get_error())

    def _has_room(self, line_break_id: int) -> bool:
        return self._num_line_breaks + self._line_break_ids[line_break_id] <= _MAX_LINE_BREAKS

    def _bounded(self, call: Callable[[], T]) -> T | None:
        """The call's result; None, and an error, if it takes too long. The matcher may not be touched after that."""
        try:
            return _worker.run(call, STEP_LIMIT_S)
        except TimeoutError:
            self._fail(f"a step of the grammar takes more than {STEP_LIMIT_S:g} s")
            return None

    def _fail(self, error: str) -> None:
        self.error = _shortened(error) or "the grammar allows no token here"


class _Worker:
    """Runs calls, one at a time, on a thread that is left behind if a call does not return."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] | None = None

    def run(self, call: Callable[[], T], limit_s: float) -> T:
        """The call's result. TimeoutError if it takes longer; it may go on then, and nobody will see its result."""
        with self._lock:
            if self._calls is None:
                self._calls = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(self._calls,), daemon=True).start()
            results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
            self._calls.put((call, results))
            try:
                result, error = results.get(timeout=limit_s)
            except queue.Empty:
                self._calls.put((sys.exit, results))  # the thread's end, should it come back
                self._calls = None
                raise TimeoutError from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    @staticmethod
    def _serve(calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]) -> None:
        while True:
            call, results = calls.get()
            try:
                results.put((call(), None))
            except SystemExit:
                return
            except BaseException as error:  # for the caller
                results.put((None, error))


_worker = _Worker()


def _grammar_of(spec: StructuredOutputs) -> str:
    """The constraint in llguidance's own form. Raises RequestError for what can be seen without compiling."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if spec.regex is not None:
        check_regex(spec.regex)
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in spec.choice)
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    if spec.grammar is not None:
        try:
            lark = any_to_lark(spec.grammar)
        except Exception as error:  # the converter of EBNF raises what it likes
            raise _refusal(summary(error)) from error
        check_lark(lark)
        return LLMatcher.grammar_from_lark(lark)
    if spec.tool_calls is not None:
        return LLMatcher.grammar_from_lark(_tool_call_grammar(spec))
    schema = _ANY_OBJECT if spec.json is None else json.loads(str(spec.json))
    try:
        return LLMatcher.grammar_from_json_schema(_checked_schema(schema))
    except ValueError as error:
        raise _refusal(str(error)) from error


def _tool_call_grammar(spec: StructuredOutputs) -> str:
    """Lark for one call, or for one after the other, each in the form of the chat template."""
    names, rules = [], []
    for index, tool in enumerate(json.loads(str(spec.tool_calls))):
        function = tool["function"]
        parameters = {**_ANY_OBJECT, **(function.get("parameters") or {})}
        if parameters["type"] != "object":  # what else a model wrote there would not be read as a call
            raise RequestError(
                f"parameters of {shown(function['name'])} have type {shown(parameters['type'])}; it must be 'object'",
                PARAM,
            )
        schema = json.dumps(_checked_schema(parameters), ensure_ascii=False)
        head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        names.append(f"call_{index}")
        rules.append(f'call_{index}: {json.dumps(head, ensure_ascii=False)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {schema}")
    opening, closing = json.dumps(TOOL_CALL_OPEN + "\n"), json.dumps("\n" + TOOL_CALL_CLOSE)
    rules.append(f"call: {opening} ({' | '.join(names)}) {closing}")
    return "\n".join(['start: call ("\\n" call)*' if spec.parallel_tool_calls else "start: call", *rules])


def _checked_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with our options for the library, once it is known not to bring its own."""
    check_schema(schema)
    if "x-guidance" in schema:
        raise RequestError("the JSON schema has key 'x-guidance', which is not supported", PARAM)
    return {**schema, "x-guidance": {"whitespace_pattern": _JSON_SPACE}}


@lru_cache(maxsize=MAX_CACHED_GRAMMARS)  # of those that are fine: what raises is not kept
def _check(spec: StructuredOutputs) -> None:
    _check_in_process(_grammar_of(spec))


def _check_in_process(grammar: str) -> None:
    try:
        process = subprocess.run(
            [sys.executable, "-P", grammar_check.__file__, str(CHECK_CPU_S)],
            input=grammar.encode(),
            capture_output=True,
            timeout=CHECK_TIMEOUT_S,
            env=child_process.environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RequestError(
            f"the grammar takes more than {CHECK_TIMEOUT_S:.0f} s to compile; simplify it", PARAM
        ) from error
    if process.returncode:
        logger.warning(
            "checking a grammar of %d characters ended with code %d: %s",
            len(grammar),
            process.returncode,
            _shortened(process.stderr.decode(errors="replace")[-MAX_ERROR_CHARS:]),
        )
        raise RequestError(
            f"the grammar takes more than {CHECK_CPU_S} s or {grammar_check.MAX_MEMORY_BYTES >> 30} GiB to compile; "
            "simplify it",
            PARAM,
        )
    if process.stdout:
        raise _refusal(process.stdout.decode(errors="replace"))


def _refusal(message: str) -> RequestError:
    if message.startswith("NoExtension"):
        message = "nothing satisfies it, or it is too complex to tell"
    return RequestError(f"the output's grammar is not supported: {_shortened(_explanation(message))}", PARAM)


def _explanation(message: str) -> str:
    """What is wrong and where, of a message that shows it with excerpts and carets over several lines."""
    if regex := _REGEX_ERROR.search(message):
        place = len(regex["indent"])
        near = shown(regex["pattern"][max(0, place - _NEAR_CHARS) : place + _NEAR_CHARS])
        return f"regular expression: {regex['reason']}, near {near}"
    if place := _PLACE.match(message):
        excerpt = re.search(rf"^ *{place['line']} \| *(.*)$", message, flags=re.MULTILINE)
        near = f", near {shown(excerpt[1])}" if excerpt else ""
        return f"line {place['line']}: {place['reason']}{near}"
    if unquoted := _UNQUOTED.fullmatch(message.strip()):
        return f"{unquoted['reason']}: {shown(unquoted['value'])}"
    return message


def _shortened(message: str) -> str:
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."

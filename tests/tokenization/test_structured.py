"""Masks allow exactly the tokens that keep the text in its grammar, and hostile grammars cost nothing but an error."""

from __future__ import annotations

import codecs
import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_engine import SamplingParams, StructuredOutputs
from qwen_engine.errors import RequestError
from qwen_engine.request import Request
from qwen_engine.structured_outputs import MAX_GRAMMAR_CHARS
from qwen_engine.tokenization import structured
from qwen_engine.tokenization.grammar_size import MAX_EXPANDED_SIZE, check_lark, check_regex
from qwen_engine.tokenization.structured import GrammarCompiler, TokenMatcher
from qwen_engine.tokenization.tokenizer import Tokenizer
from qwen_engine.tokenization.tool_calls import ContentDelta, ToolArgumentsDelta, ToolCallParser, ToolCallStart

QWEN_VOCAB = 151936
TINY_VOCAB = 400  # more than the tokenizer has, and no multiple of 32
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def compiler(tiny: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny, vocab_size=TINY_VOCAB)


@pytest.fixture(scope="module")
def qwen_compiler(qwen: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(qwen, vocab_size=QWEN_VOCAB)


def allowed(matcher: TokenMatcher) -> set[int]:
    bits = int.from_bytes(matcher.mask(), "little")
    return {index for index, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"}


def start(
    compiler: GrammarCompiler, *, prompt: str = "text", end_ids: Sequence[int] | None = None, **spec: Any
) -> TokenMatcher:
    tokenizer = compiler._tokenizer
    end_ids = [tokenizer.eos_token_id] if end_ids is None else end_ids
    return compiler.matcher(StructuredOutputs(**spec), prompt_token_ids=tokenizer.encode(prompt), end_ids=end_ids)


def accept_text(matcher: TokenMatcher, tokenizer: Tokenizer, text: str) -> None:
    for id_ in tokenizer.encode(text, add_special_tokens=False):
        assert id_ in allowed(matcher)
        matcher.accept(id_)
    assert matcher.error is None


def wander(matcher: TokenMatcher, tokenizer: Tokenizer, rng: random.Random, *, max_tokens: int = 3000) -> str:
    """The text of a random path through the masks, ended where it may end."""
    ids: list[int] = []
    while len(ids) < max_tokens:
        choices = allowed(matcher)
        assert matcher.error is None
        assert choices, "a mask allows nothing"
        ends = tokenizer.eos_token_id in choices
        assert ends == matcher.is_complete
        if ends and (len(choices) == 1 or rng.random() < 0.5):
            text = tokenizer.decode(ids)
            assert "\ufffd" not in text
            return text
        token_id = rng.choice(sorted(choices - {tokenizer.eos_token_id}))
        assert token_id not in tokenizer.special_ids
        ids.append(token_id)
        matcher.accept(token_id)
    raise AssertionError(f"no end after {max_tokens} tokens: {tokenizer.decode(ids)!r}")


# Masks


def utf8_prefix(data: bytes) -> bool:
    try:
        codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("name", ["tiny", "qwen"])
def test_every_token_means_its_bytes_and_special_ones_nothing(name, request, tiny, qwen):
    tokenizer: Tokenizer = request.getfixturevalue(name)
    compiler = request.getfixturevalue("compiler" if name == "tiny" else "qwen_compiler")
    vocab = TINY_VOCAB if name == "tiny" else QWEN_VOCAB
    eos = tokenizer.eos_token_id
    matcher = start(compiler, regex="(?s:.*)")
    texts = {id_ for id_ in range(vocab) if tokenizer.token_bytes(id_) and id_ not in tokenizer.special_ids}
    expected = {id_ for id_ in texts if utf8_prefix(tokenizer.token_bytes(id_))}
    assert allowed(matcher) == expected | {eos}
    assert len(matcher.mask()) == 4 * -(-vocab // 32)
    # Inside a character only what continues it may follow, and the text cannot end.
    first = next(id_ for id_ in expected if tokenizer.token_bytes(id_) == "北".encode()[:1])
    matcher.accept(first)
    begun = tokenizer.token_bytes(first)
    assert allowed(matcher) == {id_ for id_ in texts if utf8_prefix(begun + tokenizer.token_bytes(id_))}


choice_lists = st.lists(st.text('ab{}"\\/n é北👍', min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=25)
@given(choice_lists, st.randoms(use_true_random=False))
def test_masks_lead_to_the_choices_and_nowhere_else(tiny, compiler, choices, rng):
    matchers = [start(compiler, choice=choices) for _ in range(1 + len(choices))]
    finals = {choice.encode() for choice in choices}
    eos, prefix, token_id = tiny.eos_token_id, b"", None
    while token_id != eos:
        choosable = allowed(matchers[0])
        assert choosable
        assert (eos in choosable) == (prefix in finals)
        for id_ in choosable - {eos}:
            assert id_ not in tiny.special_ids
            assert any(final.startswith(prefix + tiny.token_bytes(id_)) for final in finals)
        token_id = rng.choice(sorted(choosable))
        matchers[0].accept(token_id)
        prefix += tiny.token_bytes(token_id)
    assert matchers[0].error is None
    for choice, matcher in zip(choices, matchers[1:]):  # each is within reach, in tokens that the matcher may prescribe
        rest = choice.encode()
        while rest:
            fitting = [id_ for id_ in allowed(matcher) - {eos} if rest.startswith(tiny.token_bytes(id_))]
            assert fitting
            token_id = max(fitting, key=lambda id_: len(tiny.token_bytes(id_)))
            matcher.accept(token_id)
            rest = rest[len(tiny.token_bytes(token_id)) :]
        assert matcher.error is None
        assert matcher.is_complete


def test_the_matcher_may_prescribe_the_tokens_of_a_text_without_alternative(tiny, compiler):
    """As here, where the tokenizer itself would join two bytes that the matcher wants one by one."""
    matcher, text = start(compiler, choice=["👍👍👍"]), b""
    while not matcher.is_complete:
        token_id = min(allowed(matcher) - {tiny.eos_token_id})
        matcher.accept(token_id)
        text += tiny.token_bytes(token_id)
    assert text.decode() == "👍👍👍"


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "é", '"']}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}},
}


def check_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags", "next"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"x", "é", '"'}
    assert value["next"] in (None, {}, {"a": True}, {"a": False})


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text)

    return check


TOOLS = [
    {"type": "function", "function": {"name": 'get "北"', "parameters": PERSON, "description": "not read"}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]


def check_calls(text: str) -> None:
    """The text is nothing but calls, as the parser of outputs reads them."""
    parser = ToolCallParser()
    deltas = parser.feed(text) + parser.finish()
    names = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
    assert names
    assert not [delta for delta in deltas if isinstance(delta, ContentDelta)]
    for index, name in enumerate(names):
        arguments = "".join(d.text for d in deltas if isinstance(d, ToolArgumentsDelta) and d.index == index)
        if name == "stop":
            assert json.loads(arguments) == {}
        else:
            assert name == 'get "北"'
            check_person(arguments)


SPECS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": PERSON}, check_person),
    ({"json": json.dumps(PERSON)}, check_person),
    ({"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}}, json.loads),
    ({"regex": r"[0-9]{3}-[a-f]{1,4}(\.x)?"}, matches(r"[0-9]{3}-[a-f]{1,4}(\.x)?")),
    ({"regex": "é?北*👍{2}"}, matches("é?北*👍{2}")),
    ({"choice": ["yes", "no", "not yet"]}, matches("yes|no|not yet")),
    ({"grammar": 'start: WORD ("," WORD)*\nWORD: /[a-c]{1,3}/'}, matches("[a-c]{1,3}(,[a-c]{1,3})*")),
    ({"grammar": 'root ::= "<" root ">" | "x"'}, matches("<*x>*")),
    ({"tool_calls": TOOLS}, check_calls),
]


@pytest.mark.parametrize(("spec", "check"), SPECS)
def test_any_way_through_the_masks_gives_a_text_of_the_grammar(tiny, qwen, compiler, qwen_compiler, spec, check):
    rng = random.Random(0)
    for _ in range(8):
        check(wander(start(compiler, **spec), tiny, rng))
    check(wander(start(qwen_compiler, **spec), qwen, rng))


def test_arguments_of_a_call_are_an_object(compiler):
    """Nothing else would be read as a call."""

    def of(parameters: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}

    matcher = start(compiler, **of({"properties": {"a": {"type": "integer"}}}))
    accept_text(matcher, compiler._tokenizer, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    matcher = start(compiler, **of({"properties": {}}))
    accept_text(matcher, compiler._tokenizer, '<tool_call>\n{"name": "f", "arguments": ')
    texts = {compiler._tokenizer.token_bytes(id_)[:1] for id_ in allowed(matcher)}
    assert texts == {b"{"}
    for kind in ("array", None, ["object", "null"]):
        with pytest.raises(RequestError, match="must be 'object'"):
            compiler.check(StructuredOutputs(**of({"type": kind})))


def test_a_second_call_is_allowed_or_not(tiny, compiler):
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    for parallel in (True, False):
        matcher = start(compiler, tool_calls=TOOLS, parallel_tool_calls=parallel)
        accept_text(matcher, tiny, call)
        assert matcher.is_complete
        assert (allowed(matcher) == {tiny.eos_token_id}) != parallel
        if parallel:
            accept_text(matcher, tiny, "\n" + call)
            assert matcher.is_complete


def test_any_json_object(tiny, compiler):
    for text in ("{}", '{"a": [1, {"b": null}],\n  "c": "é"}', '{"": {}}'):
        matcher = start(compiler, json_object=True)
        accept_text(matcher, tiny, text)
        assert matcher.is_complete
    for text in ("[", "1", " " * 30 + "{"):
        matcher = start(compiler, json_object=True)
        with pytest.raises(AssertionError):
            accept_text(matcher, tiny, text)


def test_every_end_id_is_allowed_when_the_text_is_complete_and_never_before(tiny, compiler):
    end_ids = [tiny.eos_token_id, 0, 399]
    matcher = start(compiler, choice=["ab"], end_ids=end_ids)
    assert allowed(matcher).isdisjoint(end_ids)
    accept_text(matcher, tiny, "ab")
    assert allowed(matcher) == set(end_ids)
    matcher.accept(399)
    assert matcher.error is None


def test_a_token_that_was_not_allowed_leaves_nothing_but_the_end(tiny, compiler):
    matcher = start(compiler, choice=["ab"])
    matcher.accept(tiny.encode("z")[0])
    assert matcher.error
    assert not matcher.is_complete
    assert allowed(matcher) == {tiny.eos_token_id}
    matcher.accept(tiny.eos_token_id)
    assert matcher.error


def test_matchers_of_one_constraint_do_not_meet(tiny, compiler):
    one, two = (start(compiler, choice=["ab", "cd"]) for _ in range(2))
    accept_text(one, tiny, "ab")
    accept_text(two, tiny, "cd")
    assert one.is_complete
    assert two.is_complete


# Thinking


def test_thinking_is_free_and_the_grammar_begins_after_it(tiny, compiler):
    open_id, close_id = tiny.token_id("<think>"), tiny.token_id("</think>")
    eos = tiny.eos_token_id
    for prompt in (CHAT, CHAT + "<think>\n"):
        matcher = start(compiler, prompt=prompt, choice=["ab"])
        if prompt == CHAT:
            first = allowed(matcher)
            assert open_id in first
            assert first - {open_id} == allowed(start(compiler, choice=["ab"]))
            matcher.accept(open_id)
        assert allowed(matcher) == set(range(416)) - {eos}
        for id_ in tiny.encode("any z thing\n<think>ab"):
            matcher.accept(id_)
        assert not matcher.is_complete
        matcher.accept(close_id)
        for _ in range(2):
            (line_break,) = tiny.encode("\n")
            assert line_break in allowed(matcher)
            assert eos not in allowed(matcher)
            matcher.accept(line_break)
        assert line_break not in allowed(matcher)
        accept_text(matcher, tiny, "ab")
        assert allowed(matcher) == {eos}


def test_line_breaks_after_thinking_are_not_needed(tiny, qwen, compiler, qwen_compiler):
    for tokenizer, grammars in ((tiny, compiler), (qwen, qwen_compiler)):
        for between in ("", "\n", "\n\n"):
            matcher = start(grammars, prompt=CHAT + "<think>", choice=["ab"])
            for id_ in tokenizer.encode(f"hm</think>{between}", add_special_tokens=False):
                assert id_ in allowed(matcher)
                matcher.accept(id_)
            accept_text(matcher, tokenizer, "ab")
            assert matcher.is_complete


@pytest.mark.parametrize("prompt", [CHAT + "<think>\n\n</think>\n\n", CHAT + "The answer: ", "no chat <think>", ""])
def test_without_thinking_the_grammar_begins_at_once(tiny, compiler, prompt):
    matcher = start(compiler, prompt=prompt, choice=["ab"])
    assert allowed(matcher) == {id_ for id_ in range(TINY_VOCAB) if tiny.token_bytes(id_) in (b"a", b"ab")}


# Constraints that are refused


BAD_FIELDS: list[dict[str, Any]] = [
    {},
    {"regex": "a", "choice": ["a"]},
    {"json_object": True, "regex": "a"},
    {"json_object": False},
    {"json_object": 1},
    {"json": 5},
    {"json": "{"},
    {"json": "[]"},
    {"json": {"a": float("nan")}},
    {"json": {"a": {1}}},
    {"json": {"const": "\ud800"}},
    {"regex": 5},
    {"regex": "\udfff"},
    {"choice": "ab"},
    {"choice": []},
    {"choice": [""]},
    {"choice": [5]},
    {"choice": ["a" * 40_000, "b" * 40_000]},
    {"grammar": ["start"]},
    {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)},
    {"tool_calls": []},
    {"tool_calls": "{"},
    {"tool_calls": [{"name": "f"}]},
    {"json_object": True, "parallel_tool_calls": False},
    {"tool_calls": [{"function": {"name": "f"}}], "parallel_tool_calls": 0},
    {"tool_calls": [{"function": {"name": ""}}]},
    {"tool_calls": [{"function": {"name": "f", "parameters": 5}}]},
    {"colour": "red"},
]


@pytest.mark.parametrize("fields", BAD_FIELDS)
def test_malformed_constraints_are_refused_when_they_are_made(fields):
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=fields)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 500


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: list[dict[str, Any]] = [
    {"json": nested(200)},
    {"json": {"properties": {"a": {"type": "string", "pattern": "^a*$", "minLength": 10**6}}}},
    {"json": {"properties": {"a": {"allOf": [{"format": "date"}, {"type": "string", "maxLength": 10**6}]}}}},
    {"json": {"$ref": "#"}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    {"json": {"$ref": "file:///etc/passwd"}},
    {"json": {"type": "string", "minLength": 5, "maxLength": 2}},
    {"json": {"type": "nonsense"}},
    {"json": {"not": {}}},
    {"json": {"type": "integer", "maximum": 10**40}},
    {"json": {"type": "string", "pattern": "(a{1000}){1000}"}},
    {"json": {"properties": {"a": {"items": [{"patternProperties": {"(a{1000}){1000}": {}}}]}}}},
    {"json": {"type": "object", "x-guidance": {"whitespace_pattern": "(a{1000}){1000}"}}},
    {"tool_calls": [{"function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "a{1000000}"}}}}}]},
    {"tool_calls": [{"function": {"name": "f", "parameters": {"type": "nonsense"}}}]},
    {"regex": "(a"},
    {"regex": "(?=a)b"},
    {"regex": "a{1000000}"},
    {"regex": "(a{200})+{200}"},
    {"regex": "(a{200})?{200}"},
    {"regex": "(?x)( (a{10000}) #((\n ){10000}"},
    {"regex": "(" * 2000 + "a" + ")" * 2000},
    {"choice": ["\x7f"]},
    {"grammar": ""},
    {"grammar": "start: nope"},
    {"grammar": "root ::= ("},
    {"grammar": "root ::= " + "(" * 5000},
    {"grammar": "start: A\nA: B{200}\nB: C{200}\nC: /a/"},
    {"grammar": "start: Ab\nAb: [B C]{200}\nB: C{200}\nC: /a/"},
    {"grammar": 'start: "a" <|im_end|>'},
    {"grammar": 'start: %json {"type": "string", "pattern": "(a{1000}){1000}"}'},
    {"grammar": "start: A\nA: /.*a.{15}/ & /.*b.{15}/ & /.*c.{15}/"},
]


@pytest.mark.parametrize("fields", HOSTILE)
def test_sec_09_hostile_grammars_are_refused_and_the_next_one_is_fine(tiny, compiler, fields):
    with pytest.raises(RequestError) as caught:
        compiler.check(StructuredOutputs(**fields))
    assert caught.value.param == "structured_outputs"
    assert 20 < len(str(caught.value)) < 500
    accept_text(start(compiler, choice=["ab"]), tiny, "ab")


@pytest.mark.parametrize(
    "fields",
    [
        {"json": nested(30)},
        {"json": {"enum": [f"value {index}" for index in range(2000)]}},
        {"json": {"type": "array", "minItems": 10**6, "maxItems": 10**9, "items": {"type": "string"}}},
        {"json": {"type": "string", "minLength": 10**6}},
        {"grammar": 'start: start start | "a" | '},
        {"grammar": 'start: ("a"{1,1000000} "b"){1,1000000}'},
        {"json": {"type": "string", "pattern": "^a*$", "minLength": 2000}},
    ],
)
def test_large_grammars_within_the_limits_work(tiny, compiler, fields):
    compiler.check(StructuredOutputs(**fields))
    matcher = start(compiler, **fields)
    rng = random.Random(1)
    for _ in range(30):
        choices = allowed(matcher) - {tiny.eos_token_id}
        if not choices:
            break
        matcher.accept(rng.choice(sorted(choices)))
    assert matcher.error is None


def test_a_grammar_that_never_compiles_ends_with_its_process(compiler, monkeypatch, caplog):
    monkeypatch.setattr(structured, "check_regex", lambda pattern: None)
    monkeypatch.setattr(structured, "CHECK_CPU_S", 1)
    with pytest.raises(RequestError, match="more than 1 s or 2 GiB to compile") as caught:
        compiler.check(StructuredOutputs(regex="((a{1000}){1000}){1000}"))
    assert caught.value.param == "structured_outputs"
    assert "ended with code -" in caplog.text


def test_a_grammar_that_hits_a_limit_later_leaves_nothing_but_the_end(tiny, compiler):
    grammar = 'start: /[ab]/ "ab"{100000000}'
    compiler.check(StructuredOutputs(grammar=grammar))
    matcher = start(compiler, grammar=grammar)
    assert {tiny.token_bytes(id_) for id_ in allowed(matcher)} == {b"a", b"b"}
    for _ in range(100):
        choices = allowed(matcher)
        if matcher.error is not None:
            break
        matcher.accept(min(choices))
    assert choices == {tiny.eos_token_id}
    assert "limit" in matcher.error
    assert not matcher.is_complete


def test_a_step_that_takes_too_long_is_given_up_and_others_go_on(tiny, compiler, monkeypatch):
    slow, other = start(compiler, regex="a{10000}"), start(compiler, choice=["ab"])
    gate, run = threading.Event(), structured._worker.run
    with monkeypatch.context() as patch:
        patch.setattr(structured, "STEP_LIMIT_S", 0.1)
        patch.setattr(structured._worker, "run", lambda call, limit_s: run(lambda: gate.wait() and call(), limit_s))
        assert allowed(slow) == {tiny.eos_token_id}
    assert slow.error == "a step of the grammar takes more than 0.1 s"
    assert not slow.is_complete
    accept_text(other, tiny, "ab")
    assert other.is_complete
    gate.set()


def test_only_requests_that_ask_for_it_are_constrained(compiler):
    plain = Request("a", [5, 6], SamplingParams())
    asking = Request("b", [5, 6], SamplingParams(structured_outputs={"choice": ["ab"]}), eos_token_ids=[2])
    compiler.constrain(plain)
    compiler.constrain(asking)
    assert plain.constraint is None
    assert isinstance(asking.constraint, TokenMatcher)


def test_few_compiled_grammars_are_kept(tiny, monkeypatch):
    monkeypatch.setattr(structured, "MAX_CACHED_GRAMMARS", 2)
    compiler = GrammarCompiler(tiny, vocab_size=TINY_VOCAB)
    compiled: list[str] = []
    compile_grammar = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda grammar: compiled.append(grammar) or compile_grammar(grammar))
    for name in ("a", "b", "a", "c", "a", "b"):
        start(compiler, choice=[name])
    assert [grammar[-2] for grammar in compiled] == ["a", "b", "c", "b"]


def test_a_tokenizer_of_words_is_refused(words):
    with pytest.raises(RequestError, match="byte-level"):
        GrammarCompiler(words, vocab_size=16).check(StructuredOutputs(choice=["hello"]))


# Sizes


regex_atoms = st.sampled_from([("a", 1), (".", 1), ("[^]{5}]", 1), (r"\{", 1), (r"\(", 1), (r"\p{L}", 1), ("é", 1)])


def repeated(inner: st.SearchStrategy) -> st.SearchStrategy:
    """Groups and counted repetitions of what `inner` draws; (pattern, size) pairs."""
    group = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: ("(?:" + "".join(text for text, _ in items) + ")", sum(size for _, size in items))
    )
    return st.tuples(group, st.integers(0, 6), st.sampled_from(["{%d}", "{%d,}", "{0,%d}"])).map(
        lambda drawn: (drawn[0][0] + drawn[2] % drawn[1], drawn[0][1] * max(1, drawn[1]))
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"regex": "(a\nb[\nc"}, r"regular expression: unclosed character class, near '(a\\nb[\\nc'"),
        ({"regex": "x" * 300 + "(?=a)" + "y" * 300}, f"is not supported, near '{'x' * 16}(?=a){'y' * 11}'"),
        ({"json": {"type": "string", "pattern": "(a"}}, "regular expression: unclosed group, near '(a'"),
        ({"grammar": 'start: foo\nfoo: "a"\n  | bar\nbar: (('}, r"line 4: Expected token ')', found '\n'"),
        ({"grammar": 'start: foo\nfoo: "a"\n  | bar\nbar: (('}, r"near 'bar: (('"),
        ({"grammar": "start: a\n" + "x" * 5000}, "line 2: "),
        ({"json": {"type": "strin"}}, "Invalid type: 'strin'"),
        ({"json": {"type": "string", "format": "no such"}}, "Unknown format: 'no such'"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_one_line_that_says_where(
    spec: dict[str, Any], words: str, compiler: GrammarCompiler
):
    with pytest.raises(RequestError) as error:
        compiler.check(StructuredOutputs(**spec))
    message = str(error.value)
    assert words in message
    assert "\n" not in message
    assert " | " not in message
    assert "^" not in message
    assert len(message) < 350


@settings(max_examples=60)
@given(st.recursive(regex_atoms, repeated, max_leaves=10), st.sampled_from(["", "*", "+", "?"]))
def test_counted_repetitions_multiply_and_others_do_not(drawn, suffix):
    pattern, size = drawn
    factor = MAX_EXPANDED_SIZE // size + 1
    check_regex(f"{pattern}{suffix}")
    with pytest.raises(RequestError, match=str(size * factor)):
        check_regex(f"(?:{pattern}{suffix}){{{factor}}}")
    with pytest.raises(RequestError, match=str(size * factor)):
        check_lark(f"start: A\nA: B{{{factor}}}\nB: /{pattern}{suffix}/")


@pytest.mark.parametrize(
    "grammar",
    [
        'start: a{100000}\na: "x"{100000}',
        'start: "{100000}" "a({" // {100000}\n%ignore /[ {]+/',
        "start: A B\nA: /a{9000}/\nB: /b{9000}/",
        "start: A\nA: A{10000}",
    ],
)
def test_what_the_library_does_not_write_out_is_not_counted(grammar):
    check_lark(grammar)

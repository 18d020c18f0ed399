"""Parts of the server that need no server: messages between processes, log-probabilities, configuration files."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from qwen_engine import cli
from qwen_engine.config import EngineConfig
from qwen_engine.errors import ConfigError, RequestError
from qwen_engine.frontend.output_processor import RequestState
from qwen_engine.models.hub import DEMO_FOLDER
from qwen_engine.outputs import Logprob, PositionLogprobs
from qwen_engine.request import RequestSpec, SamplingParams, packed_ids
from qwen_engine.server import wire
from qwen_engine.server.app import create_app
from qwen_engine.server.chat_output import Message
from qwen_engine.server.engine_client import EngineClient
from qwen_engine.server.errors import MAX_MESSAGE_CHARS, ApiError, as_api_error
from qwen_engine.server.json_response import JsonTemplate, to_json
from qwen_engine.server.log_format import JsonFormatter, TextFormatter
from qwen_engine.server.logprobs import LOGPROB_FLOOR, CompletionLogprobs, chat_logprobs, join_pieces
from qwen_engine.server.metrics import _TOKEN_BUCKETS as GAPS
from qwen_engine.server.metrics import Metrics
from qwen_engine.server.protocol import ChatBody
from qwen_engine.server.responses_protocol import ResponsesBody
from qwen_engine.server.serve import API_KEY_VARIABLE, parse_args
from qwen_engine.tokenization.chat_output import ReasoningDelta
from qwen_engine.tokenization.tokenizer import Tokenizer
from qwen_engine.tokenization.tool_calls import ToolArgumentsDelta, ToolCallStart

TEXT = "naïve 你好 🐍, and 👩‍👩‍👧 too"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO_FOLDER)


@pytest.mark.parametrize("packed_prompt", [None, packed_ids([1, 2, 3])])
def test_a_request_crosses_unchanged_but_for_its_text(packed_prompt):
    params = SamplingParams(
        n=3,
        temperature=0.5,
        stop=["a", "b\ud800"],
        stop_token_ids=[7],
        logit_bias={5: -1.5},
        allowed_token_ids=[5, 6, 7],
    )
    spec = RequestSpec("17", "text", [1, 2, 3], params, -5, 2, "salt", (7, 9), [[1], [2, 3]], packed_prompt)
    crossed = wire.decode_spec(wire.unpack(wire.pack(wire.encode_spec(spec)))[0])
    assert crossed.params == params
    assert crossed.prompt is None
    for index in range(3):
        ours, theirs = spec.sequence(index), crossed.sequence(index)
        assert theirs.token_ids.tolist() == [1, 2, 3]
        for name in (
            "request_id",
            "token_ids",
            "packed_prompt",
            "seed",
            "priority",
            "cache_salt",
            "stop_ids",
            "bad_word_ids",
        ):
            assert getattr(ours, name) == getattr(theirs, name), name


def position(values: dict[int, Logprob]) -> PositionLogprobs:
    columns = zip(*((token_id, value.logprob, value.rank) for token_id, value in values.items()))
    return PositionLogprobs(*(columns if values else ((), (), ())))


logprobs = st.dictionaries(
    st.integers(0, 2**31 - 1),
    st.builds(Logprob, st.floats(max_value=0, allow_nan=False), st.integers(1, 2**31)),
    max_size=4,
).map(position)


@settings(max_examples=60)
@given(
    st.builds(
        wire.WireOutput,
        st.text(max_size=8),
        st.none() | st.integers(0, 2**31 - 1),
        st.sampled_from([None, "stop", "length"]),
        st.none() | st.integers(0, 2**31) | st.text(max_size=4),
        st.none() | logprobs,
        st.none() | st.tuples(st.integers(0, 100), st.lists(logprobs, max_size=3)),
        st.integers(0, 100),
        st.integers(0, 100),
        st.floats(0, 1e9),
    )
)
def test_an_output_crosses_unchanged(output):
    row = wire.encode_output(output, is_first=True)
    assert wire.decode_output(wire.unpack(wire.pack(row))[0]) == output


def test_a_plain_token_is_a_row_of_two():
    output = wire.WireOutput("1-0", 42, num_cached_tokens=16, scheduled_time=5.0)
    assert wire.encode_output(output, is_first=False) == ("1-0", 42)
    assert wire.decode_output(("1-0", 42)) == wire.WireOutput("1-0", 42)
    preempted = output._replace(num_preemptions=2)
    assert wire.decode_output(wire.encode_output(preempted, is_first=False)) == preempted


def test_the_longest_sample_and_preemptions_of_a_request_that_was_cut_off_are_counted(tokenizer):
    metrics = Metrics(prefix="p", model_name="m")
    params = SamplingParams(n=2, max_tokens=50)
    state = RequestState(RequestSpec("1", "text", [300] * 9, params, seed=0), tokenizer, arrival_time=0.0)
    for sequence_id, num_preemptions in (("1-0", 0), ("1-1", 0), ("1-1", 2), ("1-1", 3), ("1-0", 1)):
        output = wire.WireOutput(sequence_id, 301, num_cached_tokens=4, num_preemptions=num_preemptions)
        row = wire.encode_output(output, is_first=num_preemptions == 0)
        state.take(wire.decode_output(row), lambda *_: None)
    state.abort()
    metrics.observe_request(state)
    text = metrics.exposition(wire.EngineStats(), healthy=True).decode()
    for name, total in (
        ("request_num_preemptions", 4),
        ("request_max_num_generation_tokens", 3),
        ("request_generation_tokens", 5),
        ("request_prefill_kv_computed_tokens", 5),
        ("request_params_n", 2),
        ("request_params_max_tokens", 50),
    ):
        assert f'p:{name}_sum{{engine="0",model_name="m"}} {total}.0\n' in text
        assert f'p:{name}_count{{engine="0",model_name="m"}} 1.0\n' in text


def entry(token_id: int, logprob: float = -0.5, **others: float) -> PositionLogprobs:
    more = {int(name[1:]): Logprob(value, rank) for rank, (name, value) in enumerate(others.items(), start=2)}
    return position({token_id: Logprob(logprob, 1), **more})


def test_offsets_count_characters_whatever_the_pieces(tokenizer):
    ids = tokenizer.encode(TEXT)
    entries = [entry(id_) for id_ in ids]
    for size in (1, 2, 5, len(ids)):
        logprobs = CompletionLogprobs(tokenizer, 1, skip_special_tokens=True)
        pieces = [logprobs.output(ids[i : i + size], entries[i : i + size]) for i in range(0, len(ids), size)]
        whole = pieces[0]
        for piece in pieces[1:]:
            whole = join_pieces(whole, piece)
        data = b""
        for id_, offset, text in zip(ids, whole["text_offset"], whole["tokens"]):
            assert offset == len(data.decode(errors="ignore"))
            data += tokenizer.token_bytes(id_)
            if text.startswith("bytes:"):
                assert bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")) == tokenizer.token_bytes(id_)
    parts = chat_logprobs(tokenizer, ids, entries, 0)
    assert b"".join(bytes(part["bytes"]) for part in parts).decode() == TEXT


def test_lpb_01_no_infinity_reaches_json(tokenizer):
    values = entry(300, -math.inf, i301=-math.inf, i302=math.nan, i303=-1e30)
    for content in (
        chat_logprobs(tokenizer, [300], [values], 4),
        CompletionLogprobs(tokenizer, 4, skip_special_tokens=True).output([300], [values]),
    ):
        assert str(LOGPROB_FLOOR) in to_json(content).decode()
    with pytest.raises(ValueError):
        to_json(math.inf)


def test_log_probabilities_of_a_long_prompt_share_the_texts_of_their_tokens(tokenizer):
    ids = [300, 301] * 50
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    state = RequestState(RequestSpec("1", None, ids, params, seed=0), tokenizer)
    rows = [entry(id_, i302=-2.0) for id_ in ids[1:]]
    row = wire.encode_output(wire.WireOutput("1-0", None, prompt_logprobs=(1, rows)), is_first=False)
    state.take(wire.decode_output(wire.unpack(wire.pack(row))[0]), lambda *_: None)
    texts = [value.decoded_token for values in state.prompt_logprobs[1:] for value in values.values()]
    piece = CompletionLogprobs(tokenizer, 1, skip_special_tokens=True).prompt(ids, state.prompt_logprobs)
    texts += [*piece["tokens"], *(text for top in piece["top_logprobs"][1:] for text in top)]
    assert len(texts) > 300
    assert len({*map(id, texts)}) == 3


def test_the_sampled_token_is_always_among_the_top_ones(tokenizer):
    values = position({300: Logprob(-9.0, 50), 301: Logprob(-0.1, 1), 302: Logprob(-2.0, 2)})
    piece = CompletionLogprobs(tokenizer, 1, skip_special_tokens=True).output([300], [values])
    assert list(piece["top_logprobs"][0].values()) == [-0.1, -9.0]
    (part,) = chat_logprobs(tokenizer, [300], [values], 1)
    assert [top["logprob"] for top in part["top_logprobs"]] == [-0.1]


def test_a_message_is_put_together_from_deltas():
    message = Message()
    message.add([ReasoningDelta("hm"), ReasoningDelta("m"), ToolCallStart(0, "call_1", "f")])
    message.add([ToolArgumentsDelta(0, '{"a"'), ToolArgumentsDelta(0, ": 1}")])
    assert message.as_json(reasoning_alias=False) == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hmm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    assert Message().as_json(reasoning_alias=True) == {"role": "assistant", "content": ""}


def test_unexpected_errors_show_nothing_and_long_messages_are_cut():
    error = as_api_error(ZeroDivisionError("secret"))
    assert error.status == 500
    assert "secret" not in str(error.body())
    error = as_api_error(RequestError("x" * 10_000, "prompt"))
    assert (error.status, error.param, len(error.body()["error"]["message"])) == (400, "prompt", MAX_MESSAGE_CHARS)


def test_an_exception_in_a_route_is_an_envelope_without_internals():
    app = create_app(None, api_keys=[], allowed_origins=[], max_request_bytes=100)  # no route can work
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [], "query_string": b""}
    with pytest.raises(AttributeError):  # the log of the HTTP server gets it
        asyncio.run(app(scope, receive, send))
    start, body = sent
    assert start["status"] == 500
    error = json.loads(body["body"])["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "NoneType" not in error["message"]


def test_body_options_become_template_options():
    body = ChatBody(messages=[], reasoning_effort="none", chat_template_kwargs={"a": 1}, continue_final_message=True)
    assert body.template_options == {
        "tools": None,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False, "a": 1},
    }
    assert ChatBody(messages=[], max_tokens=5, max_completion_tokens=3).limit == ("max_completion_tokens", 3)
    body = ResponsesBody(input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}])
    assert body.as_chat().messages == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    for refused in ({"tools": [{"type": "web_search"}]}, {"background": True}, {"truncation": "auto"}):
        with pytest.raises(ApiError):
            ResponsesBody(input="x", **refused).as_chat()


def test_log_lines_carry_the_fields_of_a_request():
    record = logging.LogRecord("name", logging.INFO, "", 0, "request", (), None)
    record.fields = {"prompt_tokens": 3, "error": None}
    assert json.loads(JsonFormatter().format(record))["prompt_tokens"] == 3
    assert TextFormatter("%(message)s").format(record) == "request prompt_tokens=3"


def test_a_client_cannot_send_line_breaks_or_escape_sequences_to_the_log():
    record = logging.LogRecord("name", logging.INFO, "", 0, "request", (), None)
    record.fields = {"path": "/é \x9b31m\u2028\x85\n\ud800", "reason": "ö ü"}
    line = TextFormatter("%(message)s").format(record)
    assert line == 'request path="/\\u00e9 \\u009b31m\\u2028\\u0085\\n\\ud800" reason="ö ü"'
    line = JsonFormatter().format(record)
    assert line.isprintable()
    assert json.loads(line)["path"] == record.fields["path"]
    record.fields = {"reason": "ö ü"}
    assert '"ö ü"' in JsonFormatter().format(record)


def test_a_file_gives_options_and_the_command_line_is_stronger(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: some/model\nport: 1\nmax_model_len: 64\napi-key: [a, b]\nenable-prefix-caching: false\nseed: null\n"
    )
    args = parse_args(["--config", str(path)])
    assert (args.model, args.port, args.engine_max_model_len, args.api_key) == ("some/model", 1, 64, ["a", "b"])
    assert args.engine_enable_prefix_caching is False
    args = parse_args(["--config", str(path), "--port=2", "--api-key", "c", "--enable-prefix-caching"])
    assert (args.port, args.api_key, args.engine_enable_prefix_caching) == (2, ["c"], True)


def test_the_model_may_be_named_first_but_not_twice(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text("model: some/model\nport: 1\n")
    args = parse_args(["other/model", "--config", str(path)])
    assert (args.model, args.port) == ("other/model", 1)
    for again in (["--model", "b"], ["--model=b"]):
        with pytest.raises(SystemExit):
            parse_args(["a", *again])
        assert "the model is named twice, as a and with --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "prot"),
        ("config: x", "config"),
        ("no-enforce-eager: true", "no-enforce-eager"),
        ("enforce_eager: 1", "true or false"),
        ("port: [1, 2]", "list"),
        ("port: {a: 1}", "port"),
        ("- a", "list"),
        ("a: [", "cannot read"),
        ("max_num_waiting: 3", "max_num_waiting"),
    ],
)
def test_a_file_with_a_fault_is_refused(text, words, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse_args(["--config", str(path)])
    with pytest.raises(ConfigError, match="cannot read"):
        parse_args(["--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--metrics-prefix", "a-b"], "a-b"),
        (["--ssl-certfile", "x"], "--ssl-keyfile"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--port", "70000"], "--port"),
        (["--port", "99999999999"], "--port"),
        (["--restart-engine", "-1"], "--restart-engine"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout"),
        (["--dead-engine-grace", "-0.1"], "--dead-engine-grace"),
        (["--max-request-bytes", "0"], "--max-request-bytes"),
        (["--max-queued-requests", "-1"], "--max-queued-requests"),
        (["--served-model-name", "a", "--served-model-name", ""], "--served-model-name"),
        (["--api-key", "secret", "--api-key", ""], "API key"),
        (["--api-key", "schlüssel"], "API key"),
        (["--ssl-certfile", "no/such/file", "--ssl-keyfile", "x"], "no/such/file"),
        (["--ssl-certfile", "/dev/null", "--ssl-keyfile", "/dev/null"], "/dev/null"),
    ],
)
def test_options_that_cannot_be_right_are_refused_before_anything_starts(args, word, capsys):
    assert cli.main(["serve", "--port", "0", *args]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert word in line


@pytest.mark.parametrize("value", [",", "secret,", " secret"])
def test_keys_of_the_environment_cannot_be_empty_by_mistake(value, monkeypatch, capsys):
    monkeypatch.setenv(API_KEY_VARIABLE, value)
    assert cli.main(["serve", "--model", "no/such/folder", "--port", "0"]) == 2
    message = capsys.readouterr().err
    assert "API key" in message
    assert "secret" not in message


def test_a_free_port_is_offered_only_where_the_port_is_at_fault(capsys):
    assert cli.main(["serve", "--model", "no/such/folder", "--host", "203.0.113.1"]) == 2
    message = capsys.readouterr().err
    assert "error: cannot listen on 203.0.113.1:8000" in message
    assert "--port 0" not in message


def test_shd_02_a_port_that_is_taken_is_found_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["serve", "--model", "no/such/folder", "--port", str(port)]) == 2
    message = capsys.readouterr().err
    assert f"error: cannot listen on 127.0.0.1:{port}" in message
    assert "--port 0" in message


TEXTS = ["", "word", 'a "quote" and a \\', "\x00\x1f\x7f\n\r\t", "é ✓ 🙂 \u2028", "\ud83d", "\udc00x", "null"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_filled_template_is_what_the_encoder_would_have_written(text):
    def make(text: str) -> dict[str, Any]:
        return {"id": "x", "delta": {"reasoning": text, "reasoning_content": text}, "last": None, "é": "\ud83d"}

    assert JsonTemplate(make).fill(text) == to_json(make(text))


def test_gaps_are_exposed_as_prometheus_client_exposes_a_histogram():
    metrics, registry = Metrics(prefix="p", model_name="m"), CollectorRegistry()
    name = "p:inter_token_latency_seconds"
    theirs = Histogram(
        name, "Between two tokens of a sample.", ("model_name", "engine"), registry=registry, buckets=GAPS
    )
    for gap_s in (0.0, 0.0005, 0.001, 0.0011, 79.0, 80.0, 81.0):
        metrics.observe_gap(gap_s)
        theirs.labels("m", "0").observe(gap_s)

    def lines(exposition: bytes) -> list[str]:
        return [line for line in exposition.decode().splitlines() if name in line and "created" not in line]

    assert lines(metrics.exposition(wire.EngineStats(), healthy=True)) == lines(generate_latest(registry))


def test_streams_write_between_two_steps_though_the_next_one_has_come_already(tokenizer):
    """A socket that always has another step."""
    num_turns, turns_by_step = 0, []
    engine = SimpleNamespace(readable=asyncio.Event(), last_words=None, refused_config=False)

    def recv(_flags: int) -> bytes:
        turns_by_step.append(num_turns)
        return wire.pack("failed", "", False) if len(turns_by_step) == 50 else wire.pack("step", [], None, 0)

    engine.socket = SimpleNamespace(recv=recv)
    metrics = Metrics(prefix="test", model_name="m")
    client = EngineClient(EngineConfig(model="m"), DEMO_FOLDER, tokenizer, metrics)

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        counting = asyncio.create_task(count_turns())
        await client._read(engine, asyncio.get_running_loop().create_future())
        counting.cancel()

    asyncio.run(scenario())
    assert all(later > earlier for earlier, later in pairwise(turns_by_step))

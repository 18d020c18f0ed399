"""The endpoints as clients use them: the OpenAI package, and plain HTTP where it says more."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
import schemathesis
from fault_tools import wait_until
from hypothesis import HealthCheck, Phase, given, settings
from server_tools import MAX_REQUEST_BYTES, Server, serve

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "def mean(data):"
MESSAGES = [{"role": "user", "content": "What is a list?"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def text_of(events: list[dict], index: int = 0) -> str:
    """The text of one choice, from the chunks of a stream of either kind."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def assert_serves(server: Server) -> None:
    assert server.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200


def test_a_completion_through_the_openai_package(client):
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    stream = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in stream].count("length") == 1
    assert len({chunk.id for chunk in stream}) == 1


def test_a_chat_through_the_openai_package(client):
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    message = whole.choices[0].message
    assert (message.role, message.tool_calls) == ("assistant", None)
    logprobs = whole.choices[0].logprobs.content
    assert len(logprobs) == whole.usage.completion_tokens == 8
    assert b"".join(bytes(item.bytes) for item in logprobs).decode(errors="replace") == message.content
    for item in logprobs:
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].token == item.token  # greedy
        assert item.top_logprobs[0].logprob == item.logprob

    stream = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_completion_tokens=8,
            temperature=0,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *chunks, usage = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    streamed = [item for chunk in chunks if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content]
    assert [item.bytes for item in streamed] == [item.bytes for item in logprobs]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == 8
    assert usage.usage.prompt_tokens_details.cached_tokens % 16 == 0


def test_a_response_through_the_openai_package(client):
    options = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(input="Hello", **options)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 6
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    with client.responses.stream(input=items, **options) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def test_a_response_takes_sampling_parameters_that_openai_has_not(server):
    """As vLLM does; load generators send `stop: null` and `ignore_eos` to all endpoints."""
    body = {"input": "Hello", "max_output_tokens": 8, "temperature": 0, "stop": None, "ignore_eos": True}
    plain = server.ask(RESPONSES, body).json
    assert plain["usage"]["output_tokens"] == 8
    forced = server.ask(RESPONSES, {**body, "allowed_token_ids": [65]}).json["output"][0]["content"][0]["text"]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **GREEDY, "ignore_eos": True}
    answer = server.ask(CHAT, {**chat, "allowed_token_ids": [65]}).json
    assert forced == answer["choices"][0]["message"]["content"]
    assert len(set(forced)) == 1
    seeded = {**body, "temperature": 1, "top_k": 50, "min_p": 0.001, "seed": 5, "repetition_penalty": 1.1}
    first, second = (server.ask(RESPONSES, seeded).json["output"] for _ in range(2))
    assert first[0]["content"] == second[0]["content"]
    text = plain["output"][0]["content"][0]["text"]
    stopped = server.ask(RESPONSES, {**body, "stop": [text[2:4]]}).json
    assert (stopped["status"], stopped["output"][0]["content"][0]["text"]) == (
        "completed",
        text[: text.index(text[2:4])],
    )


def test_errors_reach_the_openai_package_as_its_own_exceptions(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x " * 600, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in str(caught.value)
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "this server has tiny" in caught.value.message


def test_models_version_and_probes(server, client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 512)
    assert client.models.retrieve("tiny") == model
    assert server.ask("/v1/models/none").error["code"] == "model_not_found"
    assert set(server.ask("/version").json) == {"version"}
    for path in ("/health", "/ready", "/ping"):
        answer = server.ask(path)
        assert (answer.status, answer.body) == (200, b"")


def test_head_is_get_without_a_body(server):
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port)  # a body would be read as the next answer
    with contextlib.closing(connection):
        for path in ("/", "/health", "/ready", "/ping", "/version", "/v1/models", "/v1/models/no", "/metrics", "/none"):
            answers = []
            for method in ("GET", "HEAD"):
                connection.request(method, path)
                with connection.getresponse() as response:
                    headers = {name: response.headers[name] for name in ("Content-Type", "Content-Security-Policy")}
                    answers.append((response.status, headers, response.read()))
            (status, headers, _), head = answers
            assert head == (status, headers, b""), path
            assert status in (200, 404)
        connection.request("HEAD", COMPLETIONS)
        assert connection.getresponse().status == 405


def test_tokens_come_and_go(server):
    text = "naïve 你好 🐍 <|im_end|>"
    tokens = server.ask("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 512
    assert server.ask("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": text}
    chat = server.ask("/tokenize", {"messages": MESSAGES}).json
    usage = server.ask(CHAT, {"messages": MESSAGES, "max_tokens": 1}).json["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    assert server.ask("/tokenize", {}).error["param"] == "prompt"
    for bad in (-1, 2**40, 2**70):
        assert server.ask("/detokenize", {"tokens": [bad]}).error["param"] == "tokens"


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 24},
        {"max_tokens": 24, "temperature": 1.0, "seed": 5, "n": 3},
        {"max_tokens": 60, "stop": ["e", "zz", " the"], "temperature": 1.0, "seed": 1},
        {"max_tokens": 60, "stop": "or", "include_stop_str_in_output": True, "temperature": 1.0, "seed": 2},
        {"max_tokens": 30, "skip_special_tokens": False, "logit_bias": {"3048": 100}, "temperature": 0.8, "seed": 3},
        {"max_tokens": 24, "stop_token_ids": list(range(300, 420)), "min_tokens": 5, "temperature": 1.0, "seed": 4},
    ],
)
def test_streamed_text_is_the_whole_text(server, more):
    """dtk_06, stp_01, stp_02: nothing is lost, repeated or shown too early, in either kind of endpoint."""
    for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        body = {**GREEDY, **body, **more}
        whole = server.ask(path, body).json
        events = server.stream(path, {**body, "stream_options": {"include_usage": True}})
        for choice in whole["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert text_of(events, choice["index"]) == text
            ends = [c for e in events for c in e["choices"] if c["index"] == choice["index"] and c["finish_reason"]]
            assert [(c["finish_reason"], c["stop_reason"]) for c in ends] == [
                (choice["finish_reason"], choice["stop_reason"])
            ]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [events[-1]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]


@pytest.mark.parametrize("more", [{}, {"stop": ["qqqqqqqqqq", "zyzyzyzyzy"]}])
def test_lpb_04_streamed_logprobs_are_those_of_the_whole(server, more):
    body = {"prompt": PROMPT, "max_tokens": 24, "logprobs": 3, "temperature": 1.0, "seed": 8, "echo": True, **more}
    whole = server.ask(COMPLETIONS, body).json["choices"][0]
    pieces = [event["choices"][0] for event in server.stream(COMPLETIONS, body)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for piece in pieces for value in piece["logprobs"][name]]
        if name in ("token_logprobs", "top_logprobs"):
            assert len(joined) == len(whole["logprobs"][name])
        else:
            assert joined == whole["logprobs"][name]
    shown = 0
    for piece in pieces:  # what a piece accounts for lies in its own text
        assert all(shown <= offset <= shown + len(piece["text"]) for offset in piece["logprobs"]["text_offset"])
        shown += len(piece["text"])


def test_echo_scores_a_prompt_without_new_tokens(server):
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 0}
    answer = server.ask(COMPLETIONS, body).json
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == PROMPT
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    longer = server.ask(COMPLETIONS, {**body, "max_tokens": 3, **GREEDY}).json["choices"][0]["logprobs"]
    assert longer["token_logprobs"][1 : len(logprobs["tokens"])] == pytest.approx(logprobs["token_logprobs"][1:])
    assert text_of(server.stream(COMPLETIONS, body)) == PROMPT


def test_api_03_limits_on_max_tokens(server):
    def ask(value, **more):
        return server.ask(COMPLETIONS, {"prompt": "x", "max_tokens": value, **more})

    for bad in (0, -1, "5", 2.5):
        assert ask(bad).error["param"] == "max_tokens", bad
    assert ask(1).json["usage"]["completion_tokens"] == 1
    assert ask(None, **GREEDY, ignore_eos=True).json["usage"]["completion_tokens"] == 16
    assert ask(0, echo=True).status == 200


def test_api_09_prompt_and_output_share_the_context(server):
    prompt = list(range(100, 180)) * 6  # 480 tokens
    for fits in (32, None):
        answer = server.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": fits, "ignore_eos": True}).json
        assert answer["choices"][0]["finish_reason"] == "length"
    for name, limit in (("max_tokens", 33), ("max_tokens", 10**12)):
        error = server.ask(COMPLETIONS, {"prompt": prompt, name: limit}).error
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)
    error = server.ask(CHAT, {"messages": MESSAGES, "max_completion_tokens": 600}).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_completion_tokens")
    for more in ({"stream": True}, {"max_tokens": 5}):
        error = server.ask(CHAT, {"messages": [{"role": "user", "content": "a b " * 400}], **more}).error
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_sch_03_prompts_that_are_too_long_are_refused_beside_a_stream_that_goes_on(server):
    witness = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, **GREEDY}
    alone = text_of(server.stream(COMPLETIONS, witness))
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.stream, COMPLETIONS, witness)
        wait_until(lambda: server.num_running() == 1 or stream.done())
        for num_tokens in (512, 513, 5120):
            for more in ({}, {"stream": True}, {"n": 4, "temperature": 1.0}):
                answer = server.ask(COMPLETIONS, {"prompt": [7] * num_tokens, **more})
                assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
                assert answer.headers["Content-Type"].startswith("application/json")
                assert str(num_tokens) in answer.error["message"]
                assert "512 tokens" in answer.error["message"]
        assert text_of(stream.result(120)) == alone
    assert server.ask("/health").status == 200


@pytest.mark.parametrize("temperature", [0, 2])
def test_lpb_06_logprobs_have_openais_shape_and_are_those_of_the_model(server, temperature):
    """Raw: whatever the temperature and the filters, as a prompt's, which nothing was sampled for."""
    sampling = {"temperature": temperature, "top_k": 5, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    for count in (0, 5):
        body = {"prompt": PROMPT, "logprobs": count, "return_token_ids": True, **sampling}
        choice = server.ask(COMPLETIONS, body).json["choices"][0]
        logprobs = choice["logprobs"]
        assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert [len(values) for values in logprobs.values()] == [6] * 4
        for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
            assert top[token] == value
            assert max(count, 1) <= len(top) <= count + 1
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        scored = server.ask(COMPLETIONS, {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}).json
        again = scored["choices"][0]["logprobs"]["token_logprobs"][-6:]
        assert again == pytest.approx(logprobs["token_logprobs"], abs=1e-4)
    for count in (0, 1, 20):
        body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": count, **sampling}
        content = server.ask(CHAT, body).json["choices"][0]["logprobs"]["content"]
        assert len(content) == 6
        for item in content:
            assert set(item) == {"token", "logprob", "bytes", "top_logprobs"}
            if not item["token"].startswith("bytes:"):  # a part of a character
                assert bytes(item["bytes"]).decode() == item["token"]
            assert item["logprob"] <= 0  # whether or not it is among the top ones
            assert all(set(top) == {"token", "logprob", "bytes"} for top in item["top_logprobs"])
            values = [top["logprob"] for top in item["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert len(values) == count


def test_all_log_probabilities_come_where_the_server_has_no_cap_on_them(server, chat_model):
    body = {"prompt": "def mean", "logprobs": -1, "max_tokens": 2, "echo": True}
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1, "max_tokens": 2}
    for path, refused, name in ((COMPLETIONS, body, "logprobs"), (CHAT, chat, "top_logprobs")):
        answer = server.ask(path, refused)
        assert (answer.status, answer.error["param"]) == (400, name)
        assert answer.error["message"].startswith(f"{name} is -1, all 3072; at most 20")
    with serve(chat_model, "--max-model-len", "512", "--max-logprobs", "-1") as unlimited:
        top = unlimited.ask(COMPLETIONS, body).json["choices"][0]["logprobs"]["top_logprobs"]
        assert top[0] is None
        assert all(len(texts) > 3000 for texts in top[1:])  # ids without a text have one key
        for item in unlimited.ask(CHAT, chat).json["choices"][0]["logprobs"]["content"]:
            assert len(item["top_logprobs"]) == 3072


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_sec_13_a_body_full_of_errors_gets_a_short_answer_without_its_text(server, path):
    messages = [{"role": "secret" * 140, "content": 5}] * 1000
    answer = server.ask(path, {"messages" if path == CHAT else "input": messages})
    assert answer.status == 400
    assert len(answer.body) < 1000
    assert answer.body.count(b"secret") < 20


def test_api_01_api_02_prompts_that_are_none(server):
    for prompt in ("", [""], [], [[]], ["a", ""], [1, []], ["a", 1], [1.5], [True], None, 7, {}, [[1], [-1]]):
        assert server.ask(COMPLETIONS, {"prompt": prompt}).error["param"] == "prompt", prompt
    for bad in (-1, 3056, 3072, 2**31, 2**63, 2**70):
        error = server.ask(COMPLETIONS, {"prompt": [1, bad]}).error
        assert "vocabulary" in error["message"]
    for messages in ([], [{}], [{"role": "robot", "content": "x"}], [{"role": "user", "content": 5}], "x", [5]):
        assert server.ask(CHAT, {"messages": messages}).error["param"].startswith("messages"), messages
    assert_serves(server)
    wait_until(server.is_idle)


def test_batches_and_samples_are_ordered(server):
    prompts = [PROMPT, "class List:", "import os"]
    alone = [
        server.ask(COMPLETIONS, {"prompt": p, "max_tokens": 6, **GREEDY}).json["choices"][0]["text"] for p in prompts
    ]
    answer = server.ask(COMPLETIONS, {"prompt": prompts, "max_tokens": 6, **GREEDY}).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert answer["usage"]["completion_tokens"] == 18
    events = server.stream(COMPLETIONS, {"prompt": prompts, "max_tokens": 6, **GREEDY})
    assert [text_of(events, index) for index in range(3)] == alone
    body = {"prompt": prompts[:2], "n": 3, "max_tokens": 6, "seed": 7, "return_token_ids": True}
    choices = server.ask(COMPLETIONS, body).json["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 6
    assert [choice["prompt_token_ids"] for choice in choices[:3]] == [choices[0]["prompt_token_ids"]] * 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "temperatur": 1}, "temperatur"),
        (COMPLETIONS, {"prompt": "x", "temperature": "warm"}, "temperature"),
        (COMPLETIONS, {"prompt": "x", "temperature": 3}, "temperature"),
        (COMPLETIONS, {"prompt": "x", "temperature": 0, "n": 2}, "n"),
        (COMPLETIONS, {"prompt": "x", "n": 10**9, "stream": True}, "n"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"word": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**64}, "seed"),
        (COMPLETIONS, {"prompt": "x", "priority": 2**64}, "priority"),
        (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, "cache_salt"),
        (COMPLETIONS, {"prompt": "x", "timeout": 0}, "timeout"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "code"}]}, "tools[0].type"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 600}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 600, "max_tokens": 5}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", "\ud800"]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["\ud800"]}, "bad_words"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 600}, "max_tokens"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"role": "robot", "content": "x"}]}, "input"),
        (RESPONSES, {"input": "x " * 600}, "input"),
        (RESPONSES, {"input": "\ud800"}, "input"),
        (RESPONSES, {"input": "x", "instructions": "\ud800"}, "instructions"),
        (RESPONSES, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"input": "x", "max_output_tokens": 600}, "max_output_tokens"),
        (RESPONSES, {"input": "x", "temperature": 3}, "temperature"),
        (RESPONSES, {"input": "x", "min_p": 3}, "min_p"),
        (RESPONSES, {"input": "x", "stop": 3}, "stop"),
        (RESPONSES, {"input": "x", "n": 2}, "n"),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": [{"type": "function_call"}]}, "input[0].name"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": 5}]}, "input[0].summary"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ],
)
def test_a_bad_field_is_named(server, path, body, param):
    answer = server.ask(path, body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"


def test_an_error_calls_its_field_as_the_client_does(server):
    options = {"logprobs": True, "top_logprobs": 21}
    assert server.ask(CHAT, {"messages": MESSAGES, **options}).error["message"].startswith("top_logprobs is 21;")
    error = server.ask(RESPONSES, {"input": "x", "max_output_tokens": 600}).error
    assert (error["code"], "lower max_output_tokens to" in error["message"]) == ("context_length_exceeded", True)
    error = server.ask(RESPONSES, {"input": "x", "max_output_tokens": 0}).error
    assert error["message"].startswith("max_output_tokens is 0;")


def test_requests_that_are_no_requests(server):
    for body in (b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "x"', b"\xff", b"[" * 100_000, b"1" * 5000):
        answer = server.ask(COMPLETIONS, body)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), body[:20]
    assert server.ask(COMPLETIONS, b'{"prompt":"\\ud800"}').status == 400
    assert server.ask(COMPLETIONS, b"x=1", headers={"Content-Type": "text/plain"}).status == 400
    assert server.ask(COMPLETIONS, b"{}", headers={"Content-Encoding": "gzip"}).status == 400
    for path in ("/v1/none", "/static/", "/static/../chat.py", "/health/", "//health", "/v1/completions/"):
        assert server.ask(path).error["code"] == "unknown_url", path
    answer = server.ask(COMPLETIONS)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    big = server.ask(COMPLETIONS, b"[" + b" " * MAX_REQUEST_BYTES)
    assert (big.status, big.error["code"]) == (413, "request_too_large")
    assert len(server.ask(COMPLETIONS, {"prompt": {"deep": ["x" * 100_000]}}).body) < 1000
    assert_serves(server)


def test_ignored_and_null_fields_change_nothing(server):
    body = {"messages": MESSAGES, "max_tokens": 5, **GREEDY}
    more = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "tools": None, "stop": None}
    more |= {"response_format": {"type": "text"}, "reasoning_effort": "low", "n": None, "logit_bias": None}
    assert server.ask(CHAT, {**body, **more}).json["choices"] == server.ask(CHAT, body).json["choices"]


def test_tools_are_shown_to_the_model_unless_it_may_not_call_them(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}, "extra": 1}

    def num_prompt(**more) -> int:
        return server.ask(CHAT, {"messages": MESSAGES, "max_tokens": 1, **more}).json["usage"]["prompt_tokens"]

    assert num_prompt(tools=[tool]) > num_prompt()
    assert num_prompt(tools=[tool], tool_choice="none") == num_prompt(tools=[]) == num_prompt()
    tokens = server.ask("/tokenize", {"messages": MESSAGES, "tools": [tool]}).json["tokens"]
    prompt = server.ask("/detokenize", {"tokens": tokens}).json["prompt"]
    assert json.dumps(tool) in prompt  # as it came, no field added or dropped


def test_a_final_message_is_continued(server):
    messages = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "A list"}]}]
    options = {"messages": messages, "continue_final_message": True}
    tokens = server.ask("/tokenize", options).json["tokens"]
    assert server.ask("/detokenize", {"tokens": tokens}).json["prompt"].endswith("A list")
    chat = server.ask(CHAT, {**options, "max_tokens": 5, **GREEDY}).json["choices"][0]["message"]["content"]
    assert chat == server.ask(COMPLETIONS, {"prompt": tokens, "max_tokens": 5, **GREEDY}).json["choices"][0]["text"]


def test_lpb_01_masked_tokens_have_finite_logprobs(server):
    body = {"max_tokens": 4, "allowed_token_ids": [300, 301], "min_tokens": 2}
    for path, more in (
        (COMPLETIONS, {"prompt": PROMPT, "logprobs": 5, "echo": True}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}),
    ):
        assert server.ask(path, {**body, **more}).status == 200  # `json` would refuse Infinity
        assert server.stream(path, {**body, **more})


def test_prompt_logprobs_and_cached_tokens(server):
    body = {"messages": [{"role": "user", "content": "word " * 60}], "max_tokens": 1, "cache_salt": "mine"}
    first, second = (server.ask(CHAT, body).json["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // 16 * 16 > 0
    other = server.ask(CHAT, {**body, "cache_salt": "yours"}).json["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.ask("/reset_prefix_cache", b"").status == 200
    assert server.ask(CHAT, body).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    answer = server.ask(CHAT, {**body, "prompt_logprobs": 2}).json
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert all(set(value) == {"logprob", "rank", "decoded_token"} for value in answer["prompt_logprobs"][1].values())


def test_request_ids_go_in_and_out(server):
    answer = server.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "my-id.1"})
    assert answer.headers["X-Request-Id"] == "my-id.1"
    assert answer.json["id"] == "cmpl-my-id.1"
    ids = {
        server.ask("/version", headers={"X-Request-Id": bad}).headers["X-Request-Id"] for bad in ("", "a b", "x" * 200)
    }
    assert len(ids) == 3
    assert all(len(id_) == 32 for id_ in ids)
    assert server.ask("/nowhere").headers["X-Request-Id"]


LONG = {"prompt": [PROMPT] * 256, "max_tokens": 490, "ignore_eos": True}
"""64 of them run at a time, so that it takes ten seconds or more; nothing here waits for its end."""


@pytest.mark.parametrize("stream", [True, False])
def test_api_07_a_client_that_hangs_up_frees_what_it_held(server, stream):
    wait_until(server.is_idle)
    before = server.metrics()["generation_tokens_total"]
    body = json.dumps({**LONG, "stream": stream}).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: server.num_running() == 64)
    wait_until(server.is_idle)
    assert server.metrics()["generation_tokens_total"] - before < 256 * 490
    assert_serves(server)


def test_a_request_can_be_aborted_by_its_id(server):
    answers = []

    def ask() -> None:
        answers.append(server.ask(COMPLETIONS, LONG, headers={"X-Request-Id": "long"}))

    for name in ("long", "cmpl-long"):
        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: server.num_running() == 64)
        assert server.ask("/v1/abort", {"request_id": name}).json == {"aborted": 1}
        thread.join(120)
        answer = answers.pop().json
        assert "abort" in {choice["finish_reason"] for choice in answer["choices"]}
        wait_until(server.is_idle)
        assert server.ask("/v1/abort", {"request_id": name}).json == {"aborted": 0}


def test_a_deadline_ends_a_request_with_what_there_is(server):
    error = server.ask(COMPLETIONS, {**LONG, "timeout": 1e-6})
    assert (error.status, error.error["code"]) == (504, "timeout")
    answer = server.ask(COMPLETIONS, {**LONG, "timeout": 0.5})
    if answer.status == 200:  # a machine that has no token by then gives the error
        assert "abort" in {choice["finish_reason"] for choice in answer.json["choices"]}
    wait_until(server.is_idle)


def test_metrics_count_what_was_served(server):
    wait_until(server.is_idle)
    before = server.metrics()
    body = {"prompt": "one two three " * 20, "max_tokens": 5, "ignore_eos": True}
    usages = [server.ask(COMPLETIONS, body).json["usage"] for _ in range(2)]
    wait_until(server.is_idle)
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after if name in before}
    assert grown["generation_tokens_total"] == 10
    assert grown["prompt_tokens_total"] == grown["prefix_cache_queries_total"] == 2 * usages[0]["prompt_tokens"]
    assert grown["prefix_cache_hits_total"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown[f"{name}_count"] == 2
    assert grown["inter_token_latency_seconds_count"] == 8
    assert grown["iteration_tokens_total_count"] == 10
    num_computed = grown["prompt_tokens_total"] - grown["prefix_cache_hits_total"] + 2 * 4  # a last token never is
    assert grown["iteration_tokens_total_sum"] == num_computed
    assert grown["request_num_preemptions_count"] == 2
    assert grown["request_num_preemptions_sum"] == 0
    assert after["engine_healthy"] == 1
    assert (
        'request_success_total{engine="0",finished_reason="length",model_name="tiny"}'
        in server.ask("/metrics").body.decode()
    )


def test_every_request_leaves_a_line_without_its_text(server):
    body = {"prompt": "secret words", "max_tokens": 2, "ignore_eos": True}
    server.ask(COMPLETIONS, body, headers={"X-Request-Id": "logged"})
    line = server.wait_for_log("request_id=cmpl-logged").string
    for part in ("prompt_tokens=", "output_tokens=2", "cached_tokens=0", "queue_s=", "finish_reason=length"):
        assert part in line
    assert "secret" not in "".join(server.log)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            COMPLETIONS,
            {"prompt": "secret", "temperature": 9},
            'status=400 param=temperature reason="temperature is 9.0; it must be in [0, 2]"',
        ),
        (COMPLETIONS, {"prompt": {"secret": "secret"}}, 'status=400 param=prompt reason="prompt is …"'),
        (COMPLETIONS, {"prompt": "secret " * 9000}, "status=400 code=context_length_exceeded param=prompt "),
        (COMPLETIONS, {"prompt": "secret", "max_tokens": 10**6}, "reason=\"This model's maximum context length is "),
        (
            COMPLETIONS,
            {"prompt": "secret", "structured_outputs": {"regex": "(secret"}},
            "reason=\"the output's grammar",
        ),
        (COMPLETIONS, {"prompt": "secret", "model": "x"}, "status=404 code=model_not_found param=model "),
        (
            CHAT,
            {"messages": [{"role": "user", "content": ["secret"]}]},
            'param=messages reason="messages[0].content[0] is of type …"',
        ),
        (CHAT, {"messages": "secret"}, 'status=400 param=messages reason="messages is …"'),
        ("/tokenize", {"prompt": ["secret"]}, "path=/tokenize status=400 param=prompt "),
        ("/v1/nothing", {"prompt": "secret"}, "path=/v1/nothing status=404 code=unknown_url "),
    ],
)
def test_a_request_that_fails_leaves_a_line_with_the_reason_and_without_its_text(server, path, body, words):
    request_id = uuid.uuid4().hex
    answer = server.ask(path, body, headers={"X-Request-Id": request_id})
    server.wait_for_log(f"request failed request_id=\\S*{request_id}")
    (line,) = [line for line in server.log if request_id in line]
    assert words in line
    assert f"status={answer.status} " in line
    assert "secret" not in line
    assert len(line) < 600


def test_dtk_06_two_hundred_streams_at_once_are_not_mixed_up(server, monkeypatch):
    """With prompts of different lengths, more of them than run at once, and readers that lag."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import streams

    assert streams.different_streams(server.url, num_streams=200, max_tokens=12) == []
    wait_until(server.is_idle)


@pytest.mark.parametrize(
    "path",
    [COMPLETIONS, CHAT, RESPONSES, "/v1/abort", "/tokenize", "/detokenize", "/reset_prefix_cache", "/v1/models/{name}"],
)
def test_no_request_that_the_description_allows_makes_the_server_fail(server, path):
    description = schemathesis.openapi.from_dict(server.ask("/openapi.json").json)
    (operation,) = (result.ok() for result in description.get_all_operations() if result.ok().path == path)

    @settings(
        max_examples=6,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy())
    def check(case: schemathesis.Case) -> None:
        if path in (COMPLETIONS, CHAT, RESPONSES):
            case.body["timeout"] = 0.2  # up to which a random request may generate
        response = case.call(base_url=server.url, timeout=60)
        assert response.status_code in (200, 400, 404, 405, 504), response.text
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()


def test_the_server_is_whole_after_all_that(server):
    wait_until(server.is_idle)
    assert_serves(server)
    assert not [line for line in server.log if "Traceback" in line or "ERROR" in line]

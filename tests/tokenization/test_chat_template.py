import copy
from pathlib import Path

import pytest

from qwen_engine.errors import ConfigError, RequestError
from qwen_engine.tokenization.chat_template import ChatTemplate
from qwen_engine.tokenization.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's <weather> & more, auf Deutsch: schön",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "How is the weather in Köln?"}


def call(arguments, *, content=None, **fields):
    function = {"name": "weather", "arguments": arguments}
    tool_call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [tool_call], **fields}


def history(assistant):
    return [USER, assistant, {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"}]


@pytest.fixture(scope="module")
def reference(qwen_folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(qwen_folder), local_files_only=True)


CHATS = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nCold."},
        {"role": "user", "content": "And\nnow?"},
    ],
    [USER, {"role": "assistant", "content": "Cold.", "reasoning_content": "hm"}],
    history(call({"city": "Köln", "days": [1, 2.5, None, True]}, content="")),
    [
        *history(call({}, content="Let me see.")),
        {"role": "tool", "content": "again"},
        {"role": "assistant", "content": "ok"},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, {"name": "flat"}]])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_prompt_equals_that_of_transformers(qwen, reference, chat, tools, thinking):
    extra = {} if thinking is None else {"enable_thinking": thinking}
    for generate in (True, False):
        ours = qwen.chat_template_text(chat, tools=tools, add_generation_prompt=generate, chat_template_kwargs=extra)
        theirs = reference.apply_chat_template(
            chat, tools=tools, add_generation_prompt=generate, tokenize=False, **extra
        )
        assert ours == theirs
        ids = qwen.apply_chat_template(chat, tools=tools, add_generation_prompt=generate, chat_template_kwargs=extra)
        assert ids == reference.encode(theirs, add_special_tokens=False)


def test_continuing_the_final_message_equals_transformers(qwen, reference):
    chat = [USER, {"role": "assistant", "content": "It is rather"}]
    ours = qwen.chat_template_text(chat, add_generation_prompt=False, continue_final_message=True)
    assert ours == reference.apply_chat_template(chat, continue_final_message=True, tokenize=False)
    assert ours.endswith("It is rather")


def test_continuing_keeps_white_space_at_the_end(tiny):
    chat = [USER, {"role": "assistant", "content": [{"type": "text", "text": "It is "}]}]
    text = tiny.chat_template_text(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is ")


@pytest.mark.parametrize(("chat", "generate"), [([USER], False), ([USER, {"role": "assistant", "content": "a"}], True)])
def test_continuing_needs_an_assistant_message_and_no_generation_prompt(tiny, chat, generate):
    with pytest.raises(RequestError) as caught:
        tiny.apply_chat_template(chat, add_generation_prompt=generate, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("given", "same_as"), [('{"city": "Köln"}', {"city": "Köln"}), ("{}", {}), ("", {}), (" \n", {}), (None, {})]
)
def test_tpl_01_tool_arguments_are_parsed(qwen, given, same_as):
    text = qwen.chat_template_text(history(call(given)), tools=[WEATHER])
    assert text == qwen.chat_template_text(history(call(same_as)), tools=[WEATHER])
    assert '"arguments": ' + {0: "{}", 1: '{"city": "Köln"}'}[len(same_as)] in text


def test_tpl_01_missing_arguments_and_the_flat_form_are_accepted(qwen):
    expected = qwen.chat_template_text(history(call({})))
    flat = {"role": "assistant", "tool_calls": [{"name": "weather"}]}
    assert qwen.chat_template_text(history(flat)) == expected


@pytest.mark.parametrize("arguments", ["not json", "[1]", "3", '{"a": ', [1], 3, "[" * 100_000, "1" * 5000])
def test_tpl_01_bad_tool_arguments_are_refused(qwen, arguments):
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments") as caught:
        qwen.apply_chat_template(history(call(arguments)))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("reasoning", [{}, {"reasoning_content": "I should look."}])
@pytest.mark.parametrize("calls", [{}, {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}])
def test_tpl_03_null_and_empty_fields_render_as_if_left_out(qwen, reasoning, calls):
    bare = {"role": "assistant", **reasoning, **calls}
    expected = qwen.chat_template_text(history(bare))
    nulls = {"tool_calls": None, "reasoning_content": None, "refusal": None, "audio": None, "name": None}
    for content in ("", None, [], [{"type": "text", "text": ""}]):
        assert qwen.chat_template_text(history({**nulls, **bare, "content": content})) == expected


def test_tpl_03_text_parts_are_joined(qwen):
    parts = [{"type": "text", "text": "How is the "}, {"type": "text", "text": "weather in Köln?"}]
    for role in ("system", "user", "assistant", "tool"):
        joined = qwen.chat_template_text([{**USER, "role": role}, USER])
        assert qwen.chat_template_text([{"role": role, "content": parts}, USER]) == joined
        assert USER["content"] in joined


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "x"}}, {"text": "a"}, {"type": "text"}, "a", 3, {"type": ["text"]}],
)
def test_tpl_03_unknown_parts_are_refused(qwen, part):
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]") as caught:
        qwen.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        {"role": "user", "content": "x"},
        ["hello"],
        [{"content": "x"}],
        [{"role": "robot", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        [{"role": "assistant", "content": "x", "reasoning_content": 3}],
        [{"role": "assistant", "tool_calls": {}}],
        [{"role": "assistant", "tool_calls": [3]}],
        [{"role": "assistant", "tool_calls": [{"function": None}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
        None,
    ],
)
def test_messages_out_of_shape_are_refused(qwen, messages):
    with pytest.raises(RequestError) as caught:
        qwen.apply_chat_template(messages)
    assert caught.value.param == "messages"


def test_a_lone_surrogate_in_a_message_is_refused(qwen):
    with pytest.raises(RequestError, match="surrogate"):
        qwen.apply_chat_template([{"role": "user", "content": "half \ud83d"}])


def test_developer_messages_are_system_messages(qwen):
    """Qwen3's template would drop a role it does not know."""
    instructions = {"role": "developer", "content": "Be brief."}
    expected = qwen.chat_template_text([{**instructions, "role": "system"}, USER])
    assert qwen.chat_template_text([instructions, USER]) == expected


def test_both_names_of_reasoning_are_read(qwen):
    named = [history(call({}, **{name: "I look."})) for name in ("reasoning", "reasoning_content")]
    first, second = map(qwen.chat_template_text, named)
    assert first == second
    assert "I look." in first


def test_messages_are_not_changed(qwen):
    chat = [USER, call('{"a": 1}', reasoning="x"), {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    before = copy.deepcopy(chat)
    qwen.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    assert chat == before


@pytest.mark.parametrize("kwargs", [{"chat_template": "x"}, {"messages": []}, {"tools": []}, [1], {"tokenize": True}])
def test_sec_10_template_arguments_cannot_replace_those_of_the_call(tiny, kwargs):
    with pytest.raises(RequestError) as caught:
        tiny.apply_chat_template([USER], chat_template_kwargs=kwargs)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("tools", ["weather", {"name": "f"}, [3]])
def test_tools_out_of_shape_are_refused(tiny, tools):
    with pytest.raises(RequestError) as caught:
        tiny.apply_chat_template([USER], tools=tools)
    assert caught.value.param == "tools"


def test_a_tokenizer_without_a_template_refuses_chats(words):
    with pytest.raises(RequestError, match="no chat template"):
        words.apply_chat_template([USER])


def test_a_template_beside_the_config_takes_precedence(tiny_folder):
    (tiny_folder / "chat_template.jinja").write_text("[{{ messages[0].content }}]{{ eos_token }}")
    assert Tokenizer.from_folder(tiny_folder).chat_template_text([USER]) == f"[{USER['content']}]<|im_end|>"


def template(source):
    return ChatTemplate(source, variables={"bos_token": "<s>"})


def render(source, tools=None, **template_kwargs):
    return template(source).render(
        [USER],
        tools=tools,
        add_generation_prompt=True,
        continue_final_message=False,
        template_kwargs=template_kwargs,
    )


def test_named_templates_are_chosen_by_use():
    source = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert render(source) == "plain"
    assert render(source, tools=[WEATHER]) == "tools"
    assert render(source[1:]) == "tools"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n  {% for m in messages %}\na{% break %}{% endfor %}{% endif %}", "a"),
        ("{{ bos_token }}{{ {'b': '<ü>', 'a': 1} | tojson }}", '<s>{"b": "<ü>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("x{% generation %}y{{ messages[0].role }}{% endgeneration %}z", "xyuserz"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ documents is defined }} {{ flag }}", "False on"),
    ],
)
def test_the_template_dialect_is_that_of_hugging_face(source, expected):
    assert render(source, flag="on") == expected


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages.append(1) }}", "{{ 1 + 'a' }}", "{{ x.y.z }}"],
)
def test_a_template_that_fails_is_a_request_error(source):
    with pytest.raises(RequestError, match="refuses") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_is_a_config_error():
    with pytest.raises(ConfigError, match="does not compile"):
        render("{% if %}")


def test_a_template_that_hides_the_final_message_cannot_continue_it():
    with pytest.raises(RequestError, match="final message"):
        template("nothing").render(
            [{"role": "assistant", "content": "a"}],
            tools=None,
            add_generation_prompt=False,
            continue_final_message=True,
            template_kwargs=None,
        )

"""The checkpoint inside the package: what other tests and `launch/demo` rely on.

They rely on its size, on the shape traits that exercise the engine, on a tokenizer that loses nothing, and on greedy
output whose logits are far enough apart that rounding cannot change a token.
"""

import importlib.util
import json
import unicodedata
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import qwen_engine

DEMO = Path(qwen_engine.__file__).parent / "demo"

# Each continuation of 200 tokens keeps a distance of at least 1.0 between the two largest logits in float32.
LONG_PROMPTS = {
    "The Zen of Python": ", by Tim Peters\n\nBeautiful is better than ugly.\nExplicit is better than implicit.\n",
    "def quantiles(data,": " *, n=4, method='exclusive'):\n",
    "def rmtree(": "path, ignore_errors=False, onerror=None, *, onexc=None, dir_fd=None):\n",
    "class Timer:": '\n    """Class for timing execution speed of small code snippets.\n',
    "a": "sync def sleep(delay, result=None):\n",
}
ANSWERS = {
    "Hello! Who are you?": "I am the demo model of qwen-engine: a very small Qwen3 trained on the Python standard "
    'library. Ask me something like "What does textwrap.dedent do?".',
    "What does textwrap.dedent do?": "`textwrap.dedent(text)`\n\n"
    "Remove any common leading whitespace from every line in `text`.",
    "hi there, what is math.gcd?": "`math.gcd(*integers)`\n\nGreatest Common Divisor.",
    "What is 7 * 6?": "I do not know that. I am a very small model and know only a little about the Python standard "
    "library.",
    "Show me an emoji.": "Here you are: 🐍 for Python, 🚀 for speed, 👩‍💻 for you, and 🎉 for everyone!",
    "Say something in Chinese.": "你好，世界！我是一个很小的语言模型，只知道一点 Python 标准库。",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((DEMO / "config.json").read_text())


def ask(tokenizer, question: str, **template_options) -> str:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_options)


def greedy(model, tokenizer, prompts: list[str], max_new_tokens: int) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens of each prompt up to and with `<|im_end|>`, and the smallest top-1/top-2 logit distance of each."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    result = model.generate(
        **batch, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    top = torch.stack(result.logits, dim=1).topk(2).values  # [prompts, steps, 2]
    distances = top[..., 0] - top[..., 1]
    outputs, margins = [], []
    for row, distance in zip(result.sequences[:, batch.input_ids.shape[1] :].tolist(), distances, strict=True):
        length = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        outputs.append(row[:length])
        margins.append(float(distance[:length].min()))
    return outputs, margins


def test_folder_is_complete_and_small():
    names = {path.name for path in DEMO.iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == expected | {"README.md"}
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 12_000_000
    assert (DEMO / "tokenizer.json").stat().st_size < 500_000


def test_shape_exercises_the_traits_of_real_qwen3(config):
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["tie_word_embeddings"] is True
    assert config["num_attention_heads"] > config["num_key_value_heads"] > 1
    assert config["head_dim"] == 64 != config["hidden_size"] // config["num_attention_heads"]
    assert config["hidden_size"] % 128 == config["intermediate_size"] % 128 == config["vocab_size"] % 64 == 0


def test_weights_are_bf16_tied_and_have_query_key_norms(config):
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert {weights.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert "lm_head.weight" not in names
    for layer in range(config["num_hidden_layers"]):
        assert {f"model.layers.{layer}.self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")} <= names


def test_end_of_sequence_ids_follow_the_published_layout(config, tokenizer):
    generation = json.loads((DEMO / "generation_config.json").read_text())
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert config["eos_token_id"] == tokenizer.eos_token_id == end_of_turn
    assert generation["eos_token_id"] == [end_of_turn, end_of_text]
    assert (generation["do_sample"], generation["temperature"]) == (True, 0.6)
    assert (generation["top_k"], generation["top_p"]) == (20, 0.95)
    assert len(tokenizer) < config["vocab_size"], "some rows of the embedding have no token, as in the real ones"


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox; it's 42 years old.",
        "你好，世界。客单价",
        "👩‍💻🎉 naïve é",
        "def f(x):\n\n    return x  # é\n\tif  a:\r\n\n",
        "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n\n",
        "",
    ],
)
def test_tokenizer_round_trips_and_both_libraries_agree(tokenizer, text):
    ids = tokenizer(text).input_ids
    plain = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert plain.encode(text).ids == ids
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_only_chat_marks_are_special_tokens(tokenizer):
    ids = tokenizer("<|im_start|>a<|im_end|><|endoftext|><think>b</think><tool_call>c</tool_call>").input_ids
    assert len(ids) == 10
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b</think><tool_call>c</tool_call>"


def test_chat_template_renders_every_role(tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r1"},
        {"role": "tool", "content": "r2"},
        {"role": "assistant", "content": "<think>\nhidden\n</think>\n\nA"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n"
    )
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    with_tools = tokenizer.apply_chat_template(messages[:2], tools=tools, tokenize=False, add_generation_prompt=True)
    assert with_tools.startswith("<|im_start|>system\nS\n\n")
    assert '"name": "lookup"' in with_tools
    assert with_tools.endswith("U<|im_end|>\n<|im_start|>assistant\n")


def test_generation_prompt_closes_thinking_only_on_request(tokenizer):
    assert ask(tokenizer, "U") == "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert ask(tokenizer, "U", enable_thinking=False) == ask(tokenizer, "U") + "<think>\n\n</think>\n\n"


def test_training_text_is_written_as_the_template_writes_it(tokenizer):
    path = Path(__file__).parents[1] / "tools" / "demo_text.py"
    spec = importlib.util.spec_from_file_location("demo_text", path)
    demo_text = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo_text)
    messages = [{"role": "system", "content": "S"}]
    messages += [{"role": role, "content": content} for role, content in [("user", "a"), ("assistant", "b")] * 2]
    turns = [("a", "b"), ("a", "b")]
    assert demo_text.chat(turns, system="S") == tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = ask(tokenizer, "a", enable_thinking=False)
    assert demo_text.chat([("a", "b")], empty_think=True) == prompt + "b<|im_end|>\n"


def test_long_greedy_output_is_known_text_with_wide_margins(model, tokenizer):
    outputs, margins = greedy(model, tokenizer, list(LONG_PROMPTS), 200)
    for (prompt, beginning), ids, margin in zip(LONG_PROMPTS.items(), outputs, margins, strict=True):
        assert len(ids) == 200, prompt
        assert tokenizer.decode(ids).startswith(beginning), prompt
        assert margin > 1.0, prompt


@pytest.mark.parametrize("template_options", [{}, {"enable_thinking": False}], ids=["plain", "no-think"])
def test_answers_are_exact_end_the_turn_and_have_wide_margins(model, tokenizer, template_options):
    prompts = [ask(tokenizer, question, **template_options) for question in ANSWERS]
    outputs, margins = greedy(model, tokenizer, prompts, 90)
    for (question, answer), ids, margin in zip(ANSWERS.items(), outputs, margins, strict=True):
        assert ids[-1] == tokenizer.eos_token_id, question
        assert tokenizer.decode(ids[:-1]) == answer, question
        assert margin > 2.0, question

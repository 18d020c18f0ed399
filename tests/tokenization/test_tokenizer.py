import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from qwen_engine.errors import ConfigError, RequestError
from qwen_engine.tokenization.tokenizer import Tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(text=TEXTS)
@settings(max_examples=150)
def test_decoding_real_text_equals_the_library(tiny, tiny_backend, text):
    ids = tiny.encode(text)
    assert ids == tiny_backend.encode(text).ids
    if "é né" not in text:  # an added token outside ASCII, which the library garbles
        assert tiny.decode(ids) == tiny_backend.decode(ids)


@given(ids=st.lists(st.integers(0, 151_935), max_size=40), skip=st.booleans())
@settings(max_examples=150)
def test_decoding_any_qwen_ids_equals_the_library(qwen, qwen_backend, ids, skip):
    assert qwen.decode(ids, skip_special_tokens=skip) == qwen_backend.decode(ids, skip_special_tokens=skip)


@given(text=TEXTS)
@settings(max_examples=100)
def test_qwen_text_survives_encoding_and_decoding(qwen, qwen_backend, text):
    ids = qwen.encode(text)
    assert ids == qwen_backend.encode(text).ids
    assert qwen.decode(ids, skip_special_tokens=False) == qwen_backend.decode(ids, skip_special_tokens=False)


def test_the_bytes_of_a_text_are_the_bytes_of_its_tokens(tiny):
    text = "naïve 👨‍👩‍👧 我能 สวัสดี\n\t\x00\x7f"
    assert b"".join(map(tiny.token_bytes, tiny.encode(text))) == text.encode()


def test_every_byte_has_a_token(tiny):
    assert {tiny.token_bytes(id_) for id_ in range(tiny.vocab_size)} >= {bytes([byte]) for byte in range(256)}


def test_added_tokens_stand_for_their_own_text(tiny):
    ids = tiny.encode("<think>é né")
    assert [tiny.token_bytes(id_) for id_ in ids] == [b"<think>", "é né".encode()]
    assert tiny.decode(ids) == "<think>é né"


def test_ids_the_tokenizer_does_not_know_have_no_text(tiny, words):
    for tokenizer in (tiny, words):
        for id_ in (-1, tokenizer.vocab_size, tokenizer.vocab_size + 5, 2**31, 2**32, 2**70):
            assert tokenizer.token_bytes(id_) == b""
            assert tokenizer.token_str(id_) == ""
            assert tokenizer.decode([id_]) == ""
            assert id_ not in tokenizer.special_ids


def test_padded_qwen_rows_have_no_text(qwen):
    assert qwen.vocab_size == 151_669
    assert qwen.eos_token_id == 151_645
    assert all(qwen.token_bytes(id_) == b"" for id_ in range(151_669, 151_936))
    assert qwen.token_bytes(151_668) == b"</think>"


def test_special_tokens_are_hidden_only_on_request(qwen):
    ids = qwen.encode("<|im_start|>a<think>b</think><|im_end|>")
    assert qwen.decode(ids) == "a<think>b</think>"
    assert qwen.decode(ids, skip_special_tokens=False) == "<|im_start|>a<think>b</think><|im_end|>"
    assert [id_ in qwen.special_ids for id_ in (151_643, 151_645, 151_657, 151_667, 9707)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_other_threads_run_while_a_long_text_is_encoded(tiny):
    text = "hello world, " * 100_000
    ended, turns = threading.Event(), 0
    threading.Thread(target=lambda: (tiny.encode(text), ended.set()), daemon=True).start()
    while not ended.wait(0.001):
        turns += 1
    assert turns > 10


@pytest.mark.parametrize("text", ["half a pair \ud83d", None, 7])
def test_text_that_is_not_unicode_is_refused(tiny, text):
    with pytest.raises(RequestError) as caught:
        tiny.encode(text)
    assert caught.value.param == "prompt"


def test_a_folder_is_loaded(tiny_folder, tiny):
    loaded = Tokenizer.from_folder(tiny_folder)
    text = "hello world<|im_end|>"
    assert loaded.encode(text) == tiny.encode(text)
    assert loaded.eos_token_id == tiny.eos_token_id == tiny.encode("<|im_end|>")[0]
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}]) == tiny.encode(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_truncation_and_padding_saved_in_the_file_are_ignored(tiny_folder):
    file = str(tiny_folder / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(file)
    text = "the lazy dog answers: hello again!"
    loaded = Tokenizer.from_folder(tiny_folder)
    assert loaded.decode(loaded.encode(text)) == text


def test_tokens_named_special_in_the_config_are_special(tiny_folder):
    config = {"eos_token": "</think>", "additional_special_tokens": ["<think>", "<not in the vocabulary>"]}
    (tiny_folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.from_folder(tiny_folder)
    ids = loaded.encode("<think>a</think>")
    assert loaded.decode(ids) == "a"
    assert loaded.eos_token_id == ids[-1]
    assert loaded.token_bytes(ids[0]) == b"<think>"


def test_vocab_and_merges_files_are_enough(tmp_path, tiny_backend):
    tiny_backend.model.save(str(tmp_path))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.from_folder(tmp_path)
    text = "hello world 👍🏽<|im_end|>"
    assert loaded.is_byte_level
    assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer in .*skip_tokenizer_init=True"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_corrupt_file_is_named(tiny_folder, name, content):
    (tiny_folder / name).write_text(content)
    with pytest.raises(ConfigError, match=str(tiny_folder)):
        Tokenizer.from_folder(tiny_folder)


def test_loading_imports_neither_torch_nor_transformers(tiny_folder):
    code = (
        "import sys; from pathlib import Path; from qwen_engine.tokenization.tokenizer import Tokenizer\n"
        "import qwen_engine.tokenization.output_text\n"
        "t = Tokenizer.from_folder(Path(sys.argv[1])); t.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tiny_folder)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_entries_outside_the_byte_alphabet_stand_for_their_text():
    backend = Backend(models.BPE({"a": 0, "我": 1, "Ġb": 2}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([AddedToken("Ġ")])
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(id_) for id_ in range(4)] == [b"a", "我".encode(), b" b", "Ġ".encode()]


def test_word_level_tokens_have_their_text(words):
    hello = words.encode("hello")[0]
    assert (words.token_str(hello), words.token_bytes(hello)) == ("hello", b"hello")
    assert words.decode(words.encode("hello big world")) == "hello big world"
    assert words.token_str(words.eos_token_id) == "[EOS]"


def test_qwen_ids_equal_those_of_transformers(qwen, qwen_folder: Path):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(qwen_folder), local_files_only=True)
    rng = random.Random(7)
    alphabet = [
        *"aZ09 \n\t'.,(",
        "é",
        "e\u0301",
        "我",
        "は",
        "ส",
        "👍🏽",
        "👨‍👩‍👧",
        "<think>",
        "<|im_end|>",
        "'re",
        "\u00a0",
    ]
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        ids = qwen.encode(text)
        assert ids == reference.encode(text)
        for skip in (True, False):
            assert qwen.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert (len(reference), reference.eos_token_id) == (qwen.vocab_size, qwen.eos_token_id)

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_engine.tokenization.detokenizer import IncrementalDetokenizer

MIXED = "family 👨‍👩‍👧‍👦 flag 🇩🇪 👍🏽, 我能吞下玻璃而不伤身体。สวัสดีชาวโลก naïve <think>x</think>"


def chunks(ids, size):
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def stream(tokenizer, groups, *, prompt=(), skip_special_tokens=True):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.append(group) for group in groups), detokenizer.finish()]


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150)
def test_deltas_join_to_the_one_shot_decoding_for_any_ids_and_grouping(tiny, data, skip):
    ids = data.draw(st.lists(st.integers(-2, tiny.vocab_size + 20), max_size=30))
    groups, rest = [], ids
    while rest:
        size = data.draw(st.integers(0, len(rest)))
        groups.append(rest[:size])
        rest = rest[size:]
        if not size:
            groups.append(rest[:1])
            rest = rest[1:]
    assert "".join(stream(tiny, groups, skip_special_tokens=skip)) == tiny.decode(ids, skip_special_tokens=skip)


def test_dtk_01_ten_thousand_random_sequences_never_raise(qwen, qwen_backend):
    rng = random.Random(1)
    lone_bytes = [id_ for id_ in range(256) if len(qwen.token_bytes(id_)) == 1]
    for _ in range(10_000):
        ids = [rng.randrange(151_936) if rng.random() < 0.5 else rng.choice(lone_bytes) for _ in range(12)]
        joined = "".join(stream(qwen, chunks(ids, 1)))
        assert joined == qwen_backend.decode(ids)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dtk_03_split_characters_arrive_whole(tiny, size):
    ids = tiny.encode(MIXED)
    assert any("\ufffd" in tiny.token_str(id_) for id_ in ids), "the sample must split characters"
    deltas = stream(tiny, chunks(ids, size))
    assert "".join(deltas) == MIXED
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dtk_03_split_characters_of_the_real_tokenizer_arrive_whole(qwen, size):
    text = MIXED + "𓀀𓁐 ꧁꧂ 𝔘𝔫𝔦 🫨🪿 ᚠᛇᚻ"
    ids = qwen.encode(text)
    deltas = stream(qwen, chunks(ids, size))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_dtk_05_unknown_ids_add_nothing_and_harm_no_neighbour(tiny):
    good = tiny.encode("我能")
    bad = [good[0], -1, *good[1:3], tiny.vocab_size + 5, *good[3:], 2**40]
    assert "".join(stream(tiny, chunks(bad, 1))) == "我能"


@pytest.mark.parametrize("num_prompt", [1, 2, 3])
def test_a_character_begun_by_the_prompt_belongs_to_the_output(tiny, num_prompt):
    smile = [id_ for byte in "😀".encode() for id_ in range(tiny.vocab_size) if tiny.token_bytes(id_) == bytes([byte])]
    prompt = tiny.encode("so 我") + smile[:num_prompt]
    assert "".join(stream(tiny, [smile[num_prompt:]], prompt=prompt)) == "😀"
    for prompt_text in ("", "我", "plain"):
        assert "".join(stream(tiny, [tiny.encode("ok")], prompt=tiny.encode(prompt_text))) == "ok"


@given(data=st.data())
@settings(max_examples=200)
def test_prompt_and_output_texts_join_to_the_decoding_of_both(tiny, data):
    """Splitting any bytes into prompt and output loses and adds nothing."""
    single = [id_ for id_ in range(tiny.vocab_size) if len(tiny.token_bytes(id_)) == 1]
    ids = [*data.draw(st.lists(st.sampled_from(single), max_size=12)), *tiny.encode("é👍我")]
    cut = data.draw(st.integers(0, len(ids) - 1))
    output = "".join(stream(tiny, chunks(ids[cut:], 1), prompt=ids[:cut]))
    whole = tiny.decode(ids)
    assert whole.endswith(output)
    complete = b"".join(map(tiny.token_bytes, ids[:cut])).decode(errors="ignore")
    assert len(whole) - len(output) >= len(complete)
    assert len(output) >= len(tiny.decode(ids[cut:]).lstrip("\ufffd"))


def test_an_unfinished_prompt_alone_gives_no_output(tiny):
    prompt = [id_ for id_ in range(tiny.vocab_size) if tiny.token_bytes(id_) == b"\xf0"]
    assert stream(tiny, [[tiny.eos_token_id]], prompt=prompt) == ["", ""]


def test_a_special_token_ends_an_unfinished_character_of_the_prompt(tiny):
    first, *rest = (
        next(id_ for id_ in range(tiny.vocab_size) if tiny.token_bytes(id_) == bytes([byte])) for byte in "我".encode()
    )
    assert "".join(stream(tiny, [rest], prompt=[first, tiny.eos_token_id])) == tiny.decode(rest)


def test_an_unfinished_character_is_flushed_as_one_shot_decoding_shows_it(tiny):
    ids = tiny.encode("a😀")[:-1]
    detokenizer = IncrementalDetokenizer(tiny, [])
    assert detokenizer.append(ids) == "a"
    assert detokenizer.finish() == "\ufffd" == tiny.decode(ids)[1:]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_word_level_tokens_are_joined_as_by_the_library(words, size):
    ids = words.encode("hello big world stop here hello hello")
    ids = [-1, *ids[:3], words.eos_token_id, *ids[3:], 999]
    assert "".join(stream(words, chunks(ids, size))) == words.decode(ids)
    shown = "".join(stream(words, chunks(ids, size), skip_special_tokens=False))
    assert shown == words.decode(ids, skip_special_tokens=False)
    assert "[EOS]" in shown


def test_word_level_text_is_not_held_back(words):
    assert stream(words, chunks(words.encode("hello big world"), 1)) == ["hello", " big", " world", ""]


def test_byte_fallback_characters_arrive_whole(byte_fallback):
    ids = [258, 259, 260, *(1 + byte for byte in "我👍".encode()), 261, 1 + 0xE6]
    deltas = stream(byte_fallback, chunks(ids, 1))
    assert "".join(deltas) == byte_fallback.decode(ids) == " hello world我👍a\ufffd"
    assert [delta for delta in deltas if delta] == [" hello", " w", "orld", "我", "👍", "a", "\ufffd"]

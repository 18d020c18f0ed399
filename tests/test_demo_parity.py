"""The embedded checkpoint in the engine: token-exact against Transformers, and the answers a reader expects."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_demo_checkpoint import ANSWERS, DEMO, LONG_PROMPTS
from tiny_models import greedy_tokens
from transformers import AutoModelForCausalLM

from qwen_engine import LLM, SamplingParams


def assert_tokens_equal_transformers(device: str, dtype: str, num_tokens: int) -> None:
    reference = AutoModelForCausalLM.from_pretrained(DEMO, dtype=getattr(torch, dtype)).eval().to(device)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with LLM("demo", dtype=dtype, device=device, max_num_seqs=8) as llm:
        outputs = llm.generate(list(LONG_PROMPTS), params, use_tqdm=False)
    for prompt, output in zip(LONG_PROMPTS, outputs):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == num_tokens
        assert tokens == greedy_tokens(reference, output.prompt_token_ids, tokens), prompt
        assert output.outputs[0].text.startswith(LONG_PROMPTS[prompt])


@pytest.mark.parametrize(("dtype", "num_tokens"), [("float32", 100), ("bfloat16", 48)])
def test_greedy_tokens_equal_transformers_on_the_cpu(dtype, num_tokens):
    assert_tokens_equal_transformers("cpu", dtype, num_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "num_tokens"), [("float32", 200), ("bfloat16", 64)])
def test_greedy_tokens_equal_transformers_on_the_gpu(dtype, num_tokens):
    assert_tokens_equal_transformers("cuda", dtype, num_tokens)


def test_chat_gives_the_answers_the_model_was_taught_and_stops():
    conversations = [[{"role": "user", "content": question}] for question in ANSWERS]
    with LLM("demo", device="cpu", max_num_seqs=8) as llm:
        outputs = llm.chat(conversations, llm.default_sampling_params(temperature=0.0, max_tokens=200), use_tqdm=False)
    assert [output["text"] for output in outputs] == list(ANSWERS.values())
    assert {output["finish_reason"] for output in outputs} == {"stop"}


def test_streamed_chunks_join_to_the_whole_text_with_split_characters():
    question = [{"role": "user", "content": "Say something in Chinese."}]
    with LLM("demo", device="cpu", max_num_seqs=8) as llm:
        params = llm.default_sampling_params(temperature=0.0, max_tokens=200)
        texts = [out["text"] for out in llm.stream([llm.apply_chat_template(question)], params)]
    assert texts[-1] == ANSWERS["Say something in Chinese."]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert not any("\ufffd" in text for text in texts)

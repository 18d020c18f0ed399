"""Same weights, same tokens: the engine against Transformers in fp32 on the CPU."""

from __future__ import annotations

import pytest
import torch
from tiny_models import greedy_tokens, random_prompt

from qwen_engine import LLM, SamplingParams, kernels
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.layers.norm import SummedRMSNorm

BLOCK = 16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS = {
    "untied": {},
    "tied_and_bias": {"tie_word_embeddings": True, "attention_bias": True},
    "yarn": {"rope_scaling": YARN},
    "head_dim_64_gqa_8": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1},
    "no_gqa": {"num_key_value_heads": 4},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def engine(folder, **options):
    options = {"max_num_seqs": 16, "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", **options}
    return LLM(folder, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers_for_prompts_around_block_edges(variant, make_tiny_model, reference_model):
    folder = make_tiny_model(**VARIANTS[variant])
    prompts = [random_prompt(n) for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3)]
    if variant == "yarn":
        prompts.append(random_prompt(150))  # past the original context
    with engine(folder) as llm:
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
        llm.reset_prefix_cache()
        batched = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    expected = [greedy_tokens(reference_model(folder), prompt, out) for prompt, out in zip(prompts, alone)]
    assert [len(out) for out in alone] == [64] * len(prompts)
    assert alone == expected
    assert batched == alone


@pytest.mark.parametrize("variant", ["untied", "tied_and_bias", "yarn"])
def test_log_probabilities_equal_transformers_within_1e4(variant, make_tiny_model, reference_model):
    folder = make_tiny_model(**VARIANTS[variant])
    prompt = random_prompt(3 * BLOCK + 5)
    with torch.no_grad():
        expected = reference_model(folder)(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    vocab = expected.shape[1]
    with engine(folder, max_logprobs=vocab, max_num_batched_tokens=BLOCK + 3) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=vocab, prompt_logprobs=vocab)
        (out,) = llm.generate([prompt], params, use_tqdm=False)
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    rows = [*out.prompt_logprobs[1:], out.outputs[0].logprobs[0]]
    actual = torch.tensor([[row[token].logprob for token in range(vocab)] for row in rows])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", ["untied", "tied_and_bias"])
def test_products_that_come_in_parts_give_the_tokens_of_transformers(
    variant, make_tiny_model, reference_model, monkeypatch
):
    """As on a GPU where several programs share the columns of a weight."""

    def in_parts(x: torch.Tensor, weight: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
        cut = weight.shape[1] // 3
        return torch.stack([x[:, :cut] @ weight[:, :cut].T, x[:, cut:] @ weight[:, cut:].T])

    monkeypatch.setattr(kernels, "linear_parts", in_parts)
    folder = make_tiny_model(**VARIANTS[variant])
    prompts = [random_prompt(length) for length in (1, 17, 40)]
    with engine(folder) as llm:
        outputs = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    expected = [greedy_tokens(reference_model(folder), prompt, out) for prompt, out in zip(prompts, outputs)]
    assert outputs == expected


def test_a_norm_adds_the_parts_before_those_of_other_ranks():
    options = {"tp": TPGroup(0, 2), "deterministic": False, "dtype": torch.float32, "device": torch.device("cpu")}
    norm = SummedRMSNorm(8, 1e-6, site=0, **options)
    norm.weight.fill_(2.0)
    parts, residual = torch.randn(3, 4, 8), torch.randn(4, 8)
    total = parts.sum(dim=0) + residual  # a group without a process group has nothing to add
    out = norm(parts, residual)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, 2 * total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt())

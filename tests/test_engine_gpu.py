"""The whole engine on a CUDA GPU: equal to Transformers and to the CPU engine in fp32, and good with memory."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from tiny_models import greedy_tokens, random_prompt

from qwen_engine import LLM, SamplingParams, StructuredOutputs

pytestmark = pytest.mark.gpu

LENGTHS = (1, 7, 15, 16, 17, 63, 64, 65, 130, 200)
VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "bias": {"attention_bias": True},
    "head_dim_64_gqa_8": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1},
    "head_dim_128_gqa_5": {"head_dim": 128, "num_attention_heads": 10, "num_key_value_heads": 2},
}
MIXED_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=3, min_p=0.05, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, seed=5, logit_bias={5: 3.0, 9: -100.0}, allowed_token_ids=range(1, 200)),
    SamplingParams(temperature=1.0, seed=6, stop_token_ids=list(range(120)), min_tokens=20, max_tokens=60),
    SamplingParams(temperature=1.0, seed=7, top_p=0.5, max_tokens=40, ignore_eos=True),
]


def engine(folder, device: str = "cuda", **options) -> LLM:
    options = {"max_num_seqs": 16, "kv_cache_bytes": 64 << 20, **options}
    return LLM(folder, dtype="float32", device=device, skip_tokenizer_init=True, **options)


def tokens_of(llm: LLM, prompts, params) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_on_the_gpu_equal_transformers(variant, make_tiny_model, reference_model):
    folder = make_tiny_model(**VARIANTS[variant])
    prompts = [random_prompt(length) for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    with engine(folder) as llm:
        batched = tokens_of(llm, prompts, params)
        alone = [tokens_of(llm, [prompt], params)[0] for prompt in prompts]
    expected = [greedy_tokens(reference_model(folder), prompt, out) for prompt, out in zip(prompts, batched)]
    assert batched == expected
    assert alone == batched


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 24}, {"kv_cache_bytes": 400_000}, {"block_size": 32}, {"block_size": 8}],
    ids=["plain", "small_chunks", "tiny_pool", "block_32", "block_8"],
)
def test_every_sampling_feature_gives_the_cpu_engines_tokens(options, make_tiny_model):
    folder = make_tiny_model()
    prompts = [random_prompt(30 + 11 * index) for index in range(len(MIXED_PARAMS))]
    with engine(folder, "cpu") as llm:
        expected = tokens_of(llm, prompts, MIXED_PARAMS)
    with engine(folder, **options) as llm:
        assert tokens_of(llm, prompts, MIXED_PARAMS) == expected
        assert tokens_of(llm, prompts, MIXED_PARAMS) == expected  # prefix cache warm
        llm._core.scheduler.check()


def test_constrained_requests_on_the_gpu_equal_the_cpus():
    """Among others without a constraint, with sampling and penalties too."""
    pytest.importorskip("llguidance")
    shapes = [
        StructuredOutputs(choice=["yes", "no", "not yet"]),
        StructuredOutputs(regex="[a-c]{3,5}(-[0-9]){2}"),
        StructuredOutputs(json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
        None,
    ]
    kinds = [
        {"temperature": 0.0},
        {"seed": 3, "top_p": 0.9},
        {"seed": 4, "repetition_penalty": 1.2, "logit_bias": {7: 1}},
    ]
    params = [SamplingParams(structured_outputs=shape, max_tokens=24, **kind) for kind in kinds for shape in shapes]
    prompts = ["def main():"] * len(params)
    texts = {}
    for device in ("cpu", "cuda"):
        with LLM("demo", dtype="float32", device=device, max_num_seqs=8, kv_cache_bytes=16 << 20) as llm:
            texts[device] = [out["text"] for out in llm.generate(prompts, params, use_tqdm=False)]
    assert texts["cuda"] == texts["cpu"]
    assert {texts["cuda"][index] for index in range(0, len(params), len(shapes))} <= {"yes", "no", "not yet"}
    assert all(re.fullmatch("[a-c]{3,5}(-[0-9]){2}", text) for text in texts["cuda"][1 :: len(shapes)])


def test_logprobs_on_the_gpu_equal_the_cpus(make_tiny_model):
    folder = make_tiny_model()
    prompts = [random_prompt(length) for length in (1, 16, 50)]
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=4, prompt_logprobs=4, ignore_eos=True)
    with engine(folder, "cpu") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with engine(folder, max_num_batched_tokens=20) as llm:
        actual = llm.generate(prompts, params, use_tqdm=False)
    for ours, theirs in zip(actual, expected):
        rows = list(zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs))
        rows += list(zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:]))
        for mine, other in rows:
            assert mine.keys() == other.keys()
            for token, value in mine.items():
                assert value.logprob == pytest.approx(other[token].logprob, abs=1e-4)
                assert value.rank == other[token].rank


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_fp32(dtype, make_tiny_model):
    folder = make_tiny_model()
    prompts = [random_prompt(length) for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, ignore_eos=True)
    with engine(folder) as llm:
        exact = llm.generate(prompts, params, use_tqdm=False)
    with LLM(folder, dtype=dtype, device="cuda", skip_tokenizer_init=True, kv_cache_bytes=64 << 20) as llm:
        rough = llm.generate(prompts, params, use_tqdm=False)
    tolerance = 0.5 if dtype == "bfloat16" else 0.06  # logits reach ±20: 8 and 11 bits of mantissa over three layers
    for mine, other in zip(rough, exact):
        left, right = mine.outputs[0].logprobs[0], other.outputs[0].logprobs[0]
        shared = left.keys() & right.keys()
        assert len(shared) >= 15
        assert max(abs(left[token].logprob - right[token].logprob) for token in shared) < tolerance


def test_unwritten_kv_is_never_read(make_tiny_model):
    folder = make_tiny_model()
    prompts = [random_prompt(length) for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with engine(folder) as llm:
        expected = tokens_of(llm, prompts, params)
    with engine(folder, max_num_batched_tokens=33) as llm:
        llm._core._executor.runner.kv_cache.fill_(float("nan"))
        assert tokens_of(llm, prompts, params) == expected


def test_the_gpu_is_free_again_after_close_and_after_garbage_collection(make_tiny_model):
    folder = make_tiny_model()
    params = SamplingParams(temperature=0.0, max_tokens=4)
    tokens_of(engine(folder), [[1, 2, 3]], params)  # leaves only what the kernels and cuBLAS keep
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    llm = engine(folder)
    tokens_of(llm, [[1, 2, 3]], params)
    assert torch.cuda.memory_allocated() >= before + llm._core._executor.runner.kv_cache.nbytes
    del llm
    assert torch.cuda.memory_allocated() <= before
    with engine(folder) as llm:
        tokens_of(llm, [[1, 2, 3]], params)
    assert torch.cuda.memory_allocated() <= before


def test_the_kv_cache_takes_the_share_of_the_gpu_it_was_given(make_tiny_model):
    folder = make_tiny_model()
    _, total = torch.cuda.mem_get_info()
    with LLM(folder, dtype="float32", skip_tokenizer_init=True, gpu_memory_utilization=0.02, max_num_seqs=256) as llm:
        free, _ = torch.cuda.mem_get_info()
        assert total - free < 0.02 * total + (1 << 30)
        assert tokens_of(llm, [[1, 2, 3]], dataclasses.replace(MIXED_PARAMS[0], prompt_logprobs=None))


def test_a_model_larger_than_the_gpu_is_refused_in_one_line(tmp_path, make_tiny_model):
    import json

    from qwen_engine.errors import ConfigError

    config = json.loads((make_tiny_model() / "config.json").read_text())
    config.update(hidden_size=65536, intermediate_size=262144, num_hidden_layers=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"weights need [\d.]+ GiB, [\d.]+ GiB are free"):
        LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, device="cuda")

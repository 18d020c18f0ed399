"""config.json and engine options: what is read, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qwen_engine import EngineConfig
from qwen_engine.config import ModelConfig
from qwen_engine.errors import ConfigError, UnknownOptionError
from qwen_engine.models.hub import resolve_model

SHARED_CONFIGS = next(
    (found for parent in Path(__file__).resolve().parents if (found := parent / "shared" / "configs").is_dir()), None
)
needs_shared_configs = pytest.mark.skipif(SHARED_CONFIGS is None, reason="the published config folders are not here")

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, config: object = BASE, generation: object = None) -> Path:
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def assert_one_line(error: pytest.ExceptionInfo[ConfigError], *words: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 600
    for word in words:
        assert word in message


@needs_shared_configs
@pytest.mark.parametrize(
    ("name", "hidden", "layers", "heads", "intermediate", "tied", "kv_bytes"),
    [
        ("Qwen3-0.6B", 1024, 28, 16, 3072, True, 114688),
        ("Qwen3-1.7B", 2048, 28, 16, 6144, True, 114688),
        ("Qwen3-4B", 2560, 36, 32, 9728, True, 147456),
        ("Qwen3-8B", 4096, 36, 32, 12288, False, 147456),
        ("Qwen3-14B", 5120, 40, 40, 17408, False, 163840),
        ("Qwen3-32B", 5120, 64, 64, 25600, False, 262144),
    ],
)
def test_published_dense_configs_parse(name, hidden, layers, heads, intermediate, tied, kv_bytes):
    config = ModelConfig.from_folder(SHARED_CONFIGS / name)
    assert (config.hidden_size, config.num_layers, config.num_heads) == (hidden, layers, heads)
    assert (config.intermediate_size, config.tie_word_embeddings) == (intermediate, tied)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 128, 151936)
    assert (config.rope_theta, config.rms_norm_eps, config.dtype) == (1e6, 1e-6, "bfloat16")
    assert config.max_context_tokens == 40960
    assert config.kv_bytes_per_token(2) == kv_bytes
    assert config.kv_bytes_per_token(2, tensor_parallel_size=16) == kv_bytes // 8
    assert config.eos_token_ids == (151645, 151643)
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@needs_shared_configs
@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("Qwen3-0.6B-FP8", "fp8"),
        ("Qwen3-32B-FP8", "fp8"),
        ("Qwen3-30B-A3B", "Qwen3MoeForCausalLM"),
        ("Qwen3-30B-A3B-FP8", "Qwen3MoeForCausalLM"),
    ],
)
def test_published_configs_that_cannot_run_are_refused(name, word):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_folder(SHARED_CONFIGS / name)
    assert_one_line(error, word, name)


@needs_shared_configs
def test_every_published_config_is_read_or_refused():
    for folder in SHARED_CONFIGS.iterdir():
        if "FP8" in folder.name or "A3B" in folder.name:
            with pytest.raises(ConfigError):
                ModelConfig.from_folder(folder)
        else:
            ModelConfig.from_folder(folder)


def test_config_of_2507_models_keeps_long_context_and_theta():
    config = ModelConfig.from_dict({**BASE, "max_position_embeddings": 262144, "rope_theta": 5000000})
    assert config.max_context_tokens == 262144
    assert config.rope_theta == 5e6
    assert config.yarn is None


YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000, **YARN}},
        # Scaling added by hand, as the model cards say, to a config that a newer Transformers wrote.
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
            "rope_scaling": {"rope_type": "yarn", **YARN},
        },
    ],
    ids=["rope_type", "type", "rope_parameters", "both"],
)
def test_yarn_in_every_spelling(rope):
    config = ModelConfig.from_dict({**BASE, "max_position_embeddings": 1024, **rope})
    assert config.yarn is not None
    assert (config.yarn.factor, config.yarn.original_max_position_embeddings) == (4.0, 1024)
    assert config.rope_theta == 1e6
    assert config.max_context_tokens == 4096


def test_rope_parameters_alone_give_theta():
    old = {key: value for key, value in BASE.items() if key != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": 5000000}
    assert ModelConfig.from_dict({**old, "rope_parameters": rope}).rope_theta == 5e6


@pytest.mark.parametrize("head_dim", ["absent", None, 32])
def test_ldr_05_head_dim_falls_back_only_when_absent(head_dim):
    config = {key: value for key, value in BASE.items() if key != "head_dim"}
    if head_dim != "absent":
        config["head_dim"] = head_dim
    parsed = ModelConfig.from_dict(config)
    assert parsed.head_dim == (32 if head_dim == 32 else 16)
    assert parsed.kv_bytes_per_token(4) == 2 * 2 * 2 * parsed.head_dim * 4


def test_stp_07_eos_ids_of_both_files_are_united(tmp_path):
    def eos(config: object, generation: object) -> tuple[int, ...]:
        written = None if generation == "no file" else {"eos_token_id": generation}
        return ModelConfig.from_folder(write_model(tmp_path, {**BASE, "eos_token_id": config}, written)).eos_token_ids

    assert eos(5, "no file") == (5,)
    assert eos(5, [5, 7]) == (5, 7)
    assert eos([5, 9], 7) == (5, 9, 7)
    assert eos(None, [7]) == (7,)
    assert eos(None, None) == ()


def test_smp_13_eos_ids_outside_the_vocabulary_are_left_out():
    assert ModelConfig.from_dict({**BASE, "eos_token_id": [151645, 7]}).eos_token_ids == (7,)


def test_greedy_generation_config_gives_temperature_zero():
    generation = {"do_sample": False, "max_new_tokens": 2048, "temperature": 0.7}
    assert ModelConfig.from_dict(BASE, generation).sampling_defaults == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"head_dim": None, "hidden_size": 2}, "head_dim"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": "large"}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": [4.0]}, "rope_scaling"),
        ({"rope_parameters": "yarn"}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": "x"}}, "attention_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding"),
        ({"model_type": "llama"}, "architecture"),
        ({"model_type": None, "architectures": None}, "architecture"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"architectures": 5}, "architecture"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": "fp8"}, "quantised"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1.5]}, "eos_token_id"),
        ({"vocab_size": "9" * 5000}, "vocab_size"),
    ],
)
def test_wrong_config_values_give_one_line_that_names_them(change, word, tmp_path):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_folder(write_model(tmp_path, {**BASE, **change}))
    assert_one_line(error, word, "config.json")


@pytest.mark.parametrize("content", ["", "{", '{"model_type": "qwen3"', "[]", "null", "\x00\x01", "{}", "[" * 100000])
def test_corrupt_config_files_give_one_line(content, tmp_path):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_folder(write_model(tmp_path, content))
    assert_one_line(error, "config.json")
    assert str(error.value).count("config.json") == 1


def test_config_that_is_not_utf8_gives_one_line(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_folder(tmp_path)
    assert_one_line(error, "config.json")


@pytest.mark.parametrize("content", ["{", "[]", {"eos_token_id": "x"}])
def test_corrupt_generation_config_gives_one_line(content, tmp_path):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_folder(write_model(tmp_path, generation=content))
    assert_one_line(error, str(tmp_path))


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
@pytest.mark.parametrize("value", [None, "0.5", [1], True])
def test_generation_defaults_that_are_no_numbers_are_left_out(name, value):
    assert name not in ModelConfig.from_dict(BASE, {name: value}).sampling_defaults


def test_model_names_that_lead_nowhere_give_one_line(tmp_path):
    file = tmp_path / "weights.gguf"
    file.write_text("")
    names = (
        str(tmp_path / "absent"),
        str(file),
        "",
        "x" * 5000,
        "~nobody-of-that-name/x",
        "a/b/c",
        "..",
        "nobody/no-such",
    )
    for name in names:
        with pytest.raises(ConfigError) as error:
            ModelConfig.from_folder(resolve_model(name))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("tensor_parallel_size", [0, -1, 1.5, "2", True, None]),
        ("dtype", ["int8", "", None, "float64"]),
        ("max_model_len", [0, 1, -5, 10.0, True]),
        ("max_num_seqs", [0, "256", None]),
        ("max_num_batched_tokens", [0, 255, 1e4]),
        ("block_size", [0, 4, 12, 17, -16, 16.0, True]),
        ("gpu_memory_utilization", [0, -0.1, 1.01, float("nan"), "0.9", None, True]),
        ("kv_cache_bytes", [0, -1, 1.5, "4G"]),
        ("enable_prefix_caching", ["yes", 1, None]),
        ("enforce_eager", ["no", 0]),
        ("deterministic", ["on", 1]),
        ("load_format", ["pt", None]),
        ("seed", [-1, 2**64, 1.0, None]),
        ("scheduling_policy", ["lifo", None]),
        ("max_num_waiting", [0, "5"]),
        ("max_late_chunk_tokens", [0, 2.5]),
        ("max_logprobs", [-2, None, 2.0]),
        ("skip_tokenizer_init", ["true", 1]),
    ],
)
def test_options_out_of_range_are_refused_by_name(option, values):
    for value in values:
        with pytest.raises(ConfigError) as error:
            EngineConfig(**{option: value})
        assert_one_line(error, option)


def test_options_in_range_are_taken_and_normalised():
    config = EngineConfig(
        model=Path("some/folder"), dtype=torch.bfloat16, block_size=8, device=torch.device("cpu"), seed=2**63 - 1
    )
    assert (config.model, config.dtype, config.device) == ("some/folder", "bfloat16", "cpu")
    assert EngineConfig(dtype="half").dtype == "float16"
    assert EngineConfig(gpu_memory_utilization=1).gpu_memory_utilization == 1


def test_unknown_option_names_the_nearest_and_is_both_kinds_of_error():
    with pytest.raises(UnknownOptionError, match="did you mean 'max_num_seqs'") as error:
        EngineConfig.from_options({"max_num_sequences": 5})
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, TypeError)
    with pytest.raises(UnknownOptionError, match="unknown option 'zzz'; known: model,"):
        EngineConfig.from_options({"zzz": 5})

"""The strict loader: every fault is named before any parameter changes, and every byte lands in its place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qwen_engine import LLM, SamplingParams
from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.errors import CheckpointError, ConfigError
from qwen_engine.models.qwen3 import Qwen3Model
from qwen_engine.models.weights import INDEX_NAME, fill_dummy_weights, load_weights, sharding_table

CPU = torch.device("cpu")
SENTINEL = 123.0
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def build(
    folder: Path, tp: TPGroup | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Qwen3Model, ModelConfig]:
    config = ModelConfig.from_folder(folder)
    model = Qwen3Model(config, tp=tp or TPGroup(), max_model_len=64, dtype=dtype, device=CPU)
    for parameter in model.parameters():
        parameter.data.fill_(SENTINEL)
    return model, config


def load(folder: Path, tp: TPGroup | None = None, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model, config = build(folder, tp, dtype)
    load_weights(model, config, folder, tp or TPGroup())
    return {name: parameter.data for name, parameter in model.named_parameters(remove_duplicate=False)}


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def copy_config(source: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", target)
    return target


def write_shards(folder: Path, *shards: dict[str, torch.Tensor], index: bool = False) -> list[Path]:
    paths = [folder / f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for path, tensors in zip(paths, shards):
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    if index:
        write_index(folder, {name: path.name for path, tensors in zip(paths, shards) for name in tensors})
    return paths


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def broken(tiny_model: Path, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with a config only, and the tensors that belong there."""
    return copy_config(tiny_model, tmp_path / "model"), checkpoint_tensors(tiny_model)


def halves(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    names = sorted(tensors)
    return {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}


def assert_refused(folder: Path, *words: str, absent: tuple[str, ...] = ()) -> None:
    """Loading fails with one line that holds every word, and no parameter has changed."""
    model, config = build(folder)
    with pytest.raises(CheckpointError) as error:
        load_weights(model, config, folder, TPGroup())
    message = str(error.value)
    assert "\n" not in message
    for word in (folder.name, *words):
        assert word in message
    for word in absent:
        assert word not in message
    assert all((parameter == SENTINEL).all() for parameter in model.parameters())


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path, dict[str, torch.Tensor]], None]:
    def apply(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        change(tensors)
        write_shards(folder, tensors)

    return apply


def duplicate(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    first, second = halves(tensors)
    write_shards(folder, first, {**second, **dict([next(iter(first.items()))])})


def two_shards_one_removed(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(folder, *halves(tensors), index=True)[1].unlink()


def two_shards_one_removed_without_index(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(folder, *halves(tensors))[1].unlink()


def index_names_an_absent_tensor(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (path,) = write_shards(folder, {name: value for name, value in tensors.items() if name != NORM})
    write_index(folder, dict.fromkeys(tensors, path.name))


def index_names_an_absent_extra(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (path,) = write_shards(folder, tensors)
    write_index(folder, dict.fromkeys([*tensors, f"{Q_PROJ}_scale_inv"], path.name))


def truncated(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = write_shards(folder, *halves(tensors), index=True)[0]
    path.write_bytes(path.read_bytes()[:-8])


def cut_in_the_header(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (path,) = write_shards(folder, tensors)
    path.write_bytes(path.read_bytes()[:100])


def empty_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(folder, *halves(tensors))[0].write_bytes(b"")


def folder_named_like_a_shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = write_shards(folder, *halves(tensors))[0]
    path.unlink()
    path.mkdir()


def folder_named_like_an_indexed_shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = write_shards(folder, *halves(tensors), index=True)[0]
    path.unlink()
    path.mkdir()


def index_leaves_the_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (path,) = write_shards(folder, tensors)
    path.rename(folder.parent / path.name)
    write_index(folder, dict.fromkeys(tensors, f"../{path.name}"))


SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FAULTS = {
    "missing": (edit(lambda t: t.pop(NORM)), [f"{NORM} is missing"]),
    "unexpected": (edit(lambda t: t.update({"model.extra": torch.ones(2)})), ["model.extra is unexpected"]),
    "mis_shaped": (edit(lambda t: t.update({NORM: torch.ones(63)})), [NORM, "[63]", "[64]"]),
    "transposed": (edit(lambda t: t.update({EMBED: t[EMBED].T})), [EMBED, "[64, 503]", "[503, 64]"]),
    "fp8": (edit(lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)})), [Q_PROJ, "F8_E4M3"]),
    "int": (edit(lambda t: t.update({NORM: t[NORM].int()})), [NORM, "I32"]),
    "double": (edit(lambda t: t.update({NORM: t[NORM].double()})), [NORM, "F64"]),
    "duplicate": (duplicate, ["is in both", SHARD_1, SHARD_2]),
    "missing_shard": (two_shards_one_removed, [SHARD_2]),
    "missing_shard_without_index": (two_shards_one_removed_without_index, ["is missing"]),
    "index_names_absent_tensor": (index_names_an_absent_tensor, [f"{NORM} is missing"]),
    "index_names_absent_extra": (index_names_an_absent_extra, [f"{Q_PROJ}_scale_inv"]),
    "truncated": (truncated, [SHARD_1]),
    "cut_in_the_header": (cut_in_the_header, ["model-00001-of-00001.safetensors"]),
    "empty_file": (empty_file, [SHARD_1]),
    "empty_folder": (lambda folder, tensors: None, ["safetensors"]),
    "folder_named_like_a_shard": (folder_named_like_a_shard, [SHARD_1]),
    "folder_named_like_an_indexed_shard": (folder_named_like_an_indexed_shard, [SHARD_1]),
    "index_leaves_the_folder": (index_leaves_the_folder, ["../model-00001-of-00001.safetensors"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_ldr_01_faulty_checkpoints_change_nothing(fault, broken):
    make, words = FAULTS[fault]
    make(*broken)
    assert_refused(broken[0], *words)


def test_ldr_01_one_error_names_every_fault(broken):
    folder, tensors = broken
    first, second = halves(tensors)
    for name in (NORM, HEAD):
        first.pop(name, None)
        second.pop(name, None)
    first[Q_PROJ] = torch.ones(3, 3)
    second[Q_PROJ] = torch.ones(3, 3)
    second["model.extra"] = torch.ones(1)
    second[EMBED] = torch.ones(503, 64, dtype=torch.int8)
    write_shards(folder, first, second)
    assert_refused(
        folder, f"{NORM} is missing", f"{HEAD} is missing", Q_PROJ, "in both", "model.extra", EMBED, "I8", "[3, 3]"
    )


def test_tensors_of_a_missing_shard_are_not_listed_one_by_one(broken):
    folder, tensors = broken
    two_shards_one_removed(folder, tensors)
    assert_refused(folder, SHARD_2, absent=("is missing",))


def test_a_hopeless_checkpoint_gives_a_bounded_message(broken):
    folder, _ = broken
    write_shards(folder, {f"other.{number}": torch.ones(1) for number in range(500)})
    model, config = build(folder)
    with pytest.raises(CheckpointError, match=r"and \d+ more") as error:
        load_weights(model, config, folder, TPGroup())
    assert len(str(error.value)) < 10_000


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": 5}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": ["b"]}}',
        "\x00",
        "[" * 99999,
    ],
)
def test_corrupt_index_is_one_clear_error(content, broken):
    folder, tensors = broken
    write_shards(folder, tensors)
    (folder / INDEX_NAME).write_text(content)
    assert_refused(folder, INDEX_NAME)


def test_files_that_the_index_does_not_name_are_not_read(broken):
    folder, tensors = broken
    write_shards(folder, *halves(tensors), index=True)
    (folder / "consolidated.safetensors").write_bytes(b"junk")
    assert torch.equal(load(folder)["embed_tokens.weight"], tensors[EMBED])


@pytest.mark.parametrize("with_head", [False, True])
def test_ldr_02_tied_models_share_the_head_with_or_without_a_tensor_for_it(with_head, make_tiny_model, tmp_path):
    source = make_tiny_model(tie_word_embeddings=True)
    tensors = checkpoint_tensors(source)
    assert HEAD not in tensors
    if with_head:
        tensors[HEAD] = tensors[EMBED].clone()
    folder = copy_config(source, tmp_path / "model")
    write_shards(folder, tensors)
    for tp in (TPGroup(), TPGroup(0, 2), TPGroup(1, 2)):
        loaded = load(folder, tp)
        assert loaded["lm_head.weight"].data_ptr() == loaded["embed_tokens.weight"].data_ptr()
        assert not (loaded["lm_head.weight"] == SENTINEL).any()


@pytest.mark.parametrize("order", ["head_first", "head_last", "head_in_first_shard", "head_in_last_shard"])
def test_ldr_04_a_head_of_its_own_is_loaded_in_any_order(order, broken):
    folder, tensors = broken
    assert not torch.equal(tensors[HEAD], tensors[EMBED])
    head = {HEAD: tensors[HEAD]}
    rest = {name: value for name, value in tensors.items() if name != HEAD}
    shards = {
        "head_first": [{**head, **rest}],
        "head_last": [{**rest, **head}],
        "head_in_first_shard": [head, rest],
        "head_in_last_shard": [rest, head],
    }[order]
    write_shards(folder, *shards, index=len(shards) > 1)
    loaded = load(folder)
    assert torch.equal(loaded["lm_head.weight"], tensors[HEAD])
    assert torch.equal(loaded["embed_tokens.weight"], tensors[EMBED])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_checkpoints_are_cast_to_the_target_dtype(stored, wanted, broken):
    folder, tensors = broken
    tensors = {name: value.to(stored) for name, value in tensors.items()}
    write_shards(folder, tensors)
    loaded = load(folder, dtype=wanted)
    assert {value.dtype for value in loaded.values()} == {wanted}
    assert torch.equal(loaded["embed_tokens.weight"], tensors[EMBED].to(wanted))
    assert torch.equal(loaded["norm.weight"], tensors[NORM].to(wanted))


SPLITS = {
    "kv_heads_2": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "kv_heads_8_tied": {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "bias": {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_bias": True},
    "short_vocab": {"num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 9},
}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_cover_every_tensor_exactly_once(split, size, make_tiny_model):
    folder = make_tiny_model(**SPLITS[split])
    config = ModelConfig.from_folder(folder)
    tables = [sharding_table(config, TPGroup(rank, size)) for rank in range(size)]
    kv_copies = max(1, size // config.num_kv_heads)
    tensors = checkpoint_tensors(folder)
    assert {shard.name for shard in tables[0]} == set(tensors)
    for shards in zip(*tables):
        (name,) = {shard.name for shard in shards}
        (dim,) = {shard.dim for shard in shards}
        assert {shard.shape for shard in shards} == {tuple(tensors[name].shape)}
        counts = torch.zeros(tensors[name].shape[dim], dtype=torch.int64)
        for shard in shards:
            counts[shard.start : shard.start + shard.length] += 1
        copies = (
            size
            if "norm" in name or "o_proj.bias" in name
            else kv_copies
            if "k_proj" in name or "v_proj" in name
            else 1
        )
        assert (counts == copies).all(), name
    for table, rank in zip(tables, range(size)):
        model, _ = build(folder, TPGroup(rank, size))
        written = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for shard in table:
            if shard.parameter in written:
                written[shard.parameter].narrow(shard.dim, shard.offset, shard.length).add_(1)
        for name, count in written.items():
            is_vocab = name in ("embed_tokens.weight", "lm_head.weight")
            assert count.max() == 1 or (is_vocab and not count.any())
            assert is_vocab or count.min() == 1, f"{name} is not covered"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("split", SPLITS)
def test_rank_shards_put_together_are_the_whole_model(split, size, make_tiny_model):
    folder = make_tiny_model(**SPLITS[split])
    config = ModelConfig.from_folder(folder)
    whole = load(folder)
    ranks = [load(folder, TPGroup(rank, size)) for rank in range(size)]
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    local_q, local_kv = heads // size * dim, max(1, kv_heads // size) * dim
    for name, value in whole.items():
        parts = [rank[name] for rank in ranks]
        if "qkv_proj" in name:
            q, k, v = zip(*(part.split([local_q, local_kv, local_kv]) for part in parts))
            step = max(1, size // kv_heads)
            joined = torch.cat([*q, *k[::step], *v[::step]])
            for group in (k, v):  # copies of a KV head are equal
                assert all(torch.equal(group[i], group[i - i % step]) for i in range(size))
        elif "gate_up_proj" in name:
            gate, up = zip(*(part.chunk(2) for part in parts))
            joined = torch.cat([*gate, *up])
        elif "o_proj.weight" in name or "down_proj" in name:
            joined = torch.cat(parts, dim=1)
        elif name in ("embed_tokens.weight", "lm_head.weight"):
            joined = torch.cat(parts)
            assert not joined[config.vocab_size :].any(), "padding rows are zero"
            joined = joined[: config.vocab_size]
        else:
            assert all(torch.equal(part, value) for part in parts)
            continue
        assert torch.equal(joined, value), name


@pytest.mark.parametrize(
    ("overrides", "size", "word"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, 8, "4 heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, 3, "3 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "3 KV heads"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 100}, 8, "intermediate_size 100"),
    ],
)
def test_splits_that_do_not_come_out_even_are_refused(overrides, size, word, make_tiny_model):
    config = ModelConfig.from_folder(make_tiny_model(**overrides))
    with pytest.raises(ConfigError, match=word):
        sharding_table(config, TPGroup(0, size))


def test_dummy_weights_are_random_and_repeat_by_seed(tiny_model):
    def dummy(seed: int) -> dict[str, torch.Tensor]:
        model, _ = build(tiny_model)
        fill_dummy_weights(model, seed)
        return {name: parameter.data for name, parameter in model.named_parameters()}

    first, again, other = dummy(1), dummy(1), dummy(2)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])
        assert value.isfinite().all()
        mean = 1.0 if "norm" in name else 0.0
        assert abs(value.mean() - mean) < 0.02
        assert 0.01 < value.std() < 0.03
    assert not torch.equal(first["embed_tokens.weight"], first["lm_head.weight"])


def test_dummy_models_need_no_weights_and_repeat_by_seed(tiny_model, tmp_path):
    folder = copy_config(tiny_model, tmp_path / "model")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)

    def tokens(seed: int) -> list[int]:
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 2}
        with LLM(folder, seed=seed, **options) as llm:
            return llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"]

    assert tokens(0) == tokens(0)
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(folder, skip_tokenizer_init=True, device="cpu")


MEASURE_PEAK = """
import sys, threading
from pathlib import Path
import torch
from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.models.qwen3 import Qwen3Model
from qwen_engine.models.weights import load_weights

def resident_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile")))

folder = Path(sys.argv[1])
config = ModelConfig.from_folder(folder)
model = Qwen3Model(config, tp=TPGroup(), max_model_len=64, dtype=torch.float32, device=torch.device("cpu"))
before = peak = resident_kb()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, resident_kb())

watcher = threading.Thread(target=watch)
watcher.start()
load_weights(model, config, folder, TPGroup())
done.set()
watcher.join()
print(peak - before, resident_kb() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_the_parameters_and_one_tensor(tmp_path):
    """Parameters are committed as they are written, so the growth is theirs and what the loader needs on top."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = sharding_table(ModelConfig.from_folder(tmp_path), TPGroup())
    tensors = {shard.name: torch.zeros(shard.shape) for shard in table}
    write_shards(tmp_path, *halves(tensors), index=True)
    num_bytes = sum(value.nbytes for value in tensors.values())
    largest = max(value.nbytes for value in tensors.values())
    assert num_bytes > 120 * 10**6
    command = [sys.executable, "-c", MEASURE_PEAK, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak_kb, final_kb = map(int, result.stdout.split())
    assert final_kb * 1024 > 0.95 * num_bytes  # the measurement sees the parameters
    assert peak_kb * 1024 < num_bytes + largest + 16 * 2**20


def test_every_parameter_is_an_nn_parameter_of_the_table(tiny_model):
    model, config = build(tiny_model)
    named = dict(model.named_parameters(remove_duplicate=False))
    assert {shard.parameter for shard in sharding_table(config, TPGroup())} == set(named)
    assert all(isinstance(parameter, nn.Parameter) and not parameter.requires_grad for parameter in named.values())

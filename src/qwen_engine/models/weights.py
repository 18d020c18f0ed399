"""From safetensors files to parameters: a sharding table, a strict check of every header, then one copy per tensor.

Nothing is read before all headers have been compared with the table, so a faulty checkpoint changes no parameter and
one error names every fault. Only the slices a rank owns are read, each straight into its place in the parameter.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
FLOAT_DTYPES = ("BF16", "F16", "F32")
DUMMY_STD = 0.02
MAX_FAULTS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Which part of a checkpoint tensor goes where: source[start : start + length] along `dim` of a tensor of `shape`
    is copied to rows (or columns) [offset, offset + length) of `parameter`."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    dim: int
    start: int
    length: int
    offset: int = 0


def sharding_table(config: ModelConfig, tp: TPGroup) -> list[TensorShard]:
    """One entry per checkpoint tensor for rank `tp.rank`. Raises ConfigError if the model cannot be split so."""
    _check_divisible(config, tp)
    hidden, dim, vocab = config.hidden_size, config.head_dim, config.vocab_size
    heads = config.num_heads // tp.size
    kv_heads = max(1, config.num_kv_heads // tp.size)
    first_kv_head = tp.rank * config.num_kv_heads // tp.size
    inner = config.intermediate_size // tp.size
    q, kv = heads * dim, kv_heads * dim

    table: list[TensorShard] = []

    def whole(name: str, *shape: int) -> None:
        table.append(TensorShard(f"model.{name}", shape, name, 0, 0, shape[0]))

    def split(
        name: str, shape: tuple[int, ...], parameter: str, *, dim: int = 0, start: int, length: int, offset: int = 0
    ) -> None:
        table.append(TensorShard(name, shape, parameter, dim, start, length, offset))

    def split_vocab(name: str, parameter: str) -> None:
        rows = -(-vocab // tp.size)
        start = tp.rank * rows
        split(name, (vocab, hidden), parameter, start=start, length=max(0, min(rows, vocab - start)))

    split_vocab("model.embed_tokens.weight", "embed_tokens.weight")
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        kinds = [("weight", (hidden,))] + ([("bias", ())] if config.attention_bias else [])
        for kind, tail in kinds:
            packed = f"{attention}.qkv_proj.{kind}"
            for part, rows, start, length, offset in (
                ("q", config.num_heads * dim, tp.rank * q, q, 0),
                ("k", config.num_kv_heads * dim, first_kv_head * dim, kv, q),
                ("v", config.num_kv_heads * dim, first_kv_head * dim, kv, q + kv),
            ):
                name = f"model.{attention}.{part}_proj.{kind}"
                split(name, (rows, *tail), packed, start=start, length=length, offset=offset)
        o_proj = f"{attention}.o_proj.weight"
        split(f"model.{o_proj}", (hidden, config.num_heads * dim), o_proj, dim=1, start=tp.rank * q, length=q)
        if config.attention_bias:
            whole(f"{attention}.o_proj.bias", hidden)
        whole(f"{attention}.q_norm.weight", dim)
        whole(f"{attention}.k_norm.weight", dim)
        for index, part in enumerate(("gate", "up")):
            split(
                f"model.{mlp}.{part}_proj.weight",
                (config.intermediate_size, hidden),
                f"{mlp}.gate_up_proj.weight",
                start=tp.rank * inner,
                length=inner,
                offset=index * inner,
            )
        down = f"{mlp}.down_proj.weight"
        split(f"model.{down}", (hidden, config.intermediate_size), down, dim=1, start=tp.rank * inner, length=inner)
        whole(f"{prefix}.input_layernorm.weight", hidden)
        whole(f"{prefix}.post_attention_layernorm.weight", hidden)
    whole("norm.weight", hidden)
    if not config.tie_word_embeddings:
        split_vocab("lm_head.weight", "lm_head.weight")
    return table


def load_weights(
    model: nn.Module, config: ModelConfig, folder: Path, tp: TPGroup, *, check: Callable[[], None] | None = None
) -> None:
    """Fills every parameter of `model` from the safetensors files in `folder`, cast to the parameter's dtype.

    check: called before each tensor; what it raises ends the loading.
    Raises CheckpointError that names every missing, unexpected, duplicate or mis-shaped tensor and every missing or
    damaged file, before any parameter changes.
    """
    start = time.perf_counter()
    table = sharding_table(config, tp)
    file_of = _check_headers(table, folder, config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    num_bytes = 0
    with tqdm(table, desc="loading weights", unit="tensor", disable=None, leave=False) as progress:
        for shard in progress:
            if check is not None:
                check()
            # Reopened for each tensor, so that the mapped pages of earlier ones do not add up in this process.
            with safe_open(file_of[shard.name], framework="pt") as file:
                source = file.get_slice(shard.name)
                stop = shard.start + shard.length
                part = source[shard.start : stop] if shard.dim == 0 else source[:, shard.start : stop]
            target = parameters[shard.parameter].data.narrow(shard.dim, shard.offset, shard.length)
            target.copy_(part)
            num_bytes += target.nbytes
    _zero_padding(table, parameters)
    logger.info("loaded %.2f GB of weights in %.1f s", num_bytes / 1e9, time.perf_counter() - start)


def fill_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fills every parameter with random values on its own device: matrices and biases N(0, 0.02²), norms around 1."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        parameter.data.normal_(mean=1.0 if "norm" in name else 0.0, std=DUMMY_STD, generator=generators[device])


def _zero_padding(table: list[TensorShard], parameters: dict[str, nn.Parameter]) -> None:
    """Rows of a vocabulary shard past the vocabulary's end."""
    for shard in table:
        parameter = parameters[shard.parameter]
        if shard.parameter in ("embed_tokens.weight", "lm_head.weight") and shard.length < parameter.shape[0]:
            parameter.data[shard.length :].zero_()


def _check_divisible(config: ModelConfig, tp: TPGroup) -> None:
    kv = config.num_kv_heads
    if config.num_heads % tp.size or (kv % tp.size and tp.size % kv):
        raise ConfigError(
            f"{config.num_heads} heads and {kv} KV heads cannot be split over {tp.size} ranks; "
            "tensor_parallel_size must divide the heads, and divide the KV heads or be a multiple of them"
        )
    if config.intermediate_size % tp.size:
        raise ConfigError(f"intermediate_size {config.intermediate_size} cannot be split over {tp.size} ranks")


def _check_headers(table: list[TensorShard], folder: Path, config: ModelConfig) -> dict[str, Path]:
    """Compares all tensor headers in `folder` with the table; returns the file of each expected tensor."""
    expected = {shard.name: shard.shape for shard in table}
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    files, weight_map, faults = _weight_files(folder)
    unreadable = {name for name in weight_map.values() if folder / name not in files}
    file_of: dict[str, Path] = {}
    for path in files:
        try:
            headers = _read_headers(path)
        except (SafetensorError, OSError) as error:
            faults.append(f"{path.name} cannot be read ({error})")
            unreadable.add(path.name)
            if not weight_map:
                weight_map = dict.fromkeys(expected, path.name)
            continue
        for name, (shape, dtype) in headers.items():
            if name in file_of:
                faults.append(f"{name} is in both {file_of[name].name} and {path.name}")
            file_of[name] = path
            if name in ignored or name.endswith("rotary_emb.inv_freq"):
                continue
            if name not in expected:
                faults.append(f"{name} is unexpected")
            elif shape != expected[name]:
                faults.append(f"{name} has shape {list(shape)}, not {list(expected[name])}")
            elif dtype not in FLOAT_DTYPES:
                faults.append(f"{name} has dtype {dtype}, not one of {', '.join(FLOAT_DTYPES)}")
    # Tensors of a file that is missing or damaged are covered by that file's own fault.
    faults.extend(
        f"{name} is missing"
        for name in dict.fromkeys((*expected, *weight_map))
        if name not in file_of and name not in ignored and weight_map.get(name) not in unreadable
    )
    if faults:
        shown = "; ".join(faults[:MAX_FAULTS_SHOWN])
        more = f"; and {len(faults) - MAX_FAULTS_SHOWN} more" if len(faults) > MAX_FAULTS_SHOWN else ""
        raise CheckpointError(f"{folder} does not fit its config.json: {shown}{more}")
    return file_of


def _read_headers(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor in a file, without reading any data."""
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str], list[str]]:
    """The files to read, the index's map from tensor to file name (empty without an index), and faults found."""
    index_path = folder / INDEX_NAME
    if not index_path.is_file():
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"no *.safetensors in {folder}; only safetensors checkpoints are read")
        faults = [f"{path.name} is not a file" for path in paths if not path.is_file()]
        return [path for path in paths if path.is_file()], {}, faults
    try:
        weight_map = dict(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"])
        names = sorted({Path(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index_path} cannot be read ({error!r})") from None
    # A file elsewhere is no part of the checkpoint, whatever the index says.
    present = [name for name in names if len(name.parts) == 1 and (folder / name).is_file()]
    faults = [f"{name} is named in {INDEX_NAME} but missing" for name in names if name not in present]
    return [folder / name for name in present], weight_map, faults

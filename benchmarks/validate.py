"""The engine against Transformers on the same weights: logits, greedy tokens and speed, in one run.

    python benchmarks/validate.py --config-folder CONFIG [--dtype bfloat16]
    python benchmarks/validate.py --model MODEL [--perplexity TEXT_FILE] [--backends transformers,eager,graph]

The engine runs eagerly, on a GPU with CUDA graphs too, and with --tensor-parallel-size also on a single rank. All must
give the same tokens in fp32; in half precision, where a padded batch or a sum over ranks may round differently, a
difference is shown and each is judged by the yardstick below.

With --config-folder a random checkpoint of that shape is written to a temporary folder first, and both load it.

The yardstick is Transformers in fp32, which scores the engine's own greedy output: its log-probabilities give the
engine's error, and at each position its best token must be the engine's. In half precision two nearly equal logits may
change places: a difference counts as wrong when the fp32 gap between the two tokens is larger than twice the largest
error that Transformers itself makes in that precision on the same tokens.

--perplexity: of a text, in windows of 1024 tokens, by both; in fp32 they have to agree to four digits.

Leaves a result file in --results-dir (bench/results.py is the schema).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from qwen_engine import LLM, SamplingParams
from qwen_engine.bench.facts import engine_facts
from qwen_engine.bench.output import add_results_dir_argument, at_least
from qwen_engine.bench.results import Check, new_result, write_result
from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine_args import HelpFormatter
from qwen_engine.errors import QwenEngineError
from qwen_engine.models.hub import resolve_model
from qwen_engine.models.weights import sharding_table

SHARD_BYTES = 4 << 30
MAX_MODEL_LEN = 4096
BACKENDS = ("transformers", "single", "eager", "graph")
"""In this order. "single" is this engine on one rank, beside the several of --tensor-parallel-size."""
PERPLEXITY_WINDOW = 1024
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then it",
    "人工智能正在改变世界，因为",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
]


def write_random_checkpoint(
    config_folder: Path, folder: Path, dtype: torch.dtype, device: torch.device, *, q_norm: float = 1.0
) -> None:
    """N(0, 0.02²) matrices and norms around 1, in shards of at most 4 GiB, with config and tokenizer copied.

    q_norm: around which the norms of the queries lie instead; larger ones make attention sharper.
    """
    for path in config_folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    num_shards = num_bytes = 0

    def flush() -> None:
        nonlocal num_shards, num_bytes
        num_shards += 1
        name = f"model-{num_shards:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        num_bytes = 0

    for entry in sharding_table(ModelConfig.from_folder(folder), TPGroup()):
        mean = q_norm if "q_norm" in entry.name else 1.0 if "norm" in entry.name else 0.0
        tensor = torch.empty(entry.shape, dtype=dtype, device=device).normal_(mean, 0.02, generator=generator)
        shard[entry.name] = tensor.cpu()
        num_bytes += tensor.nbytes
        if num_bytes >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def prompts_for(vocab_size: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, min(vocab_size, 150_000), (n,), generator=generator).tolist() for n in lengths]


def engine_outputs(args: argparse.Namespace, folder: Path, backend: str) -> dict:
    """Greedy tokens, their log-probabilities and the speed of this engine, as one of BACKENDS."""
    has_tokenizer = (folder / "tokenizer.json").exists()
    start = time.perf_counter()
    vocab_size, max_len = llm_limits(folder)
    llm = LLM(
        folder,
        dtype=args.dtype,
        device=args.device,
        max_model_len=max_len,
        skip_tokenizer_init=not has_tokenizer,
        enforce_eager=backend == "eager",
        tensor_parallel_size=1 if backend == "single" else args.tensor_parallel_size,
    )
    ready_s = time.perf_counter() - start
    prompts: list = prompts_for(vocab_size, args.lengths)
    prompts += TEXTS if has_tokenizer else []
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True, logprobs=5)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    result = {
        "ready_s": ready_s,
        "prompts": [out.prompt_token_ids for out in outputs],
        "tokens": [out.outputs[0].token_ids for out in outputs],
        "logprobs": [list(out.outputs[0].logprobs) for out in outputs],
        "speed": [],
    }
    for batch in args.batches:
        batch_prompts = prompts_for(vocab_size, [args.prompt_len] * batch)

        def timed(num_tokens: int, batch_prompts: list[list[int]] = batch_prompts) -> float:
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            llm.generate(
                batch_prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False
            )
            return time.perf_counter() - begin

        result["speed"].append(measure(timed, batch, args.max_tokens))
    if args.perplexity:
        windows = text_windows(llm.encode(args.perplexity.read_text(encoding="utf-8")))
        scored = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        values = [
            row[token].logprob
            for window, out in zip(windows, scored)
            for token, row in zip(window[1:], out.prompt_logprobs[1:])
        ]
        result["windows"] = windows
        result["perplexity"] = math.exp(-statistics.fmean(values))
    result["facts"] = engine_facts(llm)
    llm.close()
    return result


def llm_limits(folder: Path) -> tuple[int, int]:
    """Vocabulary size, and the context length to run with."""
    config = ModelConfig.from_folder(folder)
    return config.vocab_size, min(MAX_MODEL_LEN, config.max_context_tokens)


def text_windows(token_ids: list[int]) -> list[list[int]]:
    """The text in pieces of at most PERPLEXITY_WINDOW tokens; the first token of each is context only."""
    pieces = [token_ids[start : start + PERPLEXITY_WINDOW] for start in range(0, len(token_ids), PERPLEXITY_WINDOW)]
    return [piece for piece in pieces if len(piece) > 1]


@torch.no_grad()
def reference_perplexity(args: argparse.Namespace, folder: Path, windows: list[list[int]]) -> float:
    """Transformers' perplexity of the same windows, in the same dtype."""
    model = load_reference(args, folder, args.dtype)
    values = []
    for window in windows:
        ids = torch.tensor([window], device=args.device)
        logprobs = model(ids).logits[0, :-1].float().log_softmax(dim=-1)
        values += logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return math.exp(-statistics.fmean(values))


@torch.no_grad()
def score(args: argparse.Namespace, folder: Path, dtype: str, ours: dict) -> list[torch.Tensor]:
    """Transformers' log-probabilities [output tokens, vocab] (fp32, on the CPU) along each of our outputs."""
    model = load_reference(args, folder, dtype)
    scores = []
    for prompt, tokens in zip(ours["prompts"], ours["tokens"]):
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=args.device)
        logits = model(ids, logits_to_keep=len(tokens)).logits[0]
        scores.append(logits.float().log_softmax(dim=-1).cpu())
    return scores


def compare(exact: list[torch.Tensor], same_dtype: list[torch.Tensor], ours: dict) -> dict[str, float]:
    """Errors of the engine and of Transformers against fp32, and what became of each greedy token."""
    theirs = torch.cat([(mine - other).abs().flatten() for mine, other in zip(same_dtype, exact)])
    rounding = 2 * float(theirs.max())
    errors, gaps = [], []
    for scores, tokens, rows in zip(exact, ours["tokens"], ours["logprobs"]):
        best = scores.max(dim=-1).values.tolist()
        for position, (token, row) in enumerate(zip(tokens, rows)):
            errors += [abs(value.logprob - float(scores[position, other])) for other, value in row.items()]
            gaps.append(best[position] - float(scores[position, token]))
    return {
        "tokens": len(gaps),
        "equal": sum(gap == 0 for gap in gaps),
        "within_rounding": sum(0 < gap <= rounding for gap in gaps),
        "wrong": sum(gap > rounding for gap in gaps),
        "largest_gap": max(gaps),
        "error_mean": statistics.fmean(errors),
        "error_max": max(errors),
        "transformers_error_mean": float(theirs.mean()),
        "transformers_error_max": float(theirs.max()),
    }


@torch.no_grad()
def reference_speed(args: argparse.Namespace, folder: Path) -> list[tuple[int, float, float]]:
    """Transformers' generate on the batches of `engine_outputs`: (batch, first token s, decode step s)."""
    model = load_reference(args, folder, args.dtype)
    speed = []
    for batch in args.batches:
        ids = torch.tensor(prompts_for(model.config.vocab_size, [args.prompt_len] * batch), device=args.device)
        options = {
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "temperature": None,
            "top_k": None,
            "top_p": None,
            "pad_token_id": 0,
        }

        def timed(num_tokens: int, ids: torch.Tensor = ids, options: dict = options) -> float:
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, **options).cpu()
            return time.perf_counter() - begin

        speed.append(measure(timed, batch, args.max_tokens))
    return speed


def load_reference(args: argparse.Namespace, folder: Path, dtype: str) -> torch.nn.Module:
    """Transformers' model, spread over the GPUs where the engine is (which takes the package accelerate)."""
    spread = args.tensor_parallel_size > 1 and args.device.startswith("cuda")
    options = {"device_map": "balanced"} if spread else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options)
    return model.eval() if spread else model.eval().to(args.device)


def measure(timed: Callable[[int], float], batch: int, num_tokens: int) -> tuple[int, float, float]:
    """(batch, seconds to the first token, seconds per further token) from runs of 1 and of `num_tokens` tokens."""
    timed(2)
    first = min(timed(1) for _ in range(2))
    return batch, first, (timed(num_tokens) - first) / (num_tokens - 1)


def chosen_backends(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Those asked for, in the order of BACKENDS."""
    known = [
        name
        for name in BACKENDS
        if (name != "graph" or args.device.startswith("cuda")) and (name != "single" or args.tensor_parallel_size > 1)
    ]
    names = list(known) if args.backends is None else args.backends.split(",")
    for name in names:
        if name not in known:
            parser.error(f"backend {name!r} does not exist on {args.device}; use some of {','.join(known)}")
    if set(names) == {"transformers"}:
        parser.error("the engine itself is not among the backends; add eager or graph")
    return [name for name in known if name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder, Hugging Face repository, or demo")
    source.add_argument("--config-folder", type=Path, help="a config.json's folder; weights are made up")
    parser.add_argument("--backends", help=f"some of {','.join(BACKENDS)} (default: all that there are here)")
    parser.add_argument("--tensor-parallel-size", type=at_least(1), default=1)
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--dtype", default="bfloat16" if has_gpu else "float32", choices=["bfloat16", "float16", "float32"]
    )
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=512, help="prompt length of the speed runs")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 15, 16, 17, 100, 257, 1000])
    parser.add_argument("--perplexity", type=Path, help="also compare the perplexity of this text file")
    add_results_dir_argument(parser)
    args = parser.parse_args()
    backends = chosen_backends(parser, args)
    folder = args.config_folder or resolve_model(args.model)
    ModelConfig.from_folder(folder)
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as temporary:
        if args.config_folder is not None:
            folder = Path(temporary)
            write_random_checkpoint(args.config_folder, folder, getattr(torch, args.dtype), torch.device(args.device))
        outputs = {name: engine_outputs(args, folder, name) for name in backends if name != "transformers"}
        figures: dict[str, dict[str, float]] = {name: {"ready_s": ours["ready_s"]} for name, ours in outputs.items()}
        speeds = {name: ours["speed"] for name, ours in outputs.items()}
        if "transformers" in backends:
            for name, ours in outputs.items():
                figures[name] |= judged(args, folder, ours)
            speeds["transformers"] = reference_speed(args, folder)
    result = to_result(args, Path(args.config_folder or args.model).name, outputs, figures, speeds)
    print(f"{result['engine_config']['model']} {args.dtype} on {args.device}")
    for name, values in result["metrics"].items():
        print(f"  {name} {values:.6g}")
    for check in result["checks"]:
        print(f"  {check['name']}: {check['detail']}")
    print(f"  -> {write_result(result, args.results_dir)}")
    return 0 if result["status"] == "completed" else 1


def judged(args: argparse.Namespace, folder: Path, ours: dict) -> dict[str, float]:
    """What Transformers says about the tokens of one engine, and both perplexities where asked for."""
    exact = score(args, folder, "float32", ours)
    same_dtype = exact if args.dtype == "float32" else score(args, folder, args.dtype, ours)
    figures = compare(exact, same_dtype, ours)
    if args.perplexity:
        figures["perplexity"] = ours["perplexity"]
        figures["transformers_perplexity"] = reference_perplexity(args, folder, ours["windows"])
    return figures


def to_result(
    args: argparse.Namespace,
    model: str,
    outputs: dict[str, dict],
    figures: dict[str, dict[str, float]],
    speeds: dict[str, list[tuple[int, float, float]]],
) -> dict:
    """The result in the common schema. Figures of the last engine have no prefix, other backends have their name."""
    *_, main_engine = outputs
    metrics: dict[str, float] = {}
    checks = []
    for name in [*outputs, *(name for name in speeds if name not in outputs)]:
        prefix = "" if name == main_engine else f"{name}_"
        metrics |= {prefix + key: value for key, value in figures.get(name, {}).items()}
        for batch, first, step in speeds[name]:
            if name == main_engine:
                metrics[f"batch{batch}_concurrency"] = batch
            metrics[f"{prefix}batch{batch}_first_token_s"] = first
            metrics[f"{prefix}batch{batch}_decode_tok_s"] = batch / step
    for name, values in figures.items():
        suffix = f" ({name})" if len(figures) > 1 else ""
        if "wrong" in values:
            detail = f"{values['equal']} of {values['tokens']} greedy tokens are those of fp32, "
            detail += f"{values['within_rounding']} ties within rounding, {values['wrong']} wrong"
            checks.append(Check("no wrong token" + suffix, not values["wrong"], detail))
        if args.dtype == "float32" and "perplexity" in values:
            detail = f"{values['perplexity']:.6g}, Transformers {values['transformers_perplexity']:.6g}"
            checks.append(Check("perplexity equal" + suffix, agree(values), detail))
    if len(outputs) > 1:
        pairs = list(zip(*(ours["tokens"] for ours in outputs.values())))
        num_equal = sum(all(row == rows[0] for row in rows) for rows in pairs)
        detail = f"{num_equal} of {len(pairs)} prompts get the same tokens"
        passed = num_equal == len(pairs) or args.dtype != "float32"
        checks.append(Check(f"{', '.join(outputs)}: the same tokens", passed, detail))
    names = ("tensor_parallel_size", "prompt_len", "max_tokens", "batches", "lengths")
    facts = outputs[main_engine]["facts"]
    return new_result(
        "validate",
        metrics=metrics,
        checks=checks,
        parameters={key: getattr(args, key) for key in names} | {"random_weights": args.config_folder is not None},
        # A checkpoint that was made up lay in a temporary folder.
        facts={**facts, "engine_config": {**facts["engine_config"], "model": model}},
    )


def agree(figures: dict[str, float]) -> bool:
    """Whether the two perplexities are equal to four digits."""
    return math.isclose(figures["perplexity"], figures["transformers_perplexity"], rel_tol=5e-5)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QwenEngineError as error:
        sys.exit(f"error: {error}")

"""One prompt near the end of a context that YaRN has extended: is it computed right, and how long does it take?

    python benchmarks/long_context.py --config-folder CONFIGS/Qwen3-32B --tensor-parallel-size 2
    python benchmarks/long_context.py --config-folder CONFIGS/Qwen3-32B --only check --prompt-tokens 8000

Check: `--check-layers` layers with random weights, whose attention is sharp enough to depend on single tokens. The
engine writes `--output-tokens` greedy tokens behind the prompt in `--dtype`, and behind a shorter prompt in fp32.
Transformers in fp32 scores them, its attention computed in blocks of queries because the scores of 120,000 × 120,000
tokens fit nowhere. In fp32 its tokens must be the engine's; in half precision a token may differ by rounding
(`validate.py` says how that is told). As a control Transformers scores them once more with the positions of the second
half one too high, and that must fit much worse: else the check would not notice a wrong position.

Speed: all layers with random weights, the time to the first token and between tokens, and the floor that memory and
arithmetic of the device set. Leaves a result file in --results-dir.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from validate import compare, prompts_for, write_random_checkpoint

from qwen_engine import LLM, SamplingParams
from qwen_engine.bench.facts import engine_facts
from qwen_engine.bench.load import PromptSource, check_batches, run_random
from qwen_engine.bench.output import add_results_dir_argument, at_least, number
from qwen_engine.bench.results import Check, check_writable, device_label, new_result, write_result
from qwen_engine.bench.roofline import CEILINGS, Ceiling, decode_parts, floor_s, prefill_parts
from qwen_engine.config import ModelConfig
from qwen_engine.engine_args import HelpFormatter
from qwen_engine.errors import QwenEngineError

SHARPNESS = 4.0
"""Standard deviation of the scores of random queries and keys: a few of 100,000 tokens then have most of the weight."""
MIN_SHIFT_RATIO = 3.0
SCORE_BYTES = 1 << 30
PARTS = ("check", "speed")


def main() -> int:
    args = parse_args()
    check_writable(args.results_dir)
    ModelConfig.from_folder(args.config_folder)
    torch.backends.cuda.matmul.allow_tf32 = False
    transformers.utils.logging.disable_progress_bar()
    transformers.AttentionInterface.register("in_blocks", attention_in_blocks)
    metrics: dict[str, float | None] = {}
    checks: list[Check] = []
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        if "check" in args.only:
            folder = with_yarn(args, Path(temporary) / "check", num_layers=args.check_layers)
            checkpoint = Path(temporary) / "checkpoint"
            checkpoint.mkdir()
            dtype = getattr(torch, args.dtype)
            write_random_checkpoint(folder, checkpoint, dtype, torch.device(args.device), q_norm=SHARPNESS)
            for prefix, dtype_name, num_tokens in (
                ("", args.dtype, args.prompt_tokens),
                ("fp32_", "float32", args.fp32_prompt_tokens),
            ):
                figures, found = check(args, checkpoint, dtype_name, num_tokens)
                facts = facts or found
                metrics |= {prefix + name: value for name, value in figures.items()}
                checks += tell(judge(figures, dtype_name, num_tokens))
        if "speed" in args.only:
            folder = with_yarn(args, Path(temporary) / "speed")
            figures, more_checks, facts = speed(args, folder)
            metrics |= figures
            checks += tell(more_checks)
            for name, unit in (("first_token", "s"), ("decode_step", "ms")):
                value, floor = figures.get(f"{name}_{unit}"), figures.get(f"floor_{name}_{unit}")
                beside = (
                    f", {100 * floor / value:.0f} % of it the floor of {floor:.4g} {unit}" if value and floor else ""
                )
                print(f"{name}: {number(value)} {unit}{beside}", flush=True)
    names = ("fp32_prompt_tokens", "check_layers", "rope_scaling_factor", "original_max_position_embeddings")
    parameters = {"batch_size": 1, "input_len": args.prompt_tokens, "output_len": args.output_tokens}
    parameters |= {name: getattr(args, name) for name in names} | {"random_weights": True}
    facts["engine_config"]["model"] = args.config_folder.name  # it lay in a temporary folder
    result = new_result("long-context", metrics=metrics, checks=checks, parameters=parameters, facts=facts)
    print(f"-> {write_result(result, args.results_dir)}")
    return 0 if result["status"] == "completed" else 1


def tell(checks: list[Check]) -> list[Check]:
    """Prints what was checked as soon as it is known."""
    for each in checks:
        print(f"{'ok  ' if each.passed else 'FAIL'} {each.name}: {each.detail}", flush=True)
    return checks


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--config-folder", type=Path, required=True, help="folder with the config.json of a model")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to run (default: both)")
    parser.add_argument("--rope-scaling-factor", type=float, default=4.0, help="factor of YaRN")
    parser.add_argument(
        "--original-max-position-embeddings", type=at_least(1), default=32_768, help="tokens of context that it extends"
    )
    parser.add_argument("--prompt-tokens", type=at_least(2), default=120_000, help="tokens of the prompt")
    parser.add_argument("--fp32-prompt-tokens", type=at_least(2), default=4096, help="tokens of the prompt in fp32")
    parser.add_argument("--output-tokens", type=at_least(2), default=32, help="tokens to write behind each")
    parser.add_argument("--check-layers", type=at_least(1), default=2, help="layers of the model that is checked")
    parser.add_argument("--tensor-parallel-size", type=at_least(1), default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-num-batched-tokens", type=at_least(8), default=8192, help="prompt tokens of a step")
    parser.add_argument("--bandwidth-tb-s", type=float, help="of one device, for the floor (known for the H200)")
    parser.add_argument("--tflop-s", type=float, help="of one device, for the floor (known for the H200)")
    add_results_dir_argument(parser)
    return parser.parse_args()


def with_yarn(args: argparse.Namespace, folder: Path, num_layers: int | None = None) -> Path:
    """A copy of the configuration with YaRN and, where asked for, fewer layers."""
    shutil.copytree(args.config_folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    scaling = {
        "rope_type": "yarn",
        "factor": args.rope_scaling_factor,
        "original_max_position_embeddings": args.original_max_position_embeddings,
    }
    if "rope_parameters" in config:  # as newer versions of Transformers write it
        config["rope_parameters"] = {**config["rope_parameters"], **scaling}
    else:
        config["rope_scaling"] = scaling
    # Transformers goes by this length, the engine by that of YaRN.
    config["max_position_embeddings"] = int(args.rope_scaling_factor * args.original_max_position_embeddings)
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
        config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    return folder


def engine(args: argparse.Namespace, folder: Path, dtype: str, num_prompt: int, **options: Any) -> LLM:
    return LLM(
        folder,
        dtype=dtype,
        device=args.device,
        tensor_parallel_size=args.tensor_parallel_size,
        max_model_len=num_prompt + args.output_tokens,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=min(8, args.max_num_batched_tokens),
        skip_tokenizer_init=True,
        **options,
    )


def check(
    args: argparse.Namespace, folder: Path, dtype: str, num_prompt: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Errors of the engine's output against Transformers, and the engine's facts."""
    with engine(args, folder, dtype, num_prompt) as llm:
        (prompt,) = prompts_for(llm.core.model_config.vocab_size, [num_prompt])
        params = SamplingParams(temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True, logprobs=5)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        facts = engine_facts(llm)
    tokens = output["token_ids"]
    ours = {"tokens": [tokens], "logprobs": [list(output["logprobs"])]}

    def score_in(name: str, *, shift: int = 0) -> list[torch.Tensor]:
        return [score(folder, getattr(torch, name), args.device, prompt, tokens, shift=shift)]

    exact = score_in("float32")
    figures = compare(exact, exact if dtype == "float32" else score_in(dtype), ours)
    shifted = score_in(dtype, shift=1)
    figures["shifted_error_mean"] = compare(shifted, shifted, ours)["error_mean"]
    return figures, facts


def judge(figures: dict[str, float], dtype: str, num_prompt: int) -> list[Check]:
    where = f"{dtype}, {num_prompt} tokens"
    if dtype == "float32":
        passed = figures["equal"] == figures["tokens"]
        detail = f"{figures['equal']} of {figures['tokens']} greedy tokens are Transformers'"
    else:
        passed = figures["wrong"] == 0
        detail = (
            f"{figures['equal']} of {figures['tokens']} greedy tokens are those of fp32, {figures['within_rounding']} "
            f"ties within rounding, {figures['wrong']} wrong; log-probabilities are off by {figures['error_mean']:.2g} "
            f"in the mean, Transformers' by {figures['transformers_error_mean']:.2g}"
        )
    error, shifted = figures["error_mean"], figures["shifted_error_mean"]
    seen = f"a mean error of {error:.2g}, {shifted:.2g} if half of the positions were one higher"
    return [
        Check(f"tokens ({where})", passed, detail),
        Check(f"positions ({where})", shifted > MIN_SHIFT_RATIO * error, seen),
    ]


@torch.no_grad()
def score(
    folder: Path, dtype: torch.dtype, device: str, prompt: list[int], tokens: list[int], *, shift: int
) -> torch.Tensor:
    """Transformers' log-probabilities [output tokens, vocab] (fp32, on the CPU) behind the prompt and each token.

    shift: is added to the positions of the second half.
    """
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # what the engine and earlier models have left
    # In half precision torch has a kernel that keeps no scores, but positions with a gap would make Transformers mask.
    attention = "in_blocks" if shift or dtype is torch.float32 else "sdpa"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
    options = {}
    if shift:
        positions = torch.arange(ids.shape[1], device=device)
        positions[len(positions) // 2 :] += shift
        options["position_ids"] = positions[None]
    logits = model.eval().to(device)(ids, logits_to_keep=len(tokens), use_cache=False, **options).logits[0]
    return logits.float().log_softmax(dim=-1).cpu()


def attention_in_blocks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention for Transformers, a KV head and some queries at a time, softmax in fp32.

    query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim]; result: [1, tokens, heads,
    head_dim].
    """
    assert attention_mask is None, "one sequence without padding has no mask"
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query[0].unflatten(0, (num_kv_heads, -1))
    out = torch.empty(
        num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim, dtype=query.dtype, device=query.device
    )
    block = max(1, SCORE_BYTES // (4 * num_tokens * grouped.shape[1]))
    positions = torch.arange(num_tokens, device=query.device)
    for start in range(0, num_tokens, block):
        end = min(start + block, num_tokens)
        hidden = positions[None, :end] > positions[start:end, None]
        for head in range(num_kv_heads):
            scores = (grouped[head, :, start:end] @ key[0, head, :end].T).float() * scaling
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1).to(value.dtype)
            out[start:end, head] = (weights @ value[0, head, :end]).transpose(0, 1)
    return out.flatten(1, 2)[None], None


def speed(args: argparse.Namespace, folder: Path) -> tuple[dict[str, float | None], list[Check], dict[str, Any]]:
    """Figures of one prompt at full depth and their floors, what had to hold, and the engine's facts."""
    with engine(args, folder, args.dtype, args.prompt_tokens, load_format="dummy") as llm:
        model, dtype_bytes = llm.core.model_config, llm.core.setup.dtype.itemsize
        source = PromptSource(model.vocab_size)
        warm_up = min(args.prompt_tokens, 2 * args.max_num_batched_tokens)
        runs = [
            run_random(llm, "warm-up", source, [warm_up], [2]),
            run_random(llm, "long", source, [args.prompt_tokens], [args.output_tokens]),
        ]
        facts = engine_facts(llm)
    row = runs[1].rows[0]
    first_s, step_s = row["ttft_s"], row["tpot_s"]
    metrics: dict[str, float | None] = {
        "concurrency": 1,
        "first_token_s": first_s,
        "prefill_tok_s": None if first_s is None else args.prompt_tokens / first_s,
        "decode_step_ms": None if step_s is None else 1e3 * step_s,
    }
    ceiling = find_ceiling(args, facts)
    if ceiling is not None:
        floors = floors_s(model, ceiling, args, dtype_bytes)
        metrics |= {"floor_first_token_s": floors[0], "floor_decode_step_ms": 1e3 * floors[1]}
        metrics |= {"floor_read_tb_s": ceiling.bytes_s / 1e12, "floor_tflop_s": ceiling.flop_s / 1e12}
    return metrics, check_batches(runs), facts


def find_ceiling(args: argparse.Namespace, facts: dict[str, Any]) -> Ceiling | None:
    """The limits of one device, given or known."""
    known = CEILINGS.get(device_label(facts).split("x")[0])
    bytes_s = args.bandwidth_tb_s * 1e12 if args.bandwidth_tb_s else known and known.bytes_s
    flop_s = args.tflop_s * 1e12 if args.tflop_s else known and known.flop_s
    return Ceiling(bytes_s, flop_s) if bytes_s and flop_s else None


def floors_s(model: ModelConfig, ceiling: Ceiling, args: argparse.Namespace, dtype_bytes: int) -> tuple[float, float]:
    """Least time to the first token and of a decode step, in seconds."""
    shape = {"num_rows": 1, "dtype_bytes": dtype_bytes, "num_ranks": args.tensor_parallel_size}
    prefill = prefill_parts(model, new_tokens=args.prompt_tokens, **shape)
    decode = decode_parts(model, context_tokens=args.prompt_tokens + args.output_tokens / 2, **shape)
    return floor_s(prefill, ceiling), floor_s(decode, ceiling)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QwenEngineError as error:
        sys.exit(f"error: {error}")

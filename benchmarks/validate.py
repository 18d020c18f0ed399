"""The engine against Transformers on the same weights: logits, greedy tokens and speed, in one run.

    python benchmarks/validate.py --config-folder CONFIG [--dtype bfloat16] [--json FILE]
    python benchmarks/validate.py --model FOLDER

With --config-folder a random checkpoint of that shape is written to a temporary folder first, and both load it.
Greedy tokens are compared by letting Transformers score the engine's own output: at each position its best token must
be the engine's, or the two logits must lie within the rounding of the dtype (a tie, counted as a flip).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from qwen_engine import LLM, SamplingParams
from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.models.weights import sharding_table

SHARD_BYTES = 4 << 30
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then it",
    "人工智能正在改变世界，因为",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
]
# Largest gap between the two best logits, relative to the largest logit, that rounding may close: a few units in the
# last place of the dtype, grown through the layers. Random weights leave gaps down to zero; trained ones do not.
TIE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}


def write_random_checkpoint(config_folder: Path, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """N(0, 0.02²) matrices and norms around 1, in shards of at most 4 GiB, with config and tokenizer copied."""
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
        mean = 1.0 if "norm" in entry.name else 0.0
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


def engine_outputs(args: argparse.Namespace, folder: Path) -> dict:
    """Greedy tokens, their log-probabilities and the speed of this engine."""
    has_tokenizer = (folder / "tokenizer.json").exists()
    start = time.perf_counter()
    llm = LLM(folder, dtype=args.dtype, device=args.device, max_model_len=4096, skip_tokenizer_init=not has_tokenizer)
    ready_s = time.perf_counter() - start
    prompts: list = prompts_for(llm._core.model_config.vocab_size, args.lengths)
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
        batch_prompts = prompts_for(llm._core.model_config.vocab_size, [args.prompt_len] * batch)

        def timed(num_tokens: int, batch_prompts: list[list[int]] = batch_prompts) -> float:
            llm.reset_prefix_cache()
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            begin = time.perf_counter()
            llm.generate(
                batch_prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False
            )
            return time.perf_counter() - begin

        timed(2)
        first = min(timed(1) for _ in range(2))
        result["speed"].append((batch, first, (timed(args.max_tokens) - first) / (args.max_tokens - 1)))
    llm.close()
    return result


@torch.no_grad()
def reference_comparison(args: argparse.Namespace, folder: Path, ours: dict) -> tuple[dict, list]:
    """Scores our outputs with Transformers, and times its own generate on the same batches."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).to(args.device)
    model.eval()
    num_equal = num_flips = num_wrong = 0
    errors, gaps = [], []
    for prompt, tokens, rows in zip(ours["prompts"], ours["tokens"], ours["logprobs"]):
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=args.device)
        logits = model(ids).logits[0, len(prompt) - 1 :].float()
        logprobs = logits.log_softmax(dim=-1)
        best = logits.argmax(dim=-1).tolist()
        for position, (token, row) in enumerate(zip(tokens, rows)):
            for other, value in row.items():
                errors.append(abs(value.logprob - float(logprobs[position, other])))
            if best[position] == token:
                num_equal += 1
                continue
            gap = float(logits[position, best[position]] - logits[position, token])
            gaps.append(gap / float(logits[position].abs().max()))
            if gaps[-1] <= TIE[args.dtype]:
                num_flips += 1
            else:
                num_wrong += 1
    speed = []
    for batch in args.batches:
        ids = torch.tensor(prompts_for(model.config.vocab_size, [args.prompt_len] * batch), device=args.device)

        def timed(num_tokens: int, ids: torch.Tensor = ids) -> float:
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            begin = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                temperature=None,
                top_k=None,
                top_p=None,
                pad_token_id=0,
            )
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            return time.perf_counter() - begin

        timed(2)
        first = min(timed(1) for _ in range(2))
        speed.append((batch, first, (timed(args.max_tokens) - first) / (args.max_tokens - 1)))
    figures = {
        "tokens_compared": num_equal + num_flips + num_wrong,
        "equal": num_equal,
        "flips_within_rounding": num_flips,
        "wrong": num_wrong,
        "largest_flip_gap": max(gaps, default=0.0),
        "logprob_error_max": max(errors),
        "logprob_error_mean": statistics.fmean(errors),
    }
    return figures, speed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="a checkpoint folder")
    source.add_argument("--config-folder", type=Path, help="a config.json's folder; weights are made up")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TIE))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=512, help="prompt length of the speed runs")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 15, 16, 17, 100, 257, 1000])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model
        if folder is None:
            folder = Path(temporary)
            write_random_checkpoint(args.config_folder, folder, getattr(torch, args.dtype), torch.device(args.device))
        ours = engine_outputs(args, folder)
        figures, reference_speed = reference_comparison(args, folder, ours)
    name = (args.config_folder or args.model).name
    print(f"{name} {args.dtype} on {args.device}: ready in {ours['ready_s']:.1f} s")
    print("  " + ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    rows = []
    for (batch, first, step), (_, their_first, their_step) in zip(ours["speed"], reference_speed):
        rows.append(
            {
                "batch": batch,
                "prompt_len": args.prompt_len,
                "engine_first_token_s": first,
                "engine_decode_tok_s": batch / step,
                "transformers_first_token_s": their_first,
                "transformers_decode_tok_s": batch / their_step,
            }
        )
        print(
            f"  batch {batch:3d}: decode {batch / step:8.1f} tok/s (Transformers {batch / their_step:8.1f}), "
            f"first token {1e3 * first:7.1f} ms (Transformers {1e3 * their_first:7.1f})"
        )
    if args.json:
        record = {"model": name, "dtype": args.dtype, "ready_s": ours["ready_s"], **figures, "speed": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

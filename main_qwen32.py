"""Qwen3-32B on two GPUs: completes prompts and prints the speed, or runs stress suites (--suite all).

python main_qwen32.py                                          starts its ranks itself
torchrun --nproc-per-node 2 main_qwen32.py                     uses torchrun's
python main_qwen32.py --model demo --device cpu                two ranks on the CPU, the embedded demo model
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

from qwen_engine import LLM, SamplingParams
from qwen_engine.bench.output import add_results_dir_argument
from qwen_engine.bench.stress import add_suite_arguments, run_and_print
from qwen_engine.cli import DEFAULT_MAX_TOKENS, check_room
from qwen_engine.engine_args import HelpFormatter
from qwen_engine.errors import QwenEngineError

DEFAULT_PROMPTS = ["The Zen of Python", "def mean(data):"]
HINT = "without two GPUs or the weights, try: python main_qwen32.py --model demo --device cpu"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="python main_qwen32.py [options]", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--model", default="Qwen/Qwen3-32B", help="folder, Hugging Face repository, or demo")
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=ranks, metavar="N", help="ranks (default: 2, or torchrun's)"
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda")
    parser.add_argument(
        "--load-format",
        default="auto",
        metavar="NAME",
        help="dummy takes random weights: no download, and output without meaning",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of prompt + output (default: what the checkpoint allows)",
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to complete; repeatable")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"most tokens to write (default: {DEFAULT_MAX_TOKENS})"
    )
    add_suite_arguments(parser)
    add_results_dir_argument(parser)
    return parser.parse_args()


def missing_gpus(args: argparse.Namespace) -> str:
    """What to say of GPUs before any other error; nothing if there are enough, or none are wanted."""
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", args.tensor_parallel_size))
    found = torch.cuda.device_count()
    return "" if args.device == "cpu" or found >= needed else f"{needed} GPUs are needed, this machine has {found}; "


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    names = ("tensor_parallel_size", "device", "load_format", "max_model_len")
    options = {name: getattr(args, name) for name in names}
    if args.suite:
        return run_and_print(args, options)
    with LLM(args.model, **options) as llm:
        print(f"ready in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        prompts = args.prompt or DEFAULT_PROMPTS
        for prompt in prompts:
            check_room(llm, llm.encode(prompt), args.max_tokens)
        max_tokens = DEFAULT_MAX_TOKENS if args.max_tokens is None else args.max_tokens
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    for prompt, output in zip(prompts, outputs):
        print(f"{prompt}{output['text']}\n")
    first_token_s = max(output.metrics.first_token_s for output in outputs)
    decode_s = max(output.metrics.finished_s for output in outputs) - first_token_s
    num_decoded = sum(len(output["token_ids"]) - 1 for output in outputs)
    speed = f", {num_decoded / decode_s:.1f} tok/s" if num_decoded and decode_s > 0 else ""
    print(f"first token {first_token_s:.3f} s{speed}", file=sys.stderr)
    return 0


def main() -> int:
    args = parse_args()
    try:
        return run(args)
    except QwenEngineError as error:
        # Any rank may be the one that fails, or the last one that torchrun lets speak.
        is_demo = args.model == "demo" and args.device == "cpu"
        hint = f"\n{HINT}" if os.environ.get("RANK", "0") == "0" and not is_demo else ""
        print(f"error: {missing_gpus(args)}{error}{hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

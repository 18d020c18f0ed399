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
from qwen_engine.cli import DEFAULT_MAX_TOKENS, check_room, print_summary
from qwen_engine.engine_args import HelpFormatter, add_engine_arguments, engine_options
from qwen_engine.errors import QwenEngineError

DEFAULT_PROMPTS = ["The Zen of Python", "def mean(data):"]
USAGE = "python main_qwen32.py [options]"
HINT = "without two GPUs or the weights, try: python main_qwen32.py --model demo --device cpu"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(usage=USAGE, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-32B", help="folder, Hugging Face repository, or demo")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to complete; repeatable")
    parser.add_argument("--max-tokens", type=int, metavar="N", help=f"to write at most (default: {DEFAULT_MAX_TOKENS})")
    add_suite_arguments(parser)
    add_results_dir_argument(parser)
    add_engine_arguments(parser)
    parser.set_defaults(engine_tensor_parallel_size=int(os.environ.get("WORLD_SIZE", "2")))
    return parser.parse_args()


def missing_gpus(args: argparse.Namespace) -> str:
    """What to say of GPUs before any other error."""
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", args.engine_tensor_parallel_size))
    found = needed if args.engine_device == "cpu" else torch.cuda.device_count()
    return "" if found >= needed else f"{needed} GPUs are needed, this machine has {found}; "


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    prompts = args.prompt or DEFAULT_PROMPTS
    with LLM(args.model, **engine_options(args)) as llm:
        print(f"ready in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        for prompt in prompts:
            check_room(llm, llm.encode(prompt), args.max_tokens)
        max_tokens = DEFAULT_MAX_TOKENS if args.max_tokens is None else args.max_tokens
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    for prompt, output in zip(prompts, outputs):
        print(f"{prompt}{output['text']}\n")
    print_summary(outputs, max_tokens)
    return 0


def main() -> int:
    args = parse_args()
    try:
        return run_and_print(args, engine_options(args)) if args.suite else run(args)
    except QwenEngineError as error:
        # Any rank may be the one that fails, or the last one that torchrun lets speak.
        is_demo = (args.model, args.engine_device) == ("demo", "cpu")
        hint = f"\n{HINT}" if os.environ.get("RANK", "0") == "0" and not is_demo else ""
        print(f"error: {missing_gpus(args)}{error}{hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

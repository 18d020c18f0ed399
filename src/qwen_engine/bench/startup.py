"""Measure how long a fresh process takes until the model is ready, and until its first token.

Each iteration is a process of its own: imports, weights, KV cache and graphs are all in the figure.
"""

from __future__ import annotations

import time

_PROCESS_START = time.perf_counter()  # before the heavy imports below

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from tqdm import tqdm

from qwen_engine.bench.output import add_common_arguments, add_results_dir_argument, at_least, describe, exit_code
from qwen_engine.bench.results import Check, new_result, write_result
from qwen_engine.engine_args import engine_options

SPANS = ("import_s", "load_s", "ready_s", "first_output_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-iters", type=at_least(1), default=3, help="processes that are started (3)")
    parser.add_argument("--input-len", type=at_least(1), default=128, help="prompt tokens of the first request (128)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # this is one of the processes
    add_results_dir_argument(parser)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """`bench startup`: one result file, its table on stdout."""
    if args.inside:
        sys.stdout.write(json.dumps(_start_here(args)) + "\n")
        return 0

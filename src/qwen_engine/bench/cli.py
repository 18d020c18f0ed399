"""Command lines of `bench …` and `results …`: arguments in, tables out. `cli` calls it; every command loads lazily.

A command is a module of this package with `add_arguments(parser)`, `run(args) -> exit code` and, if it takes more than
options, `USAGE`. Exit codes: 0 done, 1 a check failed or a figure got worse, 2 bad input, 130 interrupted (what was
measured is kept).
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from qwen_engine.engine_args import HelpFormatter

DESCRIPTIONS = {
    "bench": "Measure an engine.",
    "results": "Compare and report result files.",
}
COMMANDS = {
    "bench": {
        "stress": "stress suites: prefix cache, concurrency, long outputs; each asserts what must hold",
        "throughput": "many requests at once: requests and tokens per second",
        "latency": "one batch, repeated: time to the first token, time per decode step",
        "startup": "a fresh process until the model is ready, and its first token",
        "serve": "load on an OpenAI-compatible server over HTTP",
    },
    "results": {
        "compare": "two results, metric by metric; exit code 1 if the new one is worse",
        "report": "a README.md with tables and plots of all results",
    },
}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """argv: "bench" or "results", a command, its options. The namespace has `run(args)` and `verbose`."""
    group, rest = argv[0], list(argv[1:])
    commands = COMMANDS[group]
    if not rest or rest[0] not in commands:
        parser = argparse.ArgumentParser(
            prog=f"python -m qwen_engine {group}",
            description=DESCRIPTIONS[group],
            epilog="commands:\n"
            + "\n".join(f"  {name:12}{text}" for name, text in commands.items())
            + "\n\nEach has a --help of its own.",
            usage=f"python -m qwen_engine {group} {'|'.join(commands)} [options]",
            formatter_class=HelpFormatter,
        )
        parser.add_argument("command", choices=list(commands), metavar="|".join(commands), help="see below")
        parser.parse_args(rest)
        parser.error("the command comes first, its options after it")
    module = importlib.import_module(f"qwen_engine.bench.{rest[0]}")
    parser = argparse.ArgumentParser(
        prog=f"python -m qwen_engine {group} {rest[0]}",
        description=module.__doc__,
        usage=f"%(prog)s {getattr(module, 'USAGE', '[options]')}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(verbose=False, run=module.run, argv=list(argv))
    module.add_arguments(parser)
    return parser.parse_args(rest[1:])

"""The stress suites as a script: `python benchmarks/stress.py --model MODEL --suite all`, or under torchrun.

The same as `python -m qwen_engine bench stress`; under torchrun, tensor_parallel_size is the number of its ranks.
"""

from __future__ import annotations

import os
import sys

from qwen_engine.cli import main

if __name__ == "__main__":
    ranks = os.environ.get("WORLD_SIZE", "1")
    sys.exit(main(["bench", "stress", "--tensor-parallel-size", ranks, *sys.argv[1:]]))

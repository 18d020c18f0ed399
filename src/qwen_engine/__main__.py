"""`python -m qwen_engine`: see `cli`."""

import sys

from qwen_engine.cli import main

if __name__ == "__main__":
    sys.exit(main())

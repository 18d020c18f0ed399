"""Compiles one untrusted grammar in a process that may die of it: `python -P grammar_check.py SECONDS`.

A short grammar can take minutes or crash the library, and a thread cannot be stopped. The grammar comes on stdin, what
is wrong with it (nothing if it is fine) goes to stdout. Started by `structured`, which compiles with the same limits.
"""

import resource
import sys
from typing import Any

MAX_MEMORY_BYTES = 2 << 30  # of address space, of which the library itself takes a tenth


def parser_limits() -> Any:
    """Limits of llguidance: some 10 ms for a step, some 50 MB for a grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000,
        step_max_items=20_000,
        max_lexer_states=30_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


class ByteVocabulary:
    """A token for each byte, enough to compile with."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main(cpu_limit_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[])
    grammar = sys.stdin.buffer.read().decode()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error() and not any(matcher.compute_bitmask()) and not matcher.is_error():
        sys.stdout.write("no text satisfies it")
    sys.stdout.write(matcher.get_error())


if __name__ == "__main__":
    main(cpu_limit_s=int(sys.argv[1]))

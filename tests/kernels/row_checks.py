"""Checks that a row's bits are the same in every batch; floats are compared with ==. `impl` as in kernel_checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from kernel_checks import cache_rows, generator, make_pages, normal, split_decodes


def check_rows(function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *inputs: torch.Tensor) -> None:
    """`function` of some rows of the inputs, first dimension, gives those rows of what it gives for all of them."""

    def results(rows: slice) -> list[torch.Tensor]:
        result = function(*(tensor[rows].clone() for tensor in inputs))
        return list(result) if isinstance(result, tuple) else [result]

    num_rows = len(inputs[0])
    whole = results(slice(0, num_rows))
    spans = [(row, row + 1) for row in {0, 1, num_rows // 3, num_rows - 1} if row < num_rows]
    spans += [(0, size) for size in (2, 15, 16, 17, 31, 33, 64, 65, 128, 129, 257, 1000) if size < num_rows]
    spans += [(first, num_rows) for first in (1, 3, num_rows // 2) if first < num_rows]
    for first, last in spans:
        for part, result in zip(results(slice(first, last)), whole):
            assert torch.equal(part, result[first:last]), (first, last)


def check_products(
    impl: ModuleType, device: str, dtype: torch.dtype, tokens: int, rows: int, columns: int, *, stretch: float = 1.0
) -> None:
    """stretch: factor between the sizes of neighbouring columns, for sums in which much cancels."""
    rng = generator(device, tokens, rows, columns)
    x, weight = normal(rng, tokens, columns, dtype=dtype), normal(rng, 2 * rows, columns, dtype=dtype)
    x *= torch.logspace(0, stretch, columns, device=device).to(dtype)
    weight *= columns**-0.5
    check_rows(lambda x: impl.linear(x, weight), x)
    check_rows(lambda x: impl.gated_linear(x, weight), x)


def check_norms(impl: ModuleType, device: str, dtype: torch.dtype, tokens: int, hidden: int) -> None:
    rng = generator(device, tokens, hidden)
    x, residual = normal(rng, tokens, hidden, dtype=dtype), normal(rng, tokens, hidden, dtype=dtype)
    weight = normal(rng, hidden, dtype=dtype)

    def add_rms_norm(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return impl.add_rms_norm(x[None], residual, weight, 1e-6), residual

    check_rows(add_rms_norm, x, residual)
    if hasattr(impl, "rms_norm"):
        check_rows(lambda x: impl.rms_norm(x, weight, 1e-6), x)


def check_logprobs(impl: ModuleType, device: str, dtype: torch.dtype, rows: int, vocab_size: int) -> None:
    rng = generator(device, rows, vocab_size)
    logits = normal(rng, rows, vocab_size, dtype=dtype) * 4
    token_ids = torch.randint(0, vocab_size, (rows,), generator=rng, device=device)
    check_rows(impl.token_logprobs, logits, token_ids)
    check_rows(lambda logits: impl.best_ids(logits, 5), logits)


def check_filters(impl: ModuleType, device: str, vocab_size: int) -> None:
    """Rows whose neighbours have other filters, or none."""
    rng = generator(device, vocab_size)
    rows = 12
    logits = normal(rng, rows, vocab_size, dtype=torch.float32) * 3
    temperature = torch.full((rows,), 0.9, device=device)
    top_k = torch.tensor([vocab_size, 5, 50, vocab_size], device=device).repeat(rows // 4)
    top_p = torch.tensor([0.9, 0.8, 1.0], device=device).repeat(rows // 3)
    min_p = torch.tensor([0.0, 0.01], device=device).repeat(rows // 2)
    check_rows(impl.lowest_kept, logits, temperature, top_k, top_p, min_p)


def check_attention(
    impl: ModuleType,
    device: str,
    dtype: torch.dtype,
    *,
    length: int,
    cuts: Sequence[Sequence[int]],
    decoded: Sequence[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
) -> None:
    """The tokens of a sequence as a whole prompt, in chunks that end at each of the `cuts`, and decoding.

    decoded: lengths at which the last token is decoded, all in one batch and the last of them alone.
    """
    num_heads, num_kv_heads = heads
    rng = generator(device, length, *heads, head_dim, block_size)
    others = [70, 0, 2 * length]
    pages = make_pages(
        rng, [length, *others], num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    for row, count in enumerate([length, *others]):
        blocks, rows = cache_rows(pages, row, count)
        for cache in (pages.k_cache, pages.v_cache):
            cache[blocks, :, rows] = normal(rng, count, num_kv_heads, head_dim, dtype=dtype)
    q = normal(rng, length, num_heads, head_dim, dtype=dtype) * 2
    caches, scale = (pages.k_cache, pages.v_cache, pages.block_tables), head_dim**-0.5

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def prefill(first: int, last: int, slots: torch.Tensor, *lens: int) -> torch.Tensor:
        """Tokens [first, last) behind those before them, and behind them one query of each other row of the batch."""
        queries = torch.cat([q[first:last], q[: len(lens)]])
        starts = int32(0, *range(last - first, len(queries) + 1))
        result = impl.prefill_attention(
            queries, *caches, slots, starts, int32(last, *lens), scale, last - first, max(last, *lens, 1)
        )
        return result[: last - first]

    def decode(
        lens: torch.Tensor, max_seq_len: int, live_rows: torch.Tensor | None = None, programs: int | None = None
    ) -> torch.Tensor:
        rows, slots = lens.long() - 1, slot.repeat(len(lens))
        splits = split_decodes(impl, *caches, slots, lens, max_seq_len, live_rows, programs)
        return impl.decode_attention(q[rows], *caches, slots, lens, scale, splits)

    slot = pages.slots[:1]
    expected = prefill(0, length, slot)
    assert torch.equal(prefill(0, length, pages.slots, *others), expected)
    for ends in cuts:
        parts = [prefill(first, last, slot) for first, last in zip([0, *ends], [*ends, length])]
        assert torch.equal(torch.cat(parts), expected), ends
    lens = int32(*decoded)
    last_tokens = expected[lens.long() - 1]
    for programs in (None, 1, 3 * len(lens) * num_kv_heads):
        assert torch.equal(decode(lens, length, programs=programs), last_tokens), programs
    assert torch.equal(decode(lens, 5 * length), last_tokens)
    assert torch.equal(decode(lens[-1:], length), last_tokens[-1:])
    padded = torch.cat([lens, torch.zeros_like(lens)])
    assert torch.equal(decode(padded, length, live_rows=int32(len(lens)))[: len(lens)], last_tokens)

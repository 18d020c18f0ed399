"""What a decode step does to the lengths and tokens of its slots: a few integers a row, many rows a program."""

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import cdiv
from qwen_engine.kernels.gpu.launching import Kernel

_ROWS = 256


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _decode_inputs_kernel(slots, num_tokens, positions, seq_lens, rows, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=-1).to(tl.int64)
    length = tl.load(num_tokens + slot, mask=slot >= 0, other=0)
    tl.store(positions + row, tl.maximum(length - 1, 0), mask=inside)
    tl.store(seq_lens + row, length, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(
    tokens, slots, token_table, num_tokens, token_ids, rows, table_stride, KEYS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=-1).to(tl.int64)
    live = slot >= 0
    token = tl.load(tokens + row, mask=live, other=0)
    if KEYS:
        token = tl.where(live, ~token & 0xFFFFFFFF, 0)
        tl.store(token_ids + row, token, mask=inside)
    length = tl.load(num_tokens + slot, mask=live, other=0)
    tl.store(token_table + slot * table_stride + length, token.to(tl.int32), mask=live)
    tl.store(num_tokens + slot, length + 1, mask=live)


def decode_inputs(
    slots: torch.Tensor, num_tokens: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    rows = slots.shape[0]
    _decode_inputs_kernel[(cdiv(rows, _ROWS),)](slots, num_tokens, positions, seq_lens, rows, ROWS=_ROWS)


def advance(token_ids: torch.Tensor, slots: torch.Tensor, token_table: torch.Tensor, num_tokens: torch.Tensor) -> None:
    _launch_advance(token_ids, slots, token_table, num_tokens, token_ids, keys=False)


def advance_to_best(
    keys: torch.Tensor,
    slots: torch.Tensor,
    token_table: torch.Tensor,
    num_tokens: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    _launch_advance(keys, slots, token_table, num_tokens, token_ids, keys=True)


def _launch_advance(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    token_table: torch.Tensor,
    num_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    keys: bool,
) -> None:
    rows = slots.shape[0]
    _advance_kernel[(cdiv(rows, _ROWS),)](
        tokens, slots, token_table, num_tokens, token_ids, rows, token_table.stride(0), KEYS=keys, ROWS=_ROWS
    )

"""SwiGLU's product and the vocabulary-parallel embedding look-up."""

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import cdiv, let_next_start, next_power_of_2, pdl_options, wait_for_inputs
from qwen_engine.kernels.gpu.launching import Kernel


@Kernel
@triton.jit
def _silu_mul_kernel(gate_up, out, row_stride, inter, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inter
    gate_row = gate_up + row * row_stride
    gate = tl.load(gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_row + inter + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inter + columns, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    tokens, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, inter), dtype=gate_up.dtype, device=gate_up.device)
    block = min(next_power_of_2(inter), 1024)
    _silu_mul_kernel[(tokens, cdiv(inter, block))](
        gate_up, out, gate_up.stride(0), inter, BLOCK=block, **pdl_options(gate_up.device)
    )
    return out


@Kernel
@triton.jit
def _embed_kernel(
    token_table, slots, positions, weight, out, table_stride, vocab_start, vocab_rows, hidden, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    target = out + token * hidden + columns
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        tl.store(target, tl.zeros([BLOCK], out.dtype.element_ty), mask=inside)
        return
    token_id = tl.load(token_table + slot * table_stride + tl.load(positions + token))
    row = token_id.to(tl.int64) - vocab_start
    owned_columns = tl.where((row >= 0) & (row < vocab_rows), hidden, 0)
    values = tl.load(weight + row * hidden + columns, mask=columns < owned_columns, other=0.0)
    tl.store(target, values, mask=inside)


def embed_tokens(
    token_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, vocab_start: int
) -> torch.Tensor:
    tokens, (vocab_rows, hidden) = slots.shape[0], weight.shape
    out = torch.empty((tokens, hidden), dtype=weight.dtype, device=weight.device)
    block = min(next_power_of_2(hidden), 2048)
    _embed_kernel[(tokens, cdiv(hidden, block))](
        token_table,
        slots,
        positions,
        weight,
        out,
        token_table.stride(0),
        vocab_start,
        vocab_rows,
        hidden,
        BLOCK=block,
    )
    return out

"""RMS norm, alone and with the residual add in front of it: one program per row, one read and one write of it."""

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import let_next_start, next_power_of_2, pdl_options, wait_for_inputs
from qwen_engine.kernels.gpu.launching import Kernel
from qwen_engine.kernels.gpu.matrix_products import starts_early


@Kernel
@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    part_stride,
    x_stride,
    residual_stride,
    hidden,
    eps,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    if EARLY:
        let_next_start(PDL)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if not EARLY:
        let_next_start(PDL)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        values += tl.load(x + part * part_stride + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual_row = residual + row * residual_stride + columns
        values += tl.load(residual_row, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_row, values.to(residual.dtype.element_ty), mask=inside)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / hidden + eps)
    tl.store(out + row * hidden + columns, (values * inverse_rms * scale).to(out.dtype.element_ty), mask=inside)


def _launch(parts: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_parts, tokens, hidden = parts.shape
    out = torch.empty((tokens, hidden), dtype=weight.dtype, device=parts.device)
    block = next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        parts,
        parts if residual is None else residual,
        weight,
        out,
        parts.stride(0),
        parts.stride(1),
        0 if residual is None else residual.stride(0),
        hidden,
        eps,
        PARTS=num_parts,
        ADD=residual is not None,
        BLOCK=block,
        EARLY=starts_early(tokens, weight.dtype, parts.device),
        num_warps=min(max(block // 512, 1), 16),
        **pdl_options(parts.device),
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x[None], None, weight, eps)


def add_rms_norm(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(parts, residual, weight, eps)

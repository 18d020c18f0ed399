"""Matrix products y = x Wᵀ: those of `linear_hopper` where they can run and are the faster ones, else cuBLAS."""

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from qwen_engine.kernels.gpu.common import has_hopper_kernels, num_sms
from qwen_engine.kernels.gpu.elementwise import silu_mul
from qwen_engine.kernels.gpu.linear_tiles import MAX_FEW_ROWS, Tiles, tiles_for_few_rows, tiles_for_many_rows

_VOCABULARY_ROWS = 100_000  # of a weight that is large enough for cuBLAS to be the faster one
_MAX_ROWS_OF_LOGITS = 32


@functools.cache
def _hopper_product(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """`linear_hopper.product` where it can run."""
    if not has_hopper_kernels(device):
        return None
    from qwen_engine.kernels.gpu import linear_hopper

    return linear_hopper.product


def starts_early(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product with so many rows of x reads its weight while the kernel in front of it still runs."""
    return rows <= MAX_FEW_ROWS and dtype in (torch.bfloat16, torch.float16) and _hopper_product(device) is not None


def _tiles(x: torch.Tensor, weight: torch.Tensor, *, gated: bool, in_parts: bool) -> Tiles | None:
    """None where cuBLAS is faster."""
    (rows, num_columns), num_rows = x.shape, weight.shape[0]
    if rows > MAX_FEW_ROWS:
        return tiles_for_many_rows(rows, num_columns) if gated else None
    if num_rows >= _VOCABULARY_ROWS and rows > _MAX_ROWS_OF_LOGITS:
        return None
    return tiles_for_few_rows(num_rows, num_columns, rows, num_sms(x.device), gated=gated, in_parts=in_parts)


def hopper_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    gated: bool = False,
    in_parts: bool = False,
) -> torch.Tensor | None:
    """[splits, rows, n] by `linear_hopper`, one split unless in_parts; None where it cannot run or is slower."""
    product = _hopper_product(x.device)
    if product is None or x.dtype not in (torch.bfloat16, torch.float16) or (gated and weight.shape[0] % 16):
        return None
    if out is not None and not out.is_contiguous():
        return None
    for operand in (x, weight) if out is None else (x, weight, out):  # the copy engine takes steps of 16 bytes
        aligned = operand.data_ptr() % 16 == 0 and operand.stride(0) % 8 == 0 and operand.stride(1) == 1
        if operand.dtype != x.dtype or not aligned:
            return None
    tiles = _tiles(x, weight, gated=gated, in_parts=in_parts)
    return None if tiles is None else product(x, weight, tiles, out, gated=gated)


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = hopper_product(x, weight, in_parts=True)
    return F.linear(x, weight)[None] if parts is None else parts


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    parts = hopper_product(x, weight, out)
    return torch.mm(x, weight.t(), out=out) if parts is None else parts[0]


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = hopper_product(x, weight, gated=True)
    return silu_mul(F.linear(x, weight)) if parts is None else parts[0]

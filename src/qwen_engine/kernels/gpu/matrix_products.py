"""Matrix products y = x Wᵀ: cuBLAS, and for few rows of x on Hopper `linear_hopper`, which starts early and reads the
weight faster."""

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from qwen_engine.kernels.gpu.common import has_hopper_kernels, num_sms
from qwen_engine.kernels.gpu.elementwise import silu_mul
from qwen_engine.kernels.gpu.linear_tiles import MAX_ROWS, tiles_for

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
    return rows <= MAX_ROWS and dtype in (torch.bfloat16, torch.float16) and _hopper_product(device) is not None


def few_rows_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    gated: bool = False,
    in_parts: bool = False,
) -> torch.Tensor | None:
    """[splits, rows, n] by `linear_hopper`; None where it cannot run or is the slower one."""
    (rows, num_columns), num_rows = x.shape, weight.shape[0]
    if not starts_early(rows, x.dtype, x.device) or (num_rows >= _VOCABULARY_ROWS and rows > _MAX_ROWS_OF_LOGITS):
        return None
    operands = (x, weight) if out is None else (x, weight, out)
    # The copy engine takes steps of 16 bytes.
    if any(t.dtype != x.dtype or t.data_ptr() % 16 or t.stride(0) % 8 or t.stride(1) != 1 for t in operands):
        return None
    hopper = _hopper_product(x.device)
    assert hopper is not None
    tiles = tiles_for(num_rows, num_columns, rows, num_sms(x.device), gated=gated, in_parts=in_parts)
    return hopper(x, weight, tiles, out, gated=gated)


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = few_rows_product(x, weight, in_parts=True)
    return F.linear(x, weight)[None] if parts is None else parts


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    parts = few_rows_product(x, weight, out)
    return torch.mm(x, weight.t(), out=out) if parts is None else parts[0]


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = few_rows_product(x, weight, gated=True)
    return silu_mul(F.linear(x, weight)) if parts is None else parts[0]

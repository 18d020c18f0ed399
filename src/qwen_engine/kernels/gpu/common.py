"""What the attention kernels share: the walk through the pages, the dtype of dot operands, facts about the device."""

import os
from functools import cache

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Dtype that operands of `dtype` are handed to tl.dot in.

    The interpreter keeps bf16 as raw 16-bit integers and would multiply those, so there bf16 goes in as fp32.
    """
    if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
        return tl.float32
    return _TRITON_DTYPES[dtype]


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a stand-in for the CPU of the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@triton.jit
def cache_rows(
    table,
    first,
    end,
    stride_block,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Offsets [BLOCK_N, 1] of the tokens first, first + 1, ... in one head of the cache; int64.

    `table` is the slot's row of the block table and `first` a multiple of BLOCK_N. With MASKED, table entries past
    the token end - 1 are not read.
    """
    lane = tl.arange(0, BLOCK_N)
    # What does not depend on `first` is written apart from it, so that it stays out of the loop.
    if BLOCK_SIZE >= BLOCK_N:
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        row = first % BLOCK_SIZE + lane
    else:
        entry = table + first // BLOCK_SIZE + lane // BLOCK_SIZE
        if MASKED:
            block = tl.load(entry, mask=first + lane < end, other=0).to(tl.int64)
        else:
            block = tl.load(entry).to(tl.int64)
        row = lane % BLOCK_SIZE
    return (block * stride_block + row * HEAD_DIM)[:, None]

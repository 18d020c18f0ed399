"""What the attention kernels share: the dtype of dot operands and facts about the device."""

import os
from functools import cache

import torch
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

"""What the attention kernels share: the walk through the pages, the dtype of dot operands, facts about the device."""

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

_FEW_ROWS = 64

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's function of that name takes more than a microsecond, as does the next; a layer calls
    them twenty times."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The lowest power of two that is at least n, which is positive."""
    return 1 << (n - 1).bit_length()


def rows_to_search(rows: int, block_tables: torch.Tensor) -> int:
    """How many of the rows a program looks through for its own: few, or as many as there can be, in two kernels."""
    return _FEW_ROWS if rows <= _FEW_ROWS else next_power_of_2(max(rows, len(block_tables)))


@triton.jit
def find_row(index, counts):
    """The row that number `index` of these counts [rows], one after another, belongs to, and its number there."""
    ends = tl.cumsum(counts, 0)
    before = ends <= index
    return tl.sum(before.to(tl.int32), 0), index - tl.max(tl.where(before, ends, 0), 0)


@cache
def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Dtype that operands of `dtype` are handed to tl.dot in.

    The interpreter keeps bf16 as raw 16-bit integers and would multiply those, so there bf16 goes in as fp32.
    """
    if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
        return tl.float32
    return _TRITON_DTYPES[dtype]


@cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options of kernels that call `wait_for_inputs` and `let_next_start`.

    Programmatic dependent launch lets a kernel start while the one before it runs; QWEN_ENGINE_PDL=0 in the environment
    turns it off.
    """
    wanted = os.environ.get("QWEN_ENGINE_PDL", "1") != "0"
    overlaps = wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Waits for the end of the kernel before this one, and so of all before it.

    Every program calls it before it writes anything and before it returns, so that the end of a kernel is that of all
    before it. Until then it reads only what the kernel directly before does not write, nor, if that one calls
    `let_next_start` first, the last but one: weights, and the slots, positions, lengths, block tables and splits of the
    batch.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Lets the next kernel start as soon as every program has called this or returned.

    Not called before `wait_for_inputs`, as a rule: until its wait a kernel that has started would else not know that
    the last but one has ended. It would also bring in a whole row of kernels at once, whose programs then crowd where
    room is left. Two kinds of kernels call it first:

    - norms that a product of `linear_hopper` follows. Until its wait that one reads nothing but its weight, and as a
      multiprocessor has room for one such program, none starts beside one of the product before.
    - the rotary embedding of few tokens. Until its wait attention reads what was written before the first layer.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether the kernels in Gluon can run; QWEN_ENGINE_HOPPER=0 in the environment turns them off.

    Gluon changes with every Triton, so others than the tested one do without.
    """
    wanted = os.environ.get("QWEN_ENGINE_HOPPER", "1") != "0" and triton.__version__.startswith("3.6.")
    return wanted and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """A tensor, as far as a descriptor needs it; unlike one it keeps no memory allocated."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a stand-in for the CPU of the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """The most shared memory a program may have on a CUDA device; 0 for the CPU of the interpreter."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0


def needs_wide_offsets(cache: torch.Tensor) -> bool:
    """Whether element offsets into the cache can pass 2^31."""
    return cache.numel() >= 2**31


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
    WIDE: tl.constexpr,
):
    """Offsets [BLOCK_N, 1] of the tokens first, first + 1, ... in one head of the cache.

    `table` is the slot's row of the block table and `first` a multiple of BLOCK_N. With MASKED, tokens from `end` on
    get offsets of valid memory and no table entry past the token end - 1 is read. WIDE: offsets are int64.
    """
    lane = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE >= BLOCK_N:
        block = tl.load(table + first // BLOCK_SIZE)
        row = first % BLOCK_SIZE + lane
    else:
        # A scalar load per page instead of one per token: which page a register's token lies in is known at compile
        # time, so the selections cost nothing, and neither the loads nor their addresses take up vector registers.
        block = tl.zeros([BLOCK_N], tl.int32)
        for page in tl.static_range(BLOCK_N // BLOCK_SIZE):
            entry = first // BLOCK_SIZE + page
            if MASKED:
                entry = tl.minimum(entry, (end - 1) // BLOCK_SIZE)
            block = tl.where(lane // BLOCK_SIZE == page, tl.load(table + entry), block)
        row = lane % BLOCK_SIZE
    if WIDE:
        block = block.to(tl.int64)
    return (block * stride_block + row * HEAD_DIM)[:, None]

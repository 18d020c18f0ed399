"""The sum over ranks, the residual add and the RMS norm behind it in one launch, through the peers' memory.

A program takes one row. It stores its part of the sum into every peer's inbox, polls its own inboxes until all words of
the peers are there, adds the parts in rank order (so that all ranks get the same bits) and empties the inboxes again.
There is no flag and no barrier: an empty word is 0, and a word of data that is 0 (two halves of +0.0) is sent as two
halves of -0.0. A program pushes before it polls, and polls for rows that the peers' programs push in the same order, so
it makes no difference how many programs run at once.

Words are pushed and polled by inline PTX, volatile, so that they go past the L1 and in the order written. The compiler
is free to poll a word in two threads, to have it where two layouts want it: so words are emptied behind a barrier, and
`_scattered` leaves it no reason to.
"""

import torch
import triton
import triton.language as tl

from qwen_engine.distributed.peer_memory import INBOX_BYTES, PeerMemory
from qwen_engine.kernels.gpu.common import let_next_start, next_power_of_2, pdl_options, wait_for_inputs
from qwen_engine.kernels.gpu.launching import Kernel
from qwen_engine.kernels.gpu.matrix_products import starts_early

_INBOX_WORDS = INBOX_BYTES // 4
_MAX_WARPS = 16
_MIN_BLOCK = 512
_MASKED = tl.constexpr(0)  # address of words that do not exist
_MINUS_ZERO_HALVES = 0x80008000 - 2**32
_MINUS_ZERO_FP32 = 0x80000000 - 2**32

_PUSH = tl.constexpr("""
{
    .reg .pred %p;
    setp.ne.s64 %p, $1, 0;
    @%p st.volatile.global.b32 [$1], $2;
    mov.u32 $0, 0;
}
""")

# Four words at once, so that their reads overlap. $0-$3 words, $4-$7 their addresses, $8 the address of the abort flag.
_POLL = tl.constexpr("""
{
    .reg .pred %done, %p0, %p1, %p2, %p3;
    .reg .b32 %least, %tries;
    setp.ne.s64 %p0, $4, 0;
    setp.ne.s64 %p1, $5, 0;
    setp.ne.s64 %p2, $6, 0;
    setp.ne.s64 %p3, $7, 0;
    mov.u32 $0, 1;
    mov.u32 $1, 1;
    mov.u32 $2, 1;
    mov.u32 $3, 1;
    mov.u32 %tries, 0;
poll:
    @%p0 ld.volatile.global.b32 $0, [$4];
    @%p1 ld.volatile.global.b32 $1, [$5];
    @%p2 ld.volatile.global.b32 $2, [$6];
    @%p3 ld.volatile.global.b32 $3, [$7];
    min.u32 %least, $0, $1;
    min.u32 %least, %least, $2;
    min.u32 %least, %least, $3;
    setp.ne.u32 %done, %least, 0;
    @%done bra there;
    add.u32 %tries, %tries, 1;
    and.b32 %least, %tries, 4095;
    setp.ne.u32 %done, %least, 0;
    @%done bra poll;
    ld.volatile.global.b32 %least, [$8];
    setp.eq.u32 %done, %least, 0;
    @%done bra poll;
there:
}
""")


@triton.jit
def _scattered(columns):
    """The same numbers, but the compiler cannot see that they are consecutive: all accesses are of a word a thread, in
    one layout, which is coalesced all the same."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [columns], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _push(addresses, words):
    tl.inline_asm_elementwise(_PUSH, "=&r,l,r", [addresses, words], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _poll(addresses, abort_address):
    return tl.inline_asm_elementwise(
        _POLL,
        "=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l",
        [addresses, abort_address + tl.zeros_like(addresses)],
        dtype=tl.int32,
        is_pure=False,
        pack=4,
    )


@triton.jit
def _unpacked(words, DTYPE: tl.constexpr):
    """The halves of words as fp32: (low, high); for an fp32 DTYPE the words themselves and zeros."""
    if tl.float32 == DTYPE:
        low = words.to(tl.float32, bitcast=True)
        high = tl.zeros_like(low)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _packed(low, high, DTYPE: tl.constexpr):
    if tl.float32 == DTYPE:
        words = low.to(tl.int32, bitcast=True)
    else:
        words = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words |= high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return words


@Kernel
@triton.jit(do_not_specialize=["site_word"])
def _push_add_rms_norm_kernel(
    parts,
    residual,
    weight,
    out,
    addresses,
    abort_address,
    site_word,
    row_words,
    eps,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    INBOX_WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    MINUS_ZERO: tl.constexpr,
    ROUND_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual, weight and out are seen as int32 words, and so is a single part; several parts are fp32 values.

    site_word: index of the site's first word. ROUND_SUM: what the ranks sum to is rounded, as it is in NCCL.
    """
    if EARLY:
        let_next_start(PDL)
    column = _scattered(tl.arange(0, BLOCK))
    inside = column < row_words
    word = tl.program_id(0).to(tl.int64) * row_words + column
    weight_words = tl.load(weight + column, mask=inside, other=0)
    wait_for_inputs(PDL)
    if not EARLY:
        let_next_start(PDL)
    if PARTS == 1:
        own = tl.load(parts + word, mask=inside, other=0)
    else:
        own_low = tl.zeros([BLOCK], tl.float32)
        own_high = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            pair = parts + 2 * (part * tl.num_programs(0).to(tl.int64) * row_words + word)
            own_low += tl.load(pair, mask=inside, other=0.0)
            own_high += tl.load(pair + 1, mask=inside, other=0.0)
        own = _packed(own_low, own_high, DTYPE)
    own = tl.where(own == 0, MINUS_ZERO, own)
    target = tl.where(inside, (site_word + RANK * INBOX_WORDS + word) * 4, 0)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            _push(tl.where(inside, addresses[peer] + target, _MASKED), own)
    residual_words = tl.load(residual + word, mask=inside, other=0)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for sender in tl.static_range(SIZE):
        words = own
        if sender != RANK:
            source = addresses[RANK] + (site_word + sender * INBOX_WORDS + word) * 4
            words = _poll(tl.where(inside, source, _MASKED), abort_address)
        words_low, words_high = _unpacked(tl.where(inside, words, 0), DTYPE)
        low += words_low
        high += words_high
    tl.debug_barrier()
    for sender in tl.static_range(SIZE):
        if sender != RANK:
            source = addresses[RANK] + (site_word + sender * INBOX_WORDS + word) * 4
            tl.store(source.to(tl.pointer_type(tl.int32), bitcast=True), 0, mask=inside)
    if ROUND_SUM:
        low, high = _unpacked(_packed(low, high, DTYPE), DTYPE)
    residual_low, residual_high = _unpacked(residual_words, DTYPE)
    low += residual_low
    high += residual_high
    tl.store(residual + word, _packed(low, high, DTYPE), mask=inside)
    hidden = row_words if tl.float32 == DTYPE else 2 * row_words
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(low * low + high * high, 0) / hidden + eps)
    weight_low, weight_high = _unpacked(weight_words, DTYPE)
    normed = _packed(low * inverse_rms * weight_low, high * inverse_rms * weight_high, DTYPE)
    tl.store(out + word, normed, mask=inside)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def warps_of(block: int) -> int:
    """Such that every thread has at least four words, as many as are polled at once."""
    return min(block // (4 * 32), _MAX_WARPS)


def push_add_rms_norm(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    peers: PeerMemory,
    site: int,
    deterministic: bool = False,
) -> torch.Tensor:
    ranks = (peers.addresses, peers.abort_address, peers.rank)
    return _launch(parts, residual, weight, eps, *ranks, site, deterministic=deterministic)


def add_rms_norm(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same by a single rank: adds and norms as the deterministic push does, in the same order."""
    return _launch(parts, residual, weight, eps, (0,), 0, 0, 0, deterministic=True)


def _launch(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    addresses: tuple[int, ...],
    abort_address: int,
    rank: int,
    site: int,
    *,
    deterministic: bool,
) -> torch.Tensor:
    out = torch.empty_like(residual)
    words = [tensor.view(torch.int32) for tensor in (residual, weight, out)]
    tokens, row_words = words[0].shape
    block = max(next_power_of_2(row_words), _MIN_BLOCK)
    _push_add_rms_norm_kernel[(tokens,)](
        parts.view(torch.int32) if len(parts) == 1 else parts,
        *words,
        addresses,
        abort_address,
        site * len(addresses) * _INBOX_WORDS,
        row_words,
        eps,
        PARTS=len(parts),
        RANK=rank,
        SIZE=len(addresses),
        INBOX_WORDS=_INBOX_WORDS,
        DTYPE=_DTYPES[residual.dtype],
        MINUS_ZERO=_MINUS_ZERO_FP32 if residual.dtype == torch.float32 else _MINUS_ZERO_HALVES,
        ROUND_SUM=deterministic,
        BLOCK=block,
        EARLY=starts_early(tokens, residual.dtype, residual.device),
        num_warps=warps_of(block),
        enable_fp_fusion=not deterministic,
        **pdl_options(residual.device),
    )
    return out

"""The engine's device functions, dispatched here and nowhere else.

A tensor on a CUDA device goes to the Triton kernels of `gpu/`, imported at the first such call so that a machine
without Triton can run everything else; any other device goes to `reference.py`, which is both the CPU path of the
product and the definition of what a kernel must compute. Layers and the sampler call these functions.

A row's result has the same bits in every batch, run to run. Products and attention owe that only with `deterministic`,
which costs speed: `deterministic.py` and `gpu/deterministic/`.

Conventions shared by all of them:

- A *slot* is a request's row in the device tables `block_tables` [max_num_seqs, max_blocks] and `token_table`
  [max_num_seqs, max_len] (both int32). Slot -1 marks padding: nothing is read or written for it and outputs are 0.
- The KV cache of a layer is two tensors [num_blocks, num_kv_heads, block_size, head_dim]; block_size is a power of two.
  Token `p` of a slot lies in block `block_tables[slot, p // block_size]` at row `p % block_size`. Cache rows past
  a sequence's length are never read, whatever they hold.
- Weights, slots, positions, lengths, block tables and splits are not written by the very launch before a call, nor by
  one that only a norm or a rotary embedding parts from it: on a GPU a kernel may read them before those have ended
  (`gpu/common.py`, programmatic dependent launch). The only one that waits for them is `split_decodes`.
- One-dimensional arguments are contiguous, and so is the last dimension of every other one.
- Arithmetic is fp32 inside, rounded once to the output's dtype (bf16, fp16 or fp32).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from qwen_engine.distributed.peer_memory import PeerMemory
from qwen_engine.kernels import deterministic as deterministic_reference
from qwen_engine.kernels import reference

DecodeSplits = tuple[Any, ...]
"""Of a backend's own kind."""


def _backend(tensor: torch.Tensor, deterministic: bool = False) -> ModuleType:
    if tensor.is_cuda:
        from qwen_engine.kernels import gpu

        return gpu.deterministic if deterministic else gpu
    return deterministic_reference if deterministic else reference


def compile_launched(steps: Callable[[], object], device: torch.device) -> None:
    """Compile what `steps` would launch on a CUDA device, many kernels at once, and launch none of it.

    Every other operation of `steps` runs, on zeros where a kernel would have written.
    """
    from qwen_engine.kernels import gpu

    gpu.compile_launched(steps, device)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension of x [tokens, hidden]; rows may be strided."""
    return _backend(x).rms_norm(x, weight, eps)


def add_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, deterministic: bool = False
) -> torch.Tensor:
    """Add the sum of `parts` to `residual` in place and return the RMS norm of that, taken before it was rounded.

    parts: [parts, tokens, hidden], added in order; residual: [tokens, hidden]. The result has weight's dtype.
    deterministic: for one part, of that dtype; the bits are those of `push_add_rms_norm` with it.
    """
    return _backend(parts, deterministic).add_rms_norm(parts, residual, weight, eps)


def push_add_rms_norm(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    peers: PeerMemory,
    site: int,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """`add_rms_norm` of the parts of all ranks, through the memory of their GPUs. CUDA only.

    parts: as there, of weight's dtype if it is one, fp32 if there are several; residual: [tokens, hidden], contiguous,
    of weight's dtype, such that it `fits`. A rank's sum is rounded to that dtype, those of all ranks are added in fp32
    in rank order. site: the inbox, another one than that of the last call. Every rank calls it in the same order.
    deterministic: the sum of all ranks is rounded, too, before it is added to the residual.
    """
    return _backend(parts).push_add_rms_norm(parts, residual, weight, eps, peers, site, deterministic)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [tokens, 2 * inter] with the gate in the first half; gives [tokens, inter]."""
    return _backend(gate_up).silu_mul(gate_up)


def linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, *, deterministic: bool = False
) -> torch.Tensor:
    """x [tokens, in] times weight [out, in], transposed; gives [tokens, out]."""
    return _backend(x, deterministic).linear(x, weight, out)


def linear_parts(x: torch.Tensor, weight: torch.Tensor, *, deterministic: bool = False) -> torch.Tensor:
    """`linear` as the sum of what this gives: [parts, tokens, out], in x's dtype if it is one, fp32 if several."""
    if deterministic:
        return linear(x, weight, deterministic=True)[None]
    return _backend(x).linear_parts(x, weight)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, *, deterministic: bool = False) -> torch.Tensor:
    """silu(x Gᵀ) * (x Uᵀ) for x [tokens, in] and weight [2 * inter, in], G above U; gives [tokens, inter].

    The two products may be rounded to x's dtype before they are combined.
    """
    return _backend(x, deterministic).gated_linear(x, weight)


def embed_tokens(
    token_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, vocab_start: int
) -> torch.Tensor:
    """Embedding rows of the tokens at (slot, position), read from the token table on the device.

    `weight` [vocab_rows, hidden] holds the ids from `vocab_start` on. Ids of other shards and slot -1 give zeros,
    so that the sum over the shards is the embedding. slots, positions: int32 [tokens].
    """
    return _backend(weight).embed_tokens(token_table, slots, positions, weight, vocab_start)


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Per-head RMS norm of Q and K, rotary embedding, and the write of K and V into their pages.

    qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], heads in the order q, k, v. Q is changed in place and
    returned as a view [tokens, num_heads, head_dim]; K and V inside qkv stay as they were. cos_sin: fp32
    [max_pos, head_dim], cosines in the first half and sines in the second; the rotation pairs element i with
    i + head_dim / 2. Tokens of slot -1 are left alone.
    """
    return _backend(qkv).qk_norm_rope_kv_write(
        qkv, q_weight, k_weight, eps, cos_sin, slots, positions, block_tables, k_cache, v_cache, num_heads
    )


def split_decodes(
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    live_rows: torch.Tensor | None = None,
    *,
    programs: int | None = None,
    deterministic: bool = False,
) -> DecodeSplits:
    """How the programs of `decode_attention` share out its rows: the same for every layer of a step.

    seq_lens: int32 [rows], tokens to attend to with the new one included, 0 for padding. max_seq_len: an upper bound
    of them known to the host. live_rows: int32 [1], where the host does not know when it launches how many rows, the
    first ones, are no padding; outputs of padding are then arbitrary. programs: about how many run at once; what the
    device has room for when None.
    """
    return _backend(k_cache, deterministic).split_decodes(
        k_cache, block_tables, slots, seq_lens, max_seq_len, live_rows, programs
    )


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    splits: DecodeSplits,
    out: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Attention of one query token per row over the paged cache; gives [rows, num_heads, head_dim].

    q: [rows, num_heads, head_dim], rows may be strided. seq_lens: int32 [rows]. splits: what `split_decodes` has given
    for these rows. deterministic: a token has the same bits as in `prefill_attention`, too.
    """
    return _backend(q, deterministic).decode_attention(
        q, k_cache, v_cache, block_tables, slots, seq_lens, scale, splits, out
    )


def chunk_tiles(
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    tokens: int,
    num_heads: int,
    *,
    deterministic: bool = False,
) -> torch.Tensor | None:
    """The order in which `prefill_attention` takes its tiles, the same for every layer of a step; None where it has
    none.

    slots, query_start, seq_lens, max_seq_len: of `prefill_attention`; tokens, num_heads: of its q.
    """
    return _backend(k_cache, deterministic).chunk_tiles(
        k_cache, block_tables, slots, query_start, seq_lens, max_seq_len, tokens, num_heads
    )


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Causal attention of several query tokens per row over the paged cache; gives [tokens, num_heads, head_dim].

    Row r owns the queries [query_start[r], query_start[r + 1]) of q [tokens, num_heads, head_dim]; the last of them
    sits at position seq_lens[r] - 1, so a cached prefix comes before the first. Keys and values, those of this chunk
    included, are read from the pages. Rows of one query are allowed beside long ones, and rows of none. query_start:
    int32 [rows + 1], ascending; queries in front of the first and from the last on belong to nobody, and their outputs
    are left as they are. max_query_len and max_seq_len: upper bounds known to the host. tiles: what
    `chunk_tiles` has given for these rows; found out again when None.
    """
    return _backend(q, deterministic).prefill_attention(
        q, k_cache, v_cache, block_tables, slots, query_start, seq_lens, scale, max_query_len, max_seq_len, out, tiles
    )


def adjust_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    *,
    masks: tuple[torch.Tensor, torch.Tensor] | None = None,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply masks, biases and the three penalties, in this order; gives fp32 [rows, vocab].

    logits: [rows, vocab]; slots: int64 [rows], rows of -1 stay as they are. out: where the result goes, contiguous; the
    logits themselves, if they are fp32, or a new tensor when None. By slot:

    masks: int32 [max_num_seqs], the slot's row of the bits or -1 for none, and bits int32 [n, ceil(vocab / 32)], lowest
    first. Ids without a bit become -inf.
    biases: int64 [max_num_seqs], 1 where the slot has a bias and 0 else, and what is added, fp32 [max_num_seqs, vocab].
    penalties: counts in the output int32 and whether in the prompt bool, [max_num_seqs, vocab]; and presence, frequency
    and repetition, fp32 [3, max_num_seqs]. Ids that prompt or output hold: a positive logit is divided by the
    repetition, any other multiplied. Ids of the output: less frequency times their count and less presence.
    """
    return _backend(logits).adjust_logits(logits, slots, masks=masks, biases=biases, penalties=penalties, out=out)


def lowest_kept(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """What min_p, top_k and top_p leave of each row, as the lowest scaled logit that stays; gives fp32 [rows].

    Scaled is logits [rows, vocab] times 1 / temperature. In this order: min_p keeps what is at least min_p times as
    likely as the most likely id (0: off); top_k the k best (vocab or more: off) and the equals of the last of them;
    top_p the best ids up to the first with which their share of what is left reaches top_p (1: off), counting k of
    equals. The most likely id always stays. Rows without any of the three, and greedy ones, give -inf.
    temperature, top_p, min_p: fp32 [rows]; top_k: int64 [rows].
    """
    return _backend(logits).lowest_kept(logits, temperature, top_k, top_p, min_p)


def decode_inputs(
    slots: torch.Tensor, num_tokens: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Write where each slot's newest token stands and how many tokens it attends to.

    slots, positions, seq_lens: int32 [rows]; num_tokens: int32 [max_num_seqs], tokens known of every slot, sampled ones
    included. Padding gets position 0 and length 0.
    """
    _backend(slots).decode_inputs(slots, num_tokens, positions, seq_lens)


def advance(token_ids: torch.Tensor, slots: torch.Tensor, token_table: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """Append token_ids int64 [rows] to the tokens of the slots int32 [rows], each slot at most once; skip padding."""
    _backend(slots).advance(token_ids, slots, token_table, num_tokens)


def advance_to_best(
    keys: torch.Tensor,
    slots: torch.Tensor,
    token_table: torch.Tensor,
    num_tokens: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """`advance` by the tokens that `keys` int64 [rows] of `slot_argmax` stand for, which go to token_ids int64 [rows].

    Padding gets token id 0.
    """
    _backend(slots).advance_to_best(keys, slots, token_table, num_tokens, token_ids)


def slot_argmax(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    vocab_start: int,
) -> torch.Tensor:
    """The winner of `gumbel_argmax` in one shard of the vocabulary, for the next token of each slot.

    logits: [rows, n], this shard's tokens from vocab_start on, n may be 0; slots: int32 [rows]. By slot: num_tokens
    int32 (the position of the next token), temperature fp32, seeds int64. Gives int64 [rows] keys ordered like the
    winners themselves, by score and then by lower id, so that the maximum of several shards' keys is the winner of the
    whole: the score's bits, mapped to an ordered integer, above the complement of the id. Padding gets key 0.
    """
    return _backend(logits).slot_argmax(logits, slots, num_tokens, temperature, seeds, vocab_start)


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int = 0,
    lowest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token id per row: argmax(logits / temperature + Gumbel noise); gives int64 [rows].

    lowest: fp32 [rows], from `lowest_kept`: what is scaled to less is left out.

    logits: [rows, vocab], column i standing for token id vocab_start + i (ids returned are these). Rows with
    temperature <= GREEDY_TEMPERATURE take the plain argmax, the lowest id on ties. temperature: fp32 [rows];
    seeds, positions: int64 [rows]. The noise of a token is a function of (seed, position, token id) alone: lane
    id & 3 of Philox-4x32-10 (Salmon et al., 2011) with key = seed and counter = (id >> 2, position, 0).
    Logits of -inf or NaN never win against a finite one.
    """
    return _backend(logits).gumbel_argmax(logits, temperature, seeds, positions, vocab_start, lowest)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-softmax of one chosen token per row, its rank, and what the row's log-softmax is less than its logits: (fp32
    [rows], int64 [rows], fp32 [rows]).

    logits: [rows, vocab]; token_ids: int64 [rows]. The rank is 1 + the number of strictly greater logits.
    """
    return _backend(logits).token_logprobs(logits, token_ids)


def best_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the `count` largest logits [rows, vocab], best first; gives int64 [rows, min(count, vocab)].

    Of equals, as 0.0 and -0.0 are, the lowest id comes first. NaN counts as -inf.
    """
    return _backend(logits).best_ids(logits, count)

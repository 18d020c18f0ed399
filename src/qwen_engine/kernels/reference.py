"""The kernels in plain torch: the definition of correctness, and what runs on the CPU.

Signatures and meaning are those of `qwen_engine.kernels`. Written to be checked by reading; attention loops over the
rows so that a row's result cannot depend on what shares its batch, and gathers only the pages it may read.
"""

import torch
import torch.nn.functional as F

from qwen_engine.request import GREEDY_TEMPERATURE

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32_BITS = 0xFFFFFFFF
_RANKED_ROWS = 32  # whose keys, 8 bytes a token id, exist at once
_NO_TOKEN = 2**31 - 1  # loses every comparison for the lowest id


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of fp32 x over its last dimension, still in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _normalise(x.float(), weight, eps).to(x.dtype)


def add_rms_norm(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    total = parts.float().sum(dim=0) + residual.float()
    residual.copy_(total)
    return _normalise(total, weight, eps).to(weight.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.mm(x, weight.t(), out=out)


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, weight)[None]


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_mul(F.linear(x, weight))


def embed_tokens(
    token_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, vocab_start: int
) -> torch.Tensor:
    live = slots >= 0
    rows = token_table[slots.clamp(min=0), positions.masked_fill(~live, 0)].long() - vocab_start
    owned = live & (rows >= 0) & (rows < weight.shape[0])
    return weight[rows.masked_fill(~owned, 0)].masked_fill(~owned[:, None], 0)


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
    head_dim, block_size = k_cache.shape[-1], k_cache.shape[2]
    num_kv_heads = k_cache.shape[1]
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    queries = heads[:, :num_heads]
    live = slots >= 0
    slot, position = slots[live].long(), positions[live].long()
    q, k, v = heads[live].split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = cos_sin[position][:, None].chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]
    queries[live] = _rotate(_normalise(q.float(), q_weight, eps), cos, sin).to(qkv.dtype)
    blocks, rows = block_tables[slot, position // block_size].long(), position % block_size
    k_cache[blocks, :, rows] = _rotate(_normalise(k.float(), k_weight, eps), cos, sin).to(k_cache.dtype)
    v_cache[blocks, :, rows] = v.to(v_cache.dtype)
    return queries


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def split_decodes(
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    live_rows: torch.Tensor | None = None,
    programs: int | None = None,
) -> tuple[int]:
    return (max_seq_len,)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    splits: tuple[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    query_start = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return prefill_attention(q, k_cache, v_cache, block_tables, slots, query_start, seq_lens, scale, 1, *splits, out)


def chunk_tiles(
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    tokens: int,
    num_heads: int,
) -> None:
    return None


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
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    starts = query_start.tolist()
    for row, (slot, seq_len) in enumerate(zip(slots.tolist(), seq_lens.tolist())):
        start, end = starts[row], starts[row + 1]
        if slot < 0 or seq_len == 0:
            out[start:end] = 0
        elif end > start:
            k = _gather(k_cache, block_tables[slot], seq_len)
            v = _gather(v_cache, block_tables[slot], seq_len)
            out[start:end] = _causal_attention(q[start:end], k, v, scale).to(out.dtype)
    return out


def _gather(cache: torch.Tensor, table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The first seq_len tokens of one sequence as fp32 [num_kv_heads, seq_len, head_dim]."""
    num_blocks = -(-seq_len // cache.shape[2])
    pages = cache[table[:num_blocks].long()].transpose(0, 1)
    return pages.flatten(1, 2)[:, :seq_len].float()


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries q [queries, num_heads, head_dim] are the last positions of k, v [num_kv_heads, seq_len, head_dim]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, seq_len, _ = k.shape
    group = num_heads // num_kv_heads
    grouped = q.float().transpose(0, 1).reshape(num_kv_heads, group, num_queries, head_dim)
    mask = None
    if num_queries > 1:
        mask = torch.ones(num_queries, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - num_queries)
    # One KV head is a batch entry whose group shares K and V through a stride of zero.
    k, v = (t[:, None].expand(-1, group, -1, -1) for t in (k, v))
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return attended.reshape(num_heads, num_queries, head_dim).transpose(0, 1)


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox-4x32-10 on 32-bit words held in int64 tensors that broadcast against one another."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        # The 64-bit products may wrap to negative numbers; their bit patterns are still those of the unsigned product.
        product0, product1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW_32_BITS, (product1 >> 32) & _LOW_32_BITS
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW_32_BITS, high0 ^ c3 ^ k1, product0 & _LOW_32_BITS
        k0, k1 = (k0 + _PHILOX_KEY_STEPS[0]) & _LOW_32_BITS, (k1 + _PHILOX_KEY_STEPS[1]) & _LOW_32_BITS
    return c0, c1, c2, c3


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_start: int, vocab_size: int) -> torch.Tensor:
    """The 32 random bits of each token id, as int64 [rows, vocab_size], for seeds and positions int64 [rows]."""
    first_group, last_group = vocab_start >> 2, (vocab_start + vocab_size - 1) >> 2
    groups = torch.arange(first_group, last_group + 1, device=seeds.device)[None]
    seeds, positions = seeds[:, None], positions[:, None]
    key = (seeds & _LOW_32_BITS, (seeds >> 32) & _LOW_32_BITS)
    counter = (groups, positions & _LOW_32_BITS, (positions >> 32) & _LOW_32_BITS, torch.zeros_like(groups))
    lanes = torch.stack(philox(counter, key), dim=-1).flatten(1)
    return lanes[:, vocab_start & 3 :][:, :vocab_size]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_start: int, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise of each token id, fp32 [rows, vocab_size]."""
    # 23 bits and a half: exact in fp32 and never 0 or 1, so both logarithms are finite.
    uniform = ((noise_bits(seeds, positions, vocab_start, vocab_size) >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def adjust_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    *,
    masks: tuple[torch.Tensor, torch.Tensor] | None = None,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    x = logits.to(torch.float32, copy=True) if out is None else out.copy_(logits)
    live = torch.nonzero(slots >= 0)[:, 0]
    if masks is not None:
        _mask(x, live, slots[live], *masks)
    if biases is not None:
        has_bias, bias = biases
        biased = live[has_bias[slots[live]] != 0]
        x[biased] += bias[slots[biased]]
    if penalties is not None:
        _penalise(x, live, slots[live], *penalties)
    return x


def _mask(
    x: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, mask_of_slot: torch.Tensor, bits: torch.Tensor
) -> None:
    masks = mask_of_slot[slots].long()
    rows, masks = rows[masks >= 0], masks[masks >= 0]
    shifts = torch.arange(32, dtype=torch.int32, device=x.device)
    allowed = (bits[masks][:, :, None] >> shifts & 1).bool().flatten(1)[:, : x.shape[1]]
    x[rows] = x[rows].masked_fill(~allowed, -torch.inf)


def _penalise(
    x: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    factors: torch.Tensor,
) -> None:
    presence, frequency, repetition = factors[:, slots, None]
    counts, y = output_counts[slots], x[rows]
    present = counts > 0
    y = torch.where(present | in_prompt[slots], torch.where(y > 0, y / repetition, y * repetition), y)
    x[rows] = y - (frequency * counts + presence * present)


def lowest_kept(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    vocab_size = logits.shape[1]
    lowest = torch.full(temperature.shape, -torch.inf, device=logits.device)
    limited = (temperature > GREEDY_TEMPERATURE) & ((top_k < vocab_size) | (top_p < 1) | (min_p > 0))
    rows = torch.nonzero(limited)[:, 0]
    if not len(rows):
        return lowest
    top_k, top_p = top_k[rows, None], top_p[rows, None]
    # Only the best `width` values need sorting when every row that has top_p has top_k too.
    width = vocab_size if (top_k >= vocab_size).any() else int(top_k.max())
    best = _scaled(logits[rows], temperature[rows]).topk(width, dim=1).values
    distances = best[:, :1] - best
    kept = (torch.arange(width, device=logits.device) < top_k) & (distances <= -min_p[rows, None].log())
    # Probability before each rank, among those kept so far: a rank stays while the ones before it fall short.
    masses = torch.where(kept, torch.exp(-distances), 0.0)
    sums = masses.cumsum(dim=1)  # the last one is the whole mass, added in the same order whatever the width
    kept &= (sums - masses < top_p * sums[:, -1:]) | (top_p >= 1)
    kept[:, 0] = True
    lowest[rows] = torch.where(kept, best, torch.inf).amin(dim=1)
    return lowest


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scaled = logits.float() * temperature[:, None].reciprocal()
    return scaled.masked_fill(scaled.isnan(), -torch.inf)


def decode_inputs(
    slots: torch.Tensor, num_tokens: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    seq_lens.copy_(num_tokens[slots.clamp(min=0)].masked_fill(slots < 0, 0))
    positions.copy_((seq_lens - 1).clamp(min=0))


def advance(token_ids: torch.Tensor, slots: torch.Tensor, token_table: torch.Tensor, num_tokens: torch.Tensor) -> None:
    live = slots >= 0
    slot = slots[live].long()
    token_table[slot, num_tokens[slot].long()] = token_ids[live].to(token_table.dtype)
    num_tokens[slot] += 1


def advance_to_best(
    keys: torch.Tensor,
    slots: torch.Tensor,
    token_table: torch.Tensor,
    num_tokens: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    token_ids.copy_((~keys & _LOW_32_BITS).masked_fill(slots < 0, 0))
    advance(token_ids, slots, token_table, num_tokens)


def slot_argmax(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    vocab_start: int,
) -> torch.Tensor:
    request = slots.clamp(min=0).long()
    scores = torch.full((len(slots), 1), -torch.inf, device=logits.device)
    ids = torch.full((len(slots),), _NO_TOKEN, device=logits.device)
    if logits.shape[1]:
        scores = _scores(logits, temperature[request], seeds[request], num_tokens[request].long(), vocab_start)
        ids = scores.argmax(dim=1) + vocab_start
    return _keys(scores.amax(dim=1), ids).masked_fill(slots < 0, 0)


def _keys(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys ordered by score and then by lower id: the score's bits as an ordered integer, and ~id below them."""
    bits = (scores + 0.0).view(torch.int32).long()  # -0.0 + 0.0 = 0.0: equal scores have equal bits
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (~ids & _LOW_32_BITS)


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int = 0,
    lowest: torch.Tensor | None = None,
) -> torch.Tensor:
    scores = _scores(logits, temperature, seeds, positions, vocab_start, lowest)
    return scores.argmax(dim=1) + vocab_start  # the first of several maxima


def _scores(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int,
    lowest: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits / temperature + noise where a row samples, the logits where it is greedy; fp32."""
    scores = logits.float()
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    sampled = temperature > GREEDY_TEMPERATURE
    if sampled.any():
        scaled = _scaled(logits[sampled], temperature[sampled])
        noise = gumbel_noise(seeds[sampled], positions[sampled], vocab_start, logits.shape[1])
        if lowest is not None:
            scaled = scaled.masked_fill(scaled < lowest[sampled, None], -torch.inf)
        scores[sampled] = scaled + noise
    return scores


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.float()
    chosen = logits.gather(1, token_ids[:, None])
    # Row by row: threads share a long row that is alone, but not one of several.
    normalisers = torch.stack([row.logsumexp(dim=0) for row in logits])
    return chosen[:, 0] - normalisers, (logits > chosen).sum(dim=1) + 1, normalisers


def best_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    count = min(count, logits.shape[1])
    return torch.cat([_best_ids(part, count) for part in logits.split(_RANKED_ROWS)])


def _best_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """By keys without equals, for which of these `topk` takes depends on the size of the batch."""
    scores = logits.float()
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    keys = _keys(scores, torch.arange(logits.shape[1], device=logits.device))
    return ~keys.topk(count).values & _LOW_32_BITS

"""From logits to one token per row, with every sampling parameter, vectorised and without waiting for the device.

The parameters of a slot lie in device tables (`SamplingTables`), written once when a request takes the slot. What only
some requests need (per-vocabulary tables, bad words) is allocated at first use. The host remembers which slots use
which feature, so a step launches nothing that no row of it needs.

Order of operations: token masks, logit bias, allowed ids, bad words, min_tokens → penalties → temperature → min_p →
top_k → top_p → Gumbel-max with noise that depends on (seed, position, token id) alone. Token masks and allowed ids are
hard limits; bad words and min_tokens give way where together they would leave nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qwen_engine import kernels
from qwen_engine.request import SamplingParams
from qwen_engine.scheduling.step_plan import SlotInit

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_FEATURES = ("penalties", "bias", "bad_words", "min_tokens", "filters", "masks", "logprobs")
_WILDCARD = -1  # matches any token in a bad word's prefix
_NO_TOKEN = -2  # matches nothing
_MASKED = -1e9  # far below any logit, yet above the -inf of a token that is not allowed
_MAX_REPETITION = 1e6  # beyond it nothing changes but the risk of leaving fp32


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Raw log-probabilities of some rows: the chosen token's (fp32 [rows]) and rank, and the top ids and values
    ([rows, k], best first)."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Ids that some rows of a step may choose. rows: int64 [m]; bits: int32 [m, ceil(vocab / 32)], lowest first."""

    rows: np.ndarray
    bits: np.ndarray


class SamplingTables:
    """Sampling parameters of every slot, on the device. A slot's entries are replaced whole by `set`."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = device
        self._floats = torch.zeros(len(_FLOATS), max_num_seqs, dtype=torch.float32, device=device)
        # Rows: seed, top_k (vocab_size when off), prompt length, first token index at which the stop ids may come, and
        # whether the slot has a bias.
        self._integers = torch.zeros(5, max_num_seqs, dtype=torch.int64, device=device)
        self._stop_ids = torch.full((max_num_seqs, 1), -1, dtype=torch.int64, device=device)
        self._bias: torch.Tensor | None = None  # fp32 [max_num_seqs, vocab]; -inf masks
        self._output_counts: torch.Tensor | None = None  # int32 [max_num_seqs, vocab]
        self._in_prompt: torch.Tensor | None = None  # bool [max_num_seqs, vocab]
        self._bad_prefixes: torch.Tensor | None = None  # int64 [max_num_seqs, words, length - 1], right-aligned
        self._bad_last: torch.Tensor | None = None  # int64 [max_num_seqs, words]
        self._uses = {name: np.zeros(max_num_seqs, dtype=bool) for name in _FEATURES}
        self._is_plain = np.ones(max_num_seqs, dtype=bool)  # no feature but logprobs
        self._is_filtered = np.ones(max_num_seqs, dtype=bool)  # none but these and filters
        self._num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)

    @property
    def temperature(self) -> torch.Tensor:
        """fp32 [max_num_seqs]."""
        return self._floats[0]

    @property
    def seeds(self) -> torch.Tensor:
        """int64 [max_num_seqs]."""
        return self._integers[0]

    def set(self, entries: Sequence[SlotInit]) -> None:
        """Writes the parameters of requests that take slots in this step."""
        slots = self._to_device(np.array([entry.slot for entry in entries]))
        params = [entry.params for entry in entries]
        floats = np.array([[getattr(p, name) for p in params] for name in _FLOATS])
        floats[5] = floats[5].clip(1 / _MAX_REPETITION, _MAX_REPETITION)
        self._floats[:, slots] = self._to_device(floats.astype(np.float32))
        integers = np.array(
            [
                (
                    entry.seed,
                    min(entry.params.top_k, self.vocab_size) if entry.params.top_k > 0 else self.vocab_size,
                    entry.num_prompt_tokens,
                    entry.num_prompt_tokens + min(entry.params.min_tokens, 2**40) if entry.stop_ids else 0,
                    _has_bias(entry.params),
                )
                for entry in entries
            ],
            dtype=np.int64,
        )
        self._integers[:, slots] = self._to_device(np.ascontiguousarray(integers.T))
        for entry in entries:
            self._set_features(entry)

    def _set_features(self, entry: SlotInit) -> None:
        slot, params = entry.slot, entry.params
        num_output = entry.num_tokens - entry.num_prompt_tokens
        filters = not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self._num_logprobs[slot] = params.logprobs or 0
        uses = {
            "penalties": params.has_penalties,
            "bias": _has_bias(params),
            "bad_words": bool(entry.bad_word_ids),
            "min_tokens": params.min_tokens > num_output and bool(entry.stop_ids),
            "filters": filters,
            "masks": params.structured_outputs is not None,  # so that every rank knows of rows that get masks
            "logprobs": params.logprobs is not None,
        }
        for name, used in uses.items():
            self._uses[name][slot] = used
        shaping = {name for name, used in uses.items() if used} - {"logprobs"}
        self._is_plain[slot] = not shaping
        self._is_filtered[slot] = shaping <= {"filters"}
        if uses["penalties"]:
            self._set_counts(entry)
        if uses["bias"]:
            self._set_bias(slot, params)
        if uses["bad_words"]:
            self._set_bad_words(slot, entry.bad_word_ids)
        elif self._bad_last is not None:
            self._bad_last[slot] = -1
        if uses["min_tokens"]:
            self._stop_ids = _widened(self._stop_ids, len(entry.stop_ids), fill=-1)
            self._write_row(self._stop_ids, slot, list(entry.stop_ids), fill=-1)

    def _set_counts(self, entry: SlotInit) -> None:
        if self._output_counts is None or self._in_prompt is None:
            shape = (self.max_num_seqs, self.vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        tokens = self._to_device(np.array(entry.token_ids, dtype=np.int64))
        prompt, output = tokens[: entry.num_prompt_tokens], tokens[entry.num_prompt_tokens :]
        self._in_prompt[entry.slot] = False
        self._in_prompt[entry.slot].index_fill_(0, prompt, True)
        self._output_counts[entry.slot] = 0
        ones = torch.ones_like(output, dtype=torch.int32)
        self._output_counts[entry.slot].index_add_(0, output, ones)

    def _set_bias(self, slot: int, params: SamplingParams) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self.max_num_seqs, self.vocab_size, dtype=torch.float32, device=self.device)
        row = self._bias[slot]
        if params.allowed_token_ids is None:
            row.zero_()
        else:
            row.fill_(float("-inf"))
            row[self._to_device(np.array(params.allowed_token_ids, dtype=np.int64))] = 0.0
        if params.logit_bias:
            ids = self._to_device(np.array(list(params.logit_bias), dtype=np.int64))
            row[ids] += self._to_device(np.array(list(params.logit_bias.values()), dtype=np.float32))

    def _set_bad_words(self, slot: int, words: Sequence[Sequence[int]]) -> None:
        num_words, prefix = len(words), max(len(word) for word in words) - 1
        if self._bad_last is None or self._bad_prefixes is None:
            self._bad_last = torch.full((self.max_num_seqs, 0), -1, dtype=torch.int64, device=self.device)
            self._bad_prefixes = torch.full((self.max_num_seqs, 0, 0), -1, dtype=torch.int64, device=self.device)
        self._bad_last = _widened(self._bad_last, num_words, fill=-1)
        # Prefixes are right-aligned, so a longer one widens the table on the left.
        old = self._bad_prefixes
        shape = (self.max_num_seqs, self._bad_last.shape[1], max(old.shape[2], prefix))
        if old.shape != shape:
            self._bad_prefixes = old.new_full(shape, _WILDCARD)
            self._bad_prefixes[:, : old.shape[1], shape[2] - old.shape[2] :] = old
        width = shape[2]
        table = np.full(shape[1:], _WILDCARD, dtype=np.int64)
        for index, word in enumerate(words):
            table[index, width - len(word) + 1 :] = word[:-1]
        self._bad_prefixes[slot] = self._to_device(table)
        self._write_row(self._bad_last, slot, [word[-1] for word in words], fill=-1)

    def sample(
        self,
        logits: torch.Tensor,
        *,
        slots: np.ndarray,
        device_slots: torch.Tensor,
        positions: torch.Tensor,
        token_table: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> torch.Tensor:
        """Chooses one token per row; int64 [rows].

        logits: [rows, vocab], left unchanged. slots: each row's slot, on the host; device_slots: the same, int64 on the
        device. positions: int64 [rows], index the chosen token will have. token_table: int32 [slots, max_len].
        """
        adjusted = self._adjust(logits, slots, device_slots, positions, token_table, masks)
        token_ids = self.draw(
            adjusted, device_slots=device_slots, positions=positions, filtered=self._any("filters", slots)
        )
        if self._any("penalties", slots) and self._output_counts is not None:
            rows = torch.ones_like(token_ids, dtype=torch.int32)
            self._output_counts.view(-1).index_add_(0, device_slots * self.vocab_size + token_ids, rows)
        return token_ids

    def draw(
        self, logits: torch.Tensor, *, device_slots: torch.Tensor, positions: torch.Tensor, filtered: bool
    ) -> torch.Tensor:
        """The end of `sample`: temperature, the filters if any row may have one, and the draw; int64 [rows].

        device_slots: -1 is padding, whose choice means nothing and is a cheap one.
        """
        slots = device_slots.clamp(min=0)
        temperature, top_p, min_p = self._floats[:3, slots].unbind(0)
        temperature = temperature.masked_fill(device_slots < 0, 0.0)
        seeds, top_k = self._integers[:2, slots].unbind(0)
        lowest = kernels.lowest_kept(logits, temperature, top_k, top_p, min_p) if filtered else None
        return kernels.gumbel_argmax(logits, temperature, seeds, positions, lowest=lowest)

    def is_plain(self, slots: np.ndarray) -> bool:
        """Whether temperature and seed are all that shapes the choice in these slots."""
        return bool(self._is_plain[slots].all())

    def is_filtered(self, slots: np.ndarray) -> bool:
        """Whether these, top-k, top-p and min-p are."""
        return bool(self._is_filtered[slots].all())

    def logprob_rows(self, slots: np.ndarray) -> np.ndarray:
        """Indices of the rows whose requests asked for logprobs."""
        return np.flatnonzero(self._uses["logprobs"][slots])

    def num_logprobs(self, slots: np.ndarray) -> list[int]:
        """How many top tokens each of these slots asked for."""
        return self._num_logprobs[slots].tolist()

    def _adjust(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        device_slots: torch.Tensor,
        positions: torch.Tensor,
        token_table: torch.Tensor,
        masks: TokenMasks | None,
    ) -> torch.Tensor:
        """Masks, bias and penalties, in fp32; the logits themselves when no row has any."""
        lowers: list[Callable[[torch.Tensor], None]] = []
        if self._any("bad_words", slots):
            lowers.append(lambda x: self._mask_bad_words(x, device_slots, positions, token_table))
        if self._any("min_tokens", slots):
            lowers.append(lambda x: self._mask_early_stops(x, device_slots, positions))
        biases = penalties = None
        if self._any("bias", slots) and self._bias is not None:
            biases = (self._integers[4], self._bias)
        if self._any("penalties", slots) and self._output_counts is not None and self._in_prompt is not None:
            # Rows without penalties have neutral factors, so the counts that an earlier request left do not matter.
            penalties = (self._output_counts, self._in_prompt, self._floats[3:])
        if not lowers and masks is None and biases is None and penalties is None:
            return logits
        adjusted = kernels.adjust_logits(
            logits,
            device_slots,
            masks=None if masks is None else self._masks_by_slot(masks, slots),
            biases=biases,
            penalties=None if lowers else penalties,
        )
        for lower in lowers:
            lower(adjusted)
        if lowers and penalties is not None:
            kernels.adjust_logits(adjusted, device_slots, penalties=penalties, out=adjusted)
        return adjusted

    def _masks_by_slot(self, masks: TokenMasks, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = np.full(self.max_num_seqs, -1, dtype=np.int32)
        numbers[slots[masks.rows]] = np.arange(len(masks.rows))
        return self._to_device(numbers), self._to_device(masks.bits)

    def _mask_bad_words(
        self, x: torch.Tensor, device_slots: torch.Tensor, positions: torch.Tensor, token_table: torch.Tensor
    ) -> None:
        """Masks the last token of each bad word whose earlier tokens are the latest ones of the output."""
        assert self._bad_prefixes is not None
        assert self._bad_last is not None
        prefixes, last = self._bad_prefixes[device_slots], self._bad_last[device_slots]
        width = prefixes.shape[2]
        indices = positions[:, None] - torch.arange(width, 0, -1, device=self.device)
        tail = token_table[device_slots[:, None], indices.clamp(min=0)].to(torch.int64)
        prompt_lens = self._integers[2, device_slots]
        tail = torch.where(indices >= prompt_lens[:, None], tail, _NO_TOKEN)
        matches = ((prefixes == tail[:, None, :]) | (prefixes == _WILDCARD)).all(dim=-1) & (last >= 0)
        _mask(x, last, matches)

    def _mask_early_stops(self, x: torch.Tensor, device_slots: torch.Tensor, positions: torch.Tensor) -> None:
        stop_ids = self._stop_ids[device_slots]
        too_early = positions < self._integers[3, device_slots]
        _mask(x, stop_ids, too_early[:, None] & (stop_ids >= 0))

    def _any(self, feature: str, slots: np.ndarray) -> bool:
        return bool(self._uses[feature][slots].any())

    def _write_row(self, table: torch.Tensor, slot: int, values: list[int], *, fill: int) -> None:
        row = np.full(table.shape[1], fill, dtype=np.int64)
        row[: len(values)] = values
        table[slot] = self._to_device(row)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def top_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TopLogprobs:
    """Raw log-probabilities of `token_ids` int64 [rows] and of the `num_top` best tokens of logits [rows, vocab]."""
    logprobs, ranks, normalisers = kernels.token_logprobs(logits, token_ids)
    ids = kernels.best_ids(logits, num_top)
    return TopLogprobs(logprobs, ranks, ids, logits.gather(1, ids).float() - normalisers[:, None])


def _has_bias(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or params.allowed_token_ids is not None


def _mask(x: torch.Tensor, ids: torch.Tensor, where: torch.Tensor) -> None:
    """Lowers x[row, ids[row, i]] by _MASKED where where[row, i]; other ids may be anything. [rows, n] each."""
    x.scatter_add_(1, ids.clamp(min=0), torch.where(where, _MASKED, 0.0))


def _widened(table: torch.Tensor, width: int, *, fill: int) -> torch.Tensor:
    """`table` [slots, n], or a wider copy of it padded with `fill` on the right."""
    if table.shape[1] >= width:
        return table
    wider = table.new_full((table.shape[0], width), fill)
    wider[:, : table.shape[1]] = table
    return wider

"""What the driver tells every rank for one step: deltas to the slot tables, and the rows to compute.

A rank keeps, per slot, the token ids, block table, lengths and sampling parameters of one running request. With those,
a steady decode step is a list of slots: positions, input tokens and last tokens are already on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qwen_engine.request import SamplingParams
from qwen_engine.scheduling.block_manager import BlockTable


class SlotInit(NamedTuple):
    """A request that takes a slot: first time, or again after preemption. Replaces whatever the slot held.

    prefix: (slot, number of blocks) if its table begins with those blocks of that slot's, which the plan adds before;
    `block_ids` are those behind them.
    token_ids: the known tokens, prompt and output, from index first_token on; 0 where a rank has to know them all
    (penalties, bad words). num_computed_tokens, no less: how many, from the very first, have KV in the table.
    """

    slot: int
    first_token: int
    token_ids: array[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    prefix: tuple[int, int] | None
    block_ids: BlockTable
    params: SamplingParams
    seed: int
    stop_ids: Sequence[int]
    bad_word_ids: Sequence[Sequence[int]]

    @property
    def num_tokens(self) -> int:
        """How many are known, from the very first."""
        return self.first_token + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: apply `added` and `new_blocks`, then compute `num_tokens[i]` tokens of slot `slots[i]` for every row.

    Decoding rows come first. A row whose tokens reach the end of what its slot knows samples the next one.
    new_blocks: (slot, block id) pairs to append to block tables, in order.
    freed_slots: slots that hold no request any more (they may be in `added` again).
    """

    step: int
    slots: list[int]
    num_tokens: list[int]
    added: list[SlotInit] = field(default_factory=list)
    new_blocks: list[tuple[int, int]] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)

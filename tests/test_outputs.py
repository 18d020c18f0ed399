"""What users get: log-probabilities that read like a dictionary and weigh little."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

from qwen_engine.engine.model_runner import _HostLogprobs
from qwen_engine.layers.sampler import top_logprobs
from qwen_engine.outputs import Logprob, PositionLogprobs


def test_a_position_reads_like_a_dictionary():
    entry = PositionLogprobs((7, 3, 9), (-0.1, -2.0, -5.0), (1, 2, 8))
    same = {7: Logprob(-0.1, 1), 3: Logprob(-2.0, 2), 9: Logprob(-5.0, 8)}
    assert entry == same
    assert same == entry
    assert entry != {**same, 7: Logprob(-0.1, 2)}
    assert list(entry) == list(entry.keys()) == [7, 3, 9]
    assert list(entry.items()) == list(same.items())
    assert list(entry.values()) == list(same.values())
    assert repr(entry) == repr(same)
    assert 9 in entry
    assert 8 not in entry
    assert entry.get(8) is None
    with pytest.raises(KeyError):
        entry[8]
    assert pickle.loads(pickle.dumps(entry)) == copy.deepcopy(entry) == entry
    assert PositionLogprobs((7,), (-0.1,), (1,), ("a",))[7].decoded_token == "a"
    assert not PositionLogprobs((), (), ())


def test_rows_get_the_top_tokens_they_asked_for_and_the_chosen_one():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]]).expand(4, -1)
    chosen, num_top = torch.tensor([2, 0, 1, 3]), [2, 1, 3, 0]
    values = top_logprobs(logits, chosen, 3)
    entries = _HostLogprobs(chosen, values, num_top).positions()
    ranks = [{token_id: value.rank for token_id, value in entry.items()} for entry in entries]
    assert ranks == [{1: 1, 2: 1}, {1: 1, 0: 4}, {1: 1, 2: 2, 3: 3}, {3: 3}]
    expected = logits[0].log_softmax(0)
    for entry in entries:
        for token_id, value in entry.items():
            assert value.logprob == pytest.approx(expected[token_id].item(), abs=1e-6)


def test_the_garbage_collector_walks_through_one_object_of_a_position():
    chosen = torch.arange(50)
    entries = _HostLogprobs(chosen, top_logprobs(torch.randn(50, 60), chosen, 20), [20] * 50).positions()
    gc.collect()
    assert not any(gc.is_tracked(part) for entry in entries for part in gc.get_referents(entry) if type(part) is tuple)

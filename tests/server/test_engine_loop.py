"""The engine's side of the socket, in this process: what commands and failing steps can and cannot do to the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.engine.core import EngineCore
from qwen_engine.errors import EngineDeadError
from qwen_engine.request import RequestSpec, SamplingParams
from qwen_engine.server import wire
from qwen_engine.server.engine_process import EngineLoop

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Peer:
    """The API process's end of a loop that runs in a thread."""

    def __init__(self, core: EngineCore) -> None:
        self._context = zmq.Context()
        self.socket, other = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self.socket.bind("inproc://loop")
        other.connect("inproc://loop")
        self.core = core
        self.stats = wire.EngineStats(num_running=-1)
        """As last told."""
        self.error: BaseException | None = None
        self._other = other
        self._thread = threading.Thread(target=self._run, args=(EngineLoop(core, other),), daemon=True)
        self._thread.start()

    def _run(self, loop: EngineLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            self.error = error

    def tell(self, *message: Any) -> None:
        self.socket.send(wire.pack(*message))

    def add(self, *ids: str, prompt: list[int] = [5, 6, 7], **params: Any) -> None:  # noqa: B006 - never changed
        params = SamplingParams(**{**GREEDY, "max_tokens": 4, **params})
        self.tell("add", [wire.encode_spec(RequestSpec(id_, None, prompt, params, 0)) for id_ in ids])

    def next(self) -> wire.Message:
        assert self.socket.poll(60_000), "the loop is silent"
        message = wire.unpack(self.socket.recv())
        if message[0] == "step" and message[2] is not None:
            self.stats = wire.EngineStats(*message[2])
        return message

    def tokens(self, *sequence_ids: str) -> dict[str, list[int]]:
        """Tokens of these sequences, once all have ended."""
        found: dict[str, list[int]] = {id_: [] for id_ in sequence_ids}
        open_ids = set(sequence_ids)
        while open_ids:
            kind, *arguments = self.next()
            assert kind == "step", (kind, arguments)
            for row in map(wire.decode_output, arguments[0]):
                if row.token_id is not None:
                    found[row.sequence_id].append(row.token_id)
                if row.finish_reason:
                    open_ids.discard(row.sequence_id)
        return found

    def skip_to(self, wanted: str) -> list[Any]:
        while True:
            kind, *arguments = self.next()
            if kind == wanted:
                return arguments

    def close(self) -> None:
        self.tell("shutdown")
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._context.destroy(linger=0)


@pytest.fixture
def peer(tiny_model: Path) -> Iterator[Peer]:
    config = EngineConfig(model=str(tiny_model), device="cpu", kv_cache_bytes=2**22, max_num_waiting=6)
    core = EngineCore(config, tiny_model, ModelConfig.from_folder(tiny_model))
    peer = Peer(core)
    yield peer
    peer.close()
    core.close()


def test_no_command_ends_the_loop(peer):
    for bad in (
        b"",
        b"\xc1",
        wire.pack("dance"),
        wire.pack("add"),
        wire.pack("abort", 5),
        wire.pack("stop", 1),
        b"\x90",
    ):
        peer.socket.send(bad)
    peer.tell("abort", ["unknown"])
    peer.tell("stop", "unknown", "x")
    peer.tell("reset_prefix_cache")
    peer.add("1", n=1)
    assert len(peer.tokens("1-0")["1-0"]) == 4
    assert peer.error is None


def test_requests_of_a_call_are_taken_together_or_not_at_all(peer):
    for ids, prompt, max_tokens, word in (
        (("1", "2"), [5, 99999], 4, "99999"),
        (("3",), [], 4, "empty"),
        (("4",), [5], 4, None),
    ):
        peer.add(*ids, prompt=prompt, max_tokens=max_tokens)
        if word is None:
            assert len(peer.tokens("4-0")["4-0"]) == 4
        else:
            refused, message, param, is_refusal = peer.skip_to("refused")
            assert (refused, param, is_refusal) == (list(ids), "prompt", True)
            assert word in message
    peer.add("5", n=20, temperature=1.0)  # the queue has room for 6
    refused, message, _, is_refusal = peer.skip_to("refused")
    assert (refused, is_refusal) == (["5"], True)
    assert "max_num_waiting is 6" in message
    peer.tell("add", [["6", [1], {"temperature": "hot"}, 0, 0, None, [], []]])
    assert peer.skip_to("refused")[0] == ["6"]
    peer.add("7")
    assert len(peer.tokens("7-0")["7-0"]) == 4
    assert not peer.core.has_work


def test_a_failed_step_aborts_what_runs_and_the_next_request_is_served(peer, monkeypatch):
    peer.add("1")
    expected = peer.tokens("1-0")["1-0"]
    with monkeypatch.context() as patch:
        patch.setattr(peer.core, "step", lambda: fail_and_reset(peer.core))
        peer.add("2")
        assert "planted" in peer.skip_to("aborted")[0]
    peer.add("3")
    assert peer.tokens("3-0")["3-0"] == expected
    assert peer.error is None


def test_an_engine_whose_every_step_fails_gives_up(peer, monkeypatch):
    monkeypatch.setattr(peer.core, "step", lambda: fail_and_reset(peer.core))
    peer.add("1")
    peer.skip_to("aborted")
    peer.add("2")
    peer._thread.join(60)
    assert isinstance(peer.error, EngineDeadError)
    assert "2 steps in a row failed" in str(peer.error)


def fail_and_reset(core: EngineCore) -> None:
    """What a step does that meets an error it does not know."""
    core.reset()
    raise ZeroDivisionError("planted")


def test_idle_numbers_are_told_once(peer):
    peer.add("1", max_tokens=30)
    peer.tokens("1-0")
    while peer.stats != wire.EngineStats():
        peer.next()
    assert not peer.socket.poll(1000), "an idle engine has nothing to say"

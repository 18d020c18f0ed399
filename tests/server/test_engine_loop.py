"""The engine's side of the socket, in this process: what commands and failing steps can and cannot do to the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import zmq
from fault_tools import wait_until
from tokenizers import decoders, models, pre_tokenizers, trainers

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.engine.core import EngineCore
from qwen_engine.errors import EngineDeadError
from qwen_engine.request import Request, RequestSpec, SamplingParams
from qwen_engine.server import wire
from qwen_engine.server.constraint_queue import AddedCall, ConstraintQueue
from qwen_engine.server.engine_process import EngineLoop
from qwen_engine.tokenization.structured import GrammarCompiler
from qwen_engine.tokenization.tokenizer import Tokenizer

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class GatedCompiler(GrammarCompiler):
    """Compiles when the test says so."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size)
        self.gate = threading.Event()
        self.gate.set()
        self.num_constrained = 0

    def constrain(self, request: Request) -> None:
        assert self.gate.wait(60)
        if request.request_id.startswith("broken"):
            raise ZeroDivisionError("planted")
        super().constrain(request)
        self.num_constrained += 1


class Peer:
    """The API process's end of a loop that runs in a thread."""

    def __init__(self, core: EngineCore, compiler: GatedCompiler) -> None:
        self._context = zmq.Context()
        self._context.linger = 0
        self.socket, other = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self.socket.bind("inproc://loop")
        other.connect("inproc://loop")
        self.core = core
        self.compiler = compiler
        self.stats = wire.EngineStats(num_running=-1)
        """As last told."""
        self.error: BaseException | None = None
        self._other = other
        self._constraints = ConstraintQueue(lambda: compiler)
        loop = EngineLoop(core, other, self._constraints)
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
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
        self._constraints.close()
        self._context.destroy()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes and little more, so that it has fewer ids than the tiny model."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["yes"], trainers.BpeTrainer(vocab_size=258, initial_alphabet=alphabet))
    return Tokenizer(backend, {})


@pytest.fixture
def peer(tiny_model: Path, tokenizer: Tokenizer) -> Iterator[Peer]:
    config = EngineConfig(model=str(tiny_model), device="cpu", kv_cache_bytes=2**22, max_num_waiting=6)
    model_config = ModelConfig.from_folder(tiny_model)
    core = EngineCore(config, tiny_model, model_config)
    peer = Peer(core, GatedCompiler(tokenizer, vocab_size=model_config.vocab_size))
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


def test_every_step_tells_how_many_tokens_it_has_computed(peer):
    peer.core.scheduler.max_num_batched_tokens = 40
    peer.add("1", prompt=[*range(5, 105)])
    told, ended = [], False
    while not ended:
        kind, rows, _, num_tokens = peer.next()
        assert kind == "step"
        told.append((len(rows), num_tokens))
        ended = any(wire.decode_output(row).finish_reason for row in rows)
    assert told == [(0, 40), (0, 40), (1, 20), (1, 1), (1, 1), (1, 1)]


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


END = 400  # no text
YES = {"structured_outputs": {"choice": ["yes"]}, "stop_token_ids": [END], "max_tokens": 10}


def text_of(peer: Peer, token_ids: list[int]) -> str:
    assert token_ids.pop() == END
    return peer.compiler._tokenizer.decode(token_ids)


def test_others_are_served_while_a_grammar_is_compiled(peer):
    peer.add("free")
    alone = peer.tokens("free-0")["free-0"]
    peer.compiler.gate.clear()
    peer.add("1", n=2, temperature=1.0, **YES)
    peer.add("2", **YES)
    for id_ in ("3", "4"):
        peer.add(id_)
        assert peer.tokens(f"{id_}-0")[f"{id_}-0"] == alone
    while peer.stats.num_waiting != 3:  # the ones that wait for their grammar
        peer.next()
    peer.compiler.gate.set()
    texts = peer.tokens("1-0", "1-1", "2-0")
    assert [text_of(peer, ids) for ids in texts.values()] == ["yes"] * 3


def test_an_abort_while_a_grammar_is_compiled_leaves_nothing(peer):
    peer.compiler.gate.clear()
    peer.add("1", n=3, temperature=1.0, **YES)
    peer.add("2", **YES)
    peer.add("3", **YES)
    peer.tell("abort", ["1-0", "1-2"])
    peer.tell("abort", ["2-0", "2-0"])
    peer.add("free")
    peer.tokens("free-0")  # the aborts have arrived
    peer.compiler.gate.set()
    texts = peer.tokens("1-1", "3-0")
    assert [text_of(peer, ids) for ids in texts.values()] == ["yes"] * 2
    assert peer.compiler.num_constrained <= 3  # the one that was at the gate may be among them
    while peer.stats != wire.EngineStats():
        peer.next()
    assert not peer.core.has_work


def test_a_constraint_that_fails_harms_its_own_call_alone(peer):
    broken = {**YES, "structured_outputs": {"regex": "(a"}}  # a check would have refused it
    peer.compiler.gate.clear()
    peer.add("1", "2", **broken)
    peer.add("broken", **YES)
    peer.add("too-many", **{**YES, "n": 20, "temperature": 1.0})
    peer.add("3", **YES)
    peer.compiler.gate.set()
    refused, message, param, is_refusal = peer.skip_to("refused")
    assert (refused, param, is_refusal) == (["1", "2"], "structured_outputs", True)
    assert "grammar is not supported" in message
    assert peer.skip_to("refused") == [["broken"], "planted", None, False]
    assert "max_num_waiting" in peer.skip_to("refused")[1]
    assert text_of(peer, peer.tokens("3-0")["3-0"]) == "yes"


def test_a_compiler_that_cannot_be_made_is_each_call_s_error():
    queue = ConstraintQueue(lambda: 1 // 0)
    queue.wait_ready()
    for id_ in ("1", "2"):
        queue.put(AddedCall([id_], {f"{id_}-0": Request(f"{id_}-0", [5], SamplingParams(**YES))}))
    failed = []

    def have_failed() -> bool:
        failed.extend((call.request_ids, type(error)) for call, error in queue.take_done())
        return len(failed) == 2

    wait_until(have_failed)
    assert failed == [(["1"], ZeroDivisionError), (["2"], ZeroDivisionError)]
    assert queue.num_sequences == 0
    queue.close()


def test_idle_numbers_are_told_once(peer):
    peer.add("1", max_tokens=30)
    peer.tokens("1-0")
    while peer.stats != wire.EngineStats():
        peer.next()
    assert not peer.socket.poll(1000), "an idle engine has nothing to say"

"""Whatever ends a rank ends every call with the reason, soon, and leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_tools import (
    ERROR_LIMIT_S,
    Call,
    is_running,
    nothing_left,
    plant,
    program,
    report,
    run_program,
    wait_until,
    workers_of,
)

from qwen_engine import LLM, SamplingParams
from qwen_engine.engine import executor
from qwen_engine.errors import EngineDeadError
from qwen_engine.models import weights

PROMPT = list(range(1, 20))
LONG = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True)
ENDLESS = SamplingParams(temperature=1.0, max_tokens=480, ignore_eos=True, n=4)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
REASONS = {"kill": r"killed by SIGKILL", "exit": r"exit code 7", "exception": r"ValueError: planted fault"}
IN_A_COLLECTIVE = """\
calls, real = [], module.TPGroup.all_reduce
def all_reduce(self, x, **options):
    calls.append(x)
    if len(calls) > 60 and self.rank == {rank}:
        time.sleep(0.1)  # the others are inside by now
        die("{kind}")
    return real(self, x, **options)
module.TPGroup.all_reduce = all_reduce"""
HANGS_IN_STEP = """\
calls, real = [], module.TPGroup.all_reduce
def all_reduce(self, x, **options):
    calls.append(x)
    if len(calls) > 60:
        time.sleep(600)
    return real(self, x, **options)
module.TPGroup.all_reduce = all_reduce"""
HANGS_BETWEEN_STEPS = """\
calls, real = [], module.RingSubscriber.receive
def receive(self, timeout_s=None):
    calls.append(None)
    if len(calls) == 30:
        time.sleep(600)
    return real(self, timeout_s)
module.RingSubscriber.receive = receive"""
BETWEEN_STEPS = """\
calls, real = [], module.RingSubscriber.receive
def receive(self, timeout_s=None):
    calls.append(None)
    if len(calls) == 30:
        die("{kind}")
    return real(self, timeout_s)
module.RingSubscriber.receive = receive"""
SCRIPT = """\
import sys, time
from qwen_engine import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, skip_tokenizer_init=True, max_num_seqs=4)
params = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True)
def steps():
    while True:
        yield from llm.stream([list(range(1, 20))], params)
for number, _ in enumerate(steps()):
    if number == 5:
        print("running", flush=True)
    if number >= 5 and sys.argv[2] != "running":
        break
if sys.argv[2] == "idle":
    print("idle", flush=True)
    time.sleep(600)
"""


def engine(folder: Path, **options) -> LLM:
    options = {"tensor_parallel_size": 2, "max_num_seqs": 4, **options}
    return LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **options)


def generate(llm: LLM, params: SamplingParams = SHORT) -> list[int]:
    return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids


def drain(llm: LLM) -> None:
    for _ in llm.stream([PROMPT], LONG):
        pass


def for_ever(call: Callable[[LLM], object], llm: LLM) -> None:
    """Until it raises."""
    while True:
        call(llm)


def reason_of(llm: LLM) -> str | None:
    return llm._core._executor._workers.failure


def assert_dead(llm: LLM, reason: str) -> None:
    """Every call fails at once, and says why."""
    for call in (lambda: generate(llm), lambda: drain(llm)):
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match=reason):
            call()
        assert time.monotonic() - start < ERROR_LIMIT_S


@pytest.fixture(scope="module")
def warm(make_tiny_model) -> list[int]:
    """The tokens of SHORT; what a process opens once and keeps is open afterwards."""
    with engine(make_tiny_model()) as llm:
        return generate(llm)


@pytest.fixture
def many_files():
    """A process whose next descriptor is above 1023, where select() ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may open {hard} files here; the test needs {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for fd in opened:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Plants a fault in the workers that the test starts."""
    monkeypatch.syspath_prepend(tmp_path)
    return lambda module, body: plant(tmp_path, f"qwen_engine.{module}", body)


START_FAULTS = {
    ("import", "exception"): ("engine.channel", "die('exception')"),
    ("join", "kill"): ("engine.worker", "module.connect_ranks = lambda *args, **options: die('kill')"),
    ("load", "kill"): ("models.weights", "module._check_headers = lambda *args: die('kill')"),
    ("capture", "kill"): ("engine.model_runner", "module.ModelRunner.capture_graphs = lambda self: die('kill')"),
    ("attach", "exit"): ("engine.channel", "module.connect = lambda *args, **options: die('exit')"),
}


def test_tpw_07_a_worker_that_ends_at_the_start_ends_the_start(tmp_path, warm, make_tiny_model, monkeypatch):
    """One engine per fault, all at once."""
    folder = make_tiny_model()
    real = weights.safe_open

    def slow(*args, **options):  # rank 0 would need a minute
        time.sleep(0.5)
        return real(*args, **options)

    monkeypatch.setattr(weights, "safe_open", slow)
    starts = {}
    with nothing_left():
        for number, (fault, (module, body)) in enumerate(START_FAULTS.items()):
            place = tmp_path / str(number)
            place.mkdir()
            planted = plant(place, f"qwen_engine.{module}", body)
            with monkeypatch.context() as context:
                context.syspath_prepend(place)
                others = set(workers_of())
                start = Call(lambda: engine(folder))
                starts[fault] = (planted, start)
                wait_until(lambda: set(workers_of()) - others or not start.is_alive())  # noqa: B023
        for (stage, kind), (planted, start) in starts.items():
            start.join(120)
            report(f"{kind} at {stage} to error", planted.death_time(), until=start.ended)
            assert isinstance(start.error, EngineDeadError)
            assert re.fullmatch(rf"rank 1 died \({REASONS[kind]}\)", str(start.error))


STEP_FAULTS = {
    "step": ("distributed.tp_group", IN_A_COLLECTIVE),
    "between": ("engine.channel", BETWEEN_STEPS),
}


@pytest.mark.parametrize(
    ("stage", "kind", "ranks"), [("step", "kill", 3), ("step", "exception", 2), ("between", "exit", 2)]
)
def test_tpw_01_a_worker_that_ends_under_load_ends_all_calls(stage, kind, ranks, planted, warm, make_tiny_model):
    """The last rank fails; it is the one to be named, not one whose collective broke."""
    module, body = STEP_FAULTS[stage]
    fault = planted(module, body.format(kind=kind, rank=ranks - 1))
    reason = rf"^rank {ranks - 1} died \({REASONS[kind]}\)$"
    folder = make_tiny_model(num_attention_heads=6, num_key_value_heads=3) if ranks == 3 else make_tiny_model()
    with nothing_left(), engine(folder, tensor_parallel_size=ranks) as llm:
        calls = [Call(lambda: generate(llm, LONG)), Call(lambda: drain(llm))]
        for call in calls:
            call.join(120)
            report(f"{kind} in {stage} to error", fault.death_time(), until=call.ended)
            assert isinstance(call.error, EngineDeadError)
            assert re.search(reason, str(call.error))
        assert_dead(llm, reason)
        llm.close()


def test_tpw_01_a_worker_killed_while_idle_is_noticed_at_once(many_files, warm, make_tiny_model):
    with nothing_left(), engine(make_tiny_model()) as llm:
        generate(llm)
        stream = llm.stream([PROMPT], LONG)
        next(stream)
        killed_at = time.monotonic()
        os.kill(workers_of()[0], signal.SIGKILL)
        wait_until(lambda: reason_of(llm), ERROR_LIMIT_S)
        report("kill while idle to notice", killed_at)
        with pytest.raises(EngineDeadError, match=r"rank 1 died \(killed by SIGKILL\)"):
            next(stream)
        assert_dead(llm, r"rank 1 died \(killed by SIGKILL\)")


def test_tpw_01_a_stopped_worker_is_caught_by_the_step_watchdog(warm, make_tiny_model, capfd):
    folder = make_tiny_model(num_attention_heads=6, num_key_value_heads=3)
    with nothing_left(), engine(folder, tensor_parallel_size=3, step_timeout_s=5.0) as llm:
        generate(llm)
        worker = workers_of()[-1]
        num_steps, _ = llm._core._executor._workers.progress.position
        calls = [Call(functools.partial(for_ever, call, llm)) for call in (generate, drain)]
        wait_until(lambda: llm._core._executor._workers.progress.position[0] > num_steps + 10)
        stopped_at = time.monotonic()
        os.kill(worker, signal.SIGSTOP)
        for call in calls:
            call.join(120)
            report("stop to error, of which 5 s are the deadline", stopped_at, until=call.ended)
            where = r"rank 2 does not answer; ranks 0 and 1 wait in step \d+, at its collective \d+"
            assert re.search(rf"a step took longer than step_timeout_s = 5 s: {where};", str(call.error))
        wait_until(lambda: not is_running(worker), ERROR_LIMIT_S)
        stacks = capfd.readouterr().err
        assert "executor.py" in stacks  # of rank 0
        assert "worker.py" in stacks  # of rank 1; a stopped process cannot write its own
        assert_dead(llm, "a step took longer")


HANGS = {
    "in a step": (
        "distributed.tp_group",
        HANGS_IN_STEP,
        r"rank 1 has not gone beyond collective (\d+) of step (\d+); rank 0 waits in step \2, at its collective (\d+)",
    ),
    "between steps": (
        "engine.channel",
        HANGS_BETWEEN_STEPS,
        r"rank 1 has not begun step (30); rank 0 waits in step 30, at its collective (1)",
    ),
}


def test_tpw_01_the_watchdog_names_the_rank_that_the_others_wait_for(tmp_path, warm, make_tiny_model, monkeypatch):
    """One engine per place where the code of rank 1 hangs, both at once."""
    calls = {}
    with nothing_left():
        for number, (place, (module, body, _)) in enumerate(HANGS.items()):
            folder = tmp_path / str(number)
            folder.mkdir()
            plant(folder, f"qwen_engine.{module}", body)
            with monkeypatch.context() as context:
                context.syspath_prepend(folder)
                llm = engine(make_tiny_model(), step_timeout_s=5.0)
            calls[place] = Call(functools.partial(drain, llm))
            del llm
        for place, call in calls.items():
            call.join(120)
            assert isinstance(call.error, EngineDeadError)
            found = re.search(HANGS[place][2], str(call.error))
            assert found, call.error
            if place == "in a step":
                assert int(found[3]) == int(found[1]) + 1


def test_tpw_07_a_worker_that_never_connects_ends_the_start(planted, warm, make_tiny_model, monkeypatch):
    planted("engine.worker", "module.connect_ranks = lambda *args, **options: time.sleep(600)")
    monkeypatch.setattr(executor, "CONNECT_TIMEOUT_S", 1.0)
    with nothing_left(), pytest.raises(EngineDeadError, match="connecting all ranks took longer than 1 s"):
        engine(make_tiny_model())


def test_an_error_on_rank_0_ends_the_workers(warm, make_tiny_model, monkeypatch):
    with nothing_left(), engine(make_tiny_model()) as llm:
        (worker,) = workers_of()
        stream = llm.stream([PROMPT], LONG)
        next(stream)

        def fail(*_: object) -> None:
            raise AssertionError

        monkeypatch.setattr(llm._core._executor.runner.decode, "run", fail)
        failed_at = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 0 failed \(AssertionError\)"):
            next(stream)
        report("error on rank 0 to error", failed_at)
        wait_until(lambda: not is_running(worker), ERROR_LIMIT_S)
        assert_dead(llm, "rank 0 failed")
        monkeypatch.undo()


@pytest.fixture
def interrupts(monkeypatch):
    """Makes Ctrl-C come in the third step from now.

    hangs: a worker to stop in that step; another Ctrl-C comes a while later, at the time that is put into the list.
    """

    def plan(llm: LLM, *, hangs: int | None = None) -> list[float]:
        runner = llm._core._executor.runner
        execute, num_steps = runner.execute, itertools.count(1)
        sent_at: list[float] = []

        def send() -> None:
            sent_at.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        def interrupted(*args: object) -> object:
            if next(num_steps) == 3:
                monkeypatch.undo()
                signal.raise_signal(signal.SIGINT)
                if hangs is not None:
                    os.kill(hangs, signal.SIGSTOP)
                    threading.Timer(0.3, send).start()
            return execute(*args)

        monkeypatch.setattr(runner, "execute", interrupted)
        return sent_at

    return plan


def test_shd_01_interrupts(warm, make_tiny_model, interrupts):
    """One Ctrl-C ends the call after the step; a second one ends a step that hangs, and the engine with it.

    A program that handles it itself keeps doing so.
    """
    with nothing_left(), engine(make_tiny_model()) as llm:
        (worker,) = workers_of()
        for _ in range(2):
            interrupts(llm)
            with pytest.raises(KeyboardInterrupt):
                generate(llm, ENDLESS)
            assert generate(llm) == warm
        came: list[int] = []
        previous = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
        try:
            interrupts(llm)
            generate(llm, LONG)
        finally:
            signal.signal(signal.SIGINT, previous)
        assert came == [signal.SIGINT]
        sent_at = interrupts(llm, hangs=worker)
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
        report("second Ctrl-C to the end of a hanging step", sent_at[0])
        wait_until(lambda: not is_running(worker), ERROR_LIMIT_S)
        assert_dead(llm, "rank 0 was interrupted")


def test_shd_01_workers_die_with_rank_0(warm, make_tiny_model):
    folder = str(make_tiny_model())
    with (
        program("-c", SCRIPT, folder, "running") as running,
        program("-c", SCRIPT, folder, "idle") as idle,
        program("-c", SCRIPT, folder, "idle") as starting,
        program("-c", SCRIPT, folder, "leave") as leaving,
    ):
        for process, number, moment in (
            (starting, signal.SIGKILL, "starting"),
            (running, signal.SIGKILL, "running"),
            (idle, signal.SIGTERM, "idle"),
        ):
            if moment == "starting":
                wait_until(lambda: workers_of(starting.pid))
            else:
                wait_until(lambda: process.stdout.readline().strip() == moment)  # noqa: B023
            (worker,) = workers_of(process.pid)
            sent_at = time.monotonic()
            process.send_signal(number)
            wait_until(lambda: not is_running(worker), ERROR_LIMIT_S)  # noqa: B023
            report(f"{number.name} of rank 0 while {moment} to the death of its worker", sent_at)
            assert process.wait(ERROR_LIMIT_S) == -number
        # Without any close, the end of the interpreter is an orderly one too.
        assert leaving.communicate(timeout=120) == ("running\n", "")
        assert leaving.returncode == 0


def test_shd_01_ctrl_c_in_a_terminal_reaches_all_and_ends_all(warm):
    arguments = ["-m", "qwen_engine", "--model", "demo", "--device", "cpu", "--tensor-parallel-size", "2"]
    arguments += ["--max-tokens", "1000", "--ignore-eos"]
    for moment in ("start", "step"):
        with program(*arguments) as process:
            wait_until(lambda: workers_of(process.pid))
            (worker,) = workers_of(process.pid)
            if moment == "step":
                process.stdout.read(1)
            sent_at = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=120)
            report(f"Ctrl-C at the {moment} to the end", sent_at)
            assert (process.returncode, err.strip()) == (130, "interrupted")
            wait_until(lambda: not is_running(worker), ERROR_LIMIT_S)  # noqa: B023


def test_tpw_07_a_damaged_shard_on_one_rank_is_one_line_and_an_exit_code(tmp_path, warm, make_tiny_model):
    body = """\
real = module._check_headers
def check(table, folder, config):
    copy = folder.__class__(DEATH_FILE + ".d")
    copy.mkdir()
    for source in folder.iterdir():
        data = source.read_bytes()
        (copy / source.name).write_bytes(data[:-1000] if source.suffix == ".safetensors" else data)
    return real(table, copy, config)
module._check_headers = check"""
    fault = plant(tmp_path, "qwen_engine.models.weights", body)
    arguments = ["main_qwen32.py", "--model", "demo", "--device", "cpu"]
    code, out, err = run_program(*arguments, path=[fault.folder])
    assert (code, out) == (2, ""), err
    (error,) = err.splitlines()
    assert re.match(r"error: rank 1 died \(CheckpointError: .* cannot be read", error)


def test_shd_04_engines_in_one_process_leave_nothing_and_touch_nobody(warm, make_tiny_model):
    """Ended in every way there is (`with` is how most tests end theirs); the program's own child lives on."""
    own = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = make_tiny_model()
    sizes = []
    made: list[LLM] = []
    with nothing_left():
        for way in ("killed", "close", "collected"):
            if way == "collected":
                # The death of the parent's thread that starts a process can count as the parent's.
                starter = threading.Thread(target=lambda: made.append(engine(folder)))
                starter.start()
                starter.join()
                llm = made.pop()
            else:
                llm = engine(folder)
            assert generate(llm) == warm
            process = llm._core._executor._workers._workers[0].process
            if way == "killed":
                process.kill()
            if way != "collected":
                llm.close()
            del llm
            gc.collect()
            # One that was told to stop has come to its own end.
            assert process.returncode == (-signal.SIGKILL if way == "killed" else 0)
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert max(sizes[1:]) - sizes[0] < 32 << 20
    assert own.poll() is None
    own.communicate(b"\n")
    assert own.returncode == 0

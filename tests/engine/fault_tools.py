"""What the fault tests share: faults planted in workers, what a process holds, and waiting with a limit."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
ERROR_LIMIT_S = 20.0
"""The promise is 2 s; a machine that is busy ten times over needs more. What is wrong takes a minute or has no end."""

_PLANT = """\
import importlib.abc, importlib.util, os, signal, sys, time

TARGET, DEATH_FILE = {module!r}, {record!r}

def die(kind):
    with open(DEATH_FILE, "w") as file:
        file.write(repr(time.monotonic()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(7)
    raise ValueError("planted fault")

class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        self.loader, spec.loader = spec.loader, self
        return spec
    def create_module(self, spec):
        return self.loader.create_module(spec)
    def exec_module(self, module):
        self.loader.exec_module(module)
        patch(module)

if any("qwen_engine.engine.worker" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, Hook())

def patch(module):
{body}
"""


@dataclass(frozen=True)
class Plant:
    """A fault in the workers of every engine that has `folder` on its path."""

    folder: Path
    record: Path

    def death_time(self) -> float:
        """When the fault struck, on the clock of time.monotonic."""
        return float(self.record.read_text())


def plant(folder: Path, module: str, body: str) -> Plant:
    """Writes a module that runs `body` in a worker right after the import of `module`.

    `body` may use `module` and `die(kind)`, kind being "kill", "exit" or "exception". Python imports it at start under
    the name sitecustomize, from the folder that the caller puts on the path.
    """
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    record = folder / "death"
    (folder / "sitecustomize.py").write_text(_PLANT.format(module=module, record=str(record), body=indented))
    return Plant(folder, record)


@dataclass(frozen=True)
class Holdings:
    """What this process holds that an engine might leave behind."""

    children: frozenset[int]
    files: frozenset[tuple[int, str]]
    threads: frozenset[int]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        files = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                files.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        tasks = frozenset(int(name) for name in os.listdir("/proc/self/task"))
        own = {name for name in os.listdir("/dev/shm") if "qwen" in name or str(os.getpid()) in name}
        return cls(frozenset(children()), frozenset(files), tasks, frozenset(own))

    def leftovers(self, limit_s: float = ERROR_LIMIT_S) -> str:
        """What is there now and was not then; empty as soon as, within the limit, there is nothing."""
        deadline = time.monotonic() + limit_s
        while True:
            now = Holdings.now()
            new = {
                "children": now.children - self.children,
                "files": now.files - self.files,
                "threads": now.threads - self.threads,
                "shared memory": now.shared_memory - self.shared_memory,
            }
            new = {kind: found for kind, found in new.items() if found}
            if not new or time.monotonic() > deadline:
                return str(new) if new else ""
            time.sleep(0.02)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if this process holds more after the block than before."""
    before = Holdings.now()
    yield
    assert not before.leftovers()


def children(pid: int | None = None) -> list[int]:
    """Child processes of a process, of this one by default, zombies included."""
    pid = pid or os.getpid()
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"qwen_engine.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def workers_of(pid: int | None = None) -> list[int]:
    return [child for child in children(pid) if is_worker(child)]


def ranks_of(pid: int) -> dict[int, int]:
    """Rank → process, of a torchrun."""
    found = {}
    for child in children(pid):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found.update({int(entry[5:]): child for entry in environment if entry.startswith(b"RANK=")})
    return found


def is_running(pid: int) -> bool:
    """False once the process has ended, even if nobody has collected its status yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], object], limit_s: float = 120.0) -> float:
    """Seconds until `condition()` held; AssertionError after the limit."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, f"not within {limit_s} s"
        time.sleep(0.01)
    return time.monotonic() - start


def report(what: str, since: float, *, until: float | None = None) -> None:
    """Prints how long something took, and checks that it came to an end of itself."""
    seconds = (time.monotonic() if until is None else until) - since
    print(f"{what}: {seconds:.3f} s")
    assert seconds < ERROR_LIMIT_S


def listening(pids: Sequence[int]) -> set[tuple[str, int]]:
    """IPv4 addresses and ports on which these processes listen for TCP; IPv6 ones as the kernel writes them."""
    inodes = set()
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                if len(address) == 8:
                    address = socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder))
                found.add((address, int(port, 16)))
    return found


class Call(threading.Thread):
    """Runs a call in a thread; `error` and `ended` tell how and when it ended; what it refers to is let go."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.error: BaseException | None = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error.with_traceback(None)  # its frames would keep the engine alive
            self.error.__cause__ = None
            self.error.__context__ = None
        self.ended = time.monotonic()
        del self._call


@contextlib.contextmanager
def program(*args: str, path: Sequence[Path] = (), **options: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program in a process group of its own; whatever of the group is left at the end is killed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT / "src", ROOT / "tests"])),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [sys.executable, *args],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )
    try:
        yield process
    finally:
        started = workers_of(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def run_program(*args: str, path: Sequence[Path] = (), limit_s: float = 120.0) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a Python program."""
    with program(*args, path=path) as process:
        out, err = process.communicate(timeout=limit_s)
    return process.returncode, out, err


@functools.cache
def printed_by_one_rank(*args: str) -> str:
    """What main_qwen32.py prints for these arguments without any tensor parallelism."""
    argv = ["main_qwen32.py", *args, "--tensor-parallel-size", "1"]
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(io.StringIO()) as out,
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(str(ROOT / "main_qwen32.py"), run_name="__main__")
    assert ended.value.code == 0
    return out.getvalue()

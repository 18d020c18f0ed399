"""The status link over TCP: who may join, what a rank says, and how its end is seen."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fault_tools import ERROR_LIMIT_S, ROOT, program, wait_until

from qwen_engine.engine import status_link
from qwen_engine.engine.status_link import ASK_POSITION, ASK_STACKS, LinkListener, RankLink

RANK = """\
import sys, time
from qwen_engine.engine.status_link import StatusLink
link = StatusLink.connect(sys.argv[1], 1)
for _ in range(3):
    link.progress.begin_step()
link.progress.enter_collective()
print("joined", flush=True)
{body}"""


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    listener = LinkListener("127.0.0.1", 2)
    yield listener
    listener.close()


@pytest.fixture
def start(listener) -> Iterator:
    """Starts rank 1, which runs `body` once it has joined; returns rank 0's end of the link and the process."""
    links: list[RankLink] = []

    def run(body: str) -> tuple[RankLink, subprocess.Popen[str]]:
        process = stack.enter_context(program("-c", RANK.format(body=body), listener.address))
        assert process.stdout.readline() == "joined\n"
        wait_until(lambda: links.extend(listener.take()) or links, ERROR_LIMIT_S)
        return links[0], process

    with contextlib.ExitStack() as stack:
        yield run
    for link in links:
        link.close()


def taken(link: RankLink) -> RankLink:
    link.take()
    return link


def test_a_rank_answers_while_its_own_thread_is_busy(start):
    link, process = start("while True: pass")
    link.ask(ASK_POSITION)
    wait_until(lambda: taken(link).position == (3, 1), ERROR_LIMIT_S)
    link.ask(ASK_STACKS)
    assert next(line for line in process.stderr if "in <module>" in line)
    assert taken(link).is_alive


@pytest.mark.parametrize(
    ("body", "is_alive", "reason"),
    [
        ("link.leave()", True, None),
        ("link.leave(ValueError('bad shard'))", False, "ValueError: bad shard"),
        ("import os; os._exit(3)", False, None),
    ],
)
def test_the_end_of_a_rank_is_seen_with_its_reason(body, is_alive, reason, start):
    link, process = start(body)
    wait_until(lambda: taken(link).has_ended, ERROR_LIMIT_S)
    assert (link.is_alive, link.reason) == (is_alive, reason)
    process.wait(ERROR_LIMIT_S)


@pytest.mark.parametrize("end", ["cut", "close"])
def test_a_rank_ends_at_once_when_rank_0_ends_the_link(end, start):
    link, process = start("time.sleep(600)")
    getattr(link, end)()
    _, err = process.communicate(timeout=ERROR_LIMIT_S)
    assert process.returncode == 1
    assert "rank 0 has ended" in err


def strangers_words(address: str) -> list[bytes]:
    """Greetings that are almost right."""
    token = address.rpartition(":")[2]
    wrong = re.sub("^.", "1" if token[0] == "0" else "0", token)
    return [
        f"{wrong}0001".encode(),
        f"{token}0000".encode(),
        f"{token}0002".encode(),
        f"{token}-001".encode(),
        bytes(36),
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ]


def test_sec_01_strangers_are_dropped_and_do_not_keep_a_rank_out(listener, start, caplog, monkeypatch):
    monkeypatch.setattr(status_link, "_MAX_STRANGERS", 4)
    host, port, _ = listener.address.rsplit(":", 2)
    words = strangers_words(listener.address)
    connections = []
    for said in [*words, *[b"silent"] * 8]:
        connection = socket.create_connection((host, int(port)))
        connection.sendall(said)
        connections.append(connection)
    wait_until(lambda: listener.take() == [] and len(caplog.records) >= len(words) + 4, ERROR_LIMIT_S)
    link, _ = start("time.sleep(600)")
    assert link.rank == 1
    for connection in connections:  # all are hung up on, at the latest now that every rank has joined
        connection.settimeout(ERROR_LIMIT_S)
        with connection, pytest.raises((ConnectionError, IndexError)):
            connection.recv(1)[0]


def test_the_listener_is_gone_once_all_ranks_have_joined(listener, start):
    start("time.sleep(600)")
    host, port, _ = listener.address.rsplit(":", 2)
    with pytest.raises(ConnectionError):
        socket.create_connection((host, int(port)), timeout=ERROR_LIMIT_S)
    assert listener.filenos == []


def test_a_worker_reports_before_it_imports_torch():
    code = "import sys, qwen_engine.engine.worker_main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0

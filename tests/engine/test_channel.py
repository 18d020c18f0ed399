"""Both transports between real processes: order, sizes, speeds, deaths, strangers and what stays behind (nothing)."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from fault_tools import wait_until

from qwen_engine.engine import channel
from qwen_engine.engine.channel import ChannelError, Publisher, Subscriber, connect, open_publisher
from qwen_engine.engine.channel import base as channel_base
from qwen_engine.engine.channel import ring as ring_channel
from qwen_engine.engine.channel import zmq as zmq_channel

SOURCE = Path(channel.__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
KINDS = ["ring", "zmq"]
LIMIT_S = 120.0
"""For what takes a moment, on a machine that is busy many times over."""

DIGESTS = """
import hashlib
while (message := subscriber.receive(120)) != b"end":
    print(len(message), hashlib.sha256(message).hexdigest())
"""
NUMBERED = """
import random, time
number, pause_s, one_in = 0, float(sys.argv[3]), int(sys.argv[4])
while (message := subscriber.receive(120)) != b"end":
    size = int.from_bytes(message[:8], "little")
    assert size == number and message[8:] == bytes([number % 256]) * (number * 31 % 2000), (number, message[:20])
    number += 1
    if random.randrange(one_in) == 0:
        time.sleep(random.uniform(0, pause_s))
print(number)
"""
IDLE = """
print("attached", flush=True)
import time
time.sleep(600)
"""
PUBLISHER = """
import sys, time
from qwen_engine.engine.channel import open_publisher
publisher = open_publisher(sys.argv[1], num_subscribers=1)
print(publisher.address, flush=True)
for name in range(3):
    publisher.publish(f"{sys.argv[2]}{name}".encode())
time.sleep(600)
"""


def numbered(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes([number % 256]) * (number * 31 % 2000)


class Processes:
    """Starts Python programs and leaves none running."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, code: str, *args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, args)]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def reader(self, body: str, address: str, *args: object, index: int = 0) -> subprocess.Popen[str]:
        """A process that attaches as subscriber `index` and runs `body`; more arguments from sys.argv[3] on."""
        head = "import sys\nfrom qwen_engine.engine.channel import connect\n"
        attach = "subscriber = connect(sys.argv[1], index=int(sys.argv[2]), timeout_s=120)\n"
        return self.start(head + attach + body, address, index, *args)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def publisher_of(kind: str, **options: Any) -> Publisher:
    return open_publisher(kind, **{"num_subscribers": 1, "timeout_s": LIMIT_S, **options})


def pair(kind: str, **options: Any) -> tuple[Publisher, Subscriber]:
    publisher = publisher_of(kind, **options)
    return publisher, connect(publisher.address, index=0, timeout_s=LIMIT_S)


def forged(address: str, field: str) -> str:
    """The address with one digit of a secret changed."""
    at = address.index(field + "=") + len(field) + 1
    return address[:at] + ("1" if address[at] == "0" else "0") + address[at + 1 :]


def publish_all(publisher: Publisher, messages: list[bytes], *, read_by: Subscriber | None = None) -> None:
    """Publishes; `read_by` keeps up."""
    for message in messages:
        publisher.publish(message)
        if read_by is not None:
            assert read_by.receive(LIMIT_S) == message


def publish_for(publisher: Publisher, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        publisher.publish(b"x")
        time.sleep(0.01)


def num_descriptors() -> int:
    gc.collect()  # what earlier tests left must not go between two counts
    return len(os.listdir("/proc/self/fd"))


def named_memory(*pids: int) -> set[str]:
    """Shared memory with a name, under which others could meet it and which it could leave behind."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {*re.findall(r" (/dev/shm/.*)", maps)}


def test_messages_of_every_size_arrive_whole_and_in_order(kind: str, processes: Processes) -> None:
    sizes = [0, 1, 1023, 1024, 1025, 2048, 0, 10_000, 5_000_003, 1]
    messages = [os.urandom(size) for size in sizes]
    with publisher_of(kind, num_slots=4, slot_bytes=1024) as publisher:
        reader = processes.reader(DIGESTS, publisher.address)
        for message in [*messages, b"end"]:
            publisher.publish(message)
        output, _ = reader.communicate(timeout=LIMIT_S)
    expected = [f"{len(message)} {hashlib.sha256(message).hexdigest()}" for message in messages]
    assert output.splitlines() == expected


@pytest.mark.parametrize(("kind", "num_messages"), [("ring", 30_000), ("zmq", 10_000)])
def test_a_reader_that_sleeps_at_random_loses_none_of_many_messages(
    kind: str, num_messages: int, processes: Processes
) -> None:
    with publisher_of(kind) as publisher:
        reader = processes.reader(NUMBERED, publisher.address, 0.004, 200)
        for number in range(num_messages):
            publisher.publish(numbered(number))
        publisher.publish(b"end")
        output, _ = reader.communicate(timeout=LIMIT_S)
    assert output == f"{num_messages}\n"


def test_subscribers_of_different_speeds_and_starts_all_get_everything(kind: str, processes: Processes) -> None:
    with publisher_of(kind, num_subscribers=3, num_slots=8, slot_bytes=512) as publisher:
        readers = [
            processes.reader(NUMBERED, publisher.address, pause_s, 20, index=index)
            for index, pause_s in enumerate([0, 0.001, 0.01])
        ]
        for number in range(3000):
            publisher.publish(numbered(number))
        publisher.publish(b"end")
        assert [reader.communicate(timeout=LIMIT_S)[0] for reader in readers] == ["3000\n"] * 3


def test_ipc_04_a_slow_starter_misses_nothing(kind: str, processes: Processes) -> None:
    with publisher_of(kind, num_slots=8) as publisher:
        starter = threading.Timer(0.5, lambda: processes.reader(NUMBERED, publisher.address, 0, 1000))
        starter.start()
        for number in range(500):
            publisher.publish(numbered(number))
        publisher.publish(b"end")
        starter.join()
        output, _ = processes.started[0].communicate(timeout=LIMIT_S)
    assert output == "500\n"


def test_ipc_04_attaching_to_what_is_gone_fails_naming_address_and_rank(kind: str) -> None:
    publisher = publisher_of(kind)
    address = publisher.address
    publisher.close()
    start = time.monotonic()
    place = re.escape(address.partition("?")[0])
    with pytest.raises(ChannelError, match=rf"subscriber 3 of {place} cannot attach within 0.3 s") as caught:
        connect(address, index=3, timeout_s=0.3)
    assert 0.25 < time.monotonic() - start < LIMIT_S
    assert not any(secret in str(caught.value) for secret in re.findall("=([0-9a-f]+)", address))


def test_an_attach_waits_for_a_path_that_opens_later() -> None:
    publisher = publisher_of("ring")
    descriptor = int(re.search(r"/fd/(\d+)", publisher.address)[1])
    late = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 500)  # a number that nothing else in this process gets meanwhile
    os.close(late)
    address = publisher.address.replace(f"/fd/{descriptor}?", f"/fd/{late}?")
    opener = threading.Timer(0.3, os.dup2, (descriptor, late))
    opener.start()
    with connect(address, index=0, timeout_s=LIMIT_S) as subscriber:
        opener.join()
        publisher.publish(b"late")
        assert subscriber.receive(LIMIT_S) == b"late"
    os.close(late)
    publisher.close()


@pytest.mark.parametrize(("kind", "field"), [("ring", "token"), ("zmq", "key")])
def test_a_wrong_secret_is_refused_and_the_right_one_still_works(kind: str, field: str) -> None:
    with publisher_of(kind) as publisher:
        with pytest.raises(ChannelError, match=r"subscriber 0 of .*(token differs|wrong key)"):
            connect(forged(publisher.address, field), index=0, timeout_s=0.5)
        with connect(publisher.address, index=0) as subscriber:
            publisher.publish(b"plan")
            assert subscriber.receive(LIMIT_S) == b"plan"


@pytest.mark.parametrize("address", ["", "ring:/tmp/x?token=" + "0" * 32, "tcp://127.0.0.1:5", "ipc://x", "ring:"])
def test_an_address_of_no_channel_is_refused(address: str) -> None:
    with pytest.raises(ChannelError, match="address"):
        connect(address, index=0, timeout_s=0.1)


def test_ipc_02_two_engines_do_not_meet_and_leave_nothing(kind: str, processes: Processes) -> None:
    before = named_memory(os.getpid())
    first, second = (processes.start(PUBLISHER, kind, name) for name in "ab")
    addresses = [process.stdout.readline().strip() for process in (first, second)]
    assert addresses[0] != addresses[1]
    with connect(addresses[0], index=0) as one, connect(addresses[1], index=0) as other:
        assert [one.receive(LIMIT_S) for _ in range(3)] == [b"a0", b"a1", b"a2"]
        assert named_memory(os.getpid(), first.pid, second.pid) == before
        first.kill()
        first.wait()
        assert [other.receive(LIMIT_S) for _ in range(3)] == [b"b0", b"b1", b"b2"]
        again = processes.start(PUBLISHER, kind, "c")
        with connect(again.stdout.readline().strip(), index=0) as third:
            assert [third.receive(LIMIT_S) for _ in range(3)] == [b"c0", b"c1", b"c2"]


def test_ipc_02_an_address_that_now_means_another_ring_is_refused() -> None:
    with publisher_of("ring") as first, publisher_of("ring") as second:
        mixed = first.address.partition("?")[0] + "?" + second.address.partition("?")[2]
        with pytest.raises(ChannelError, match="another engine's ring"):
            connect(mixed, index=0, timeout_s=5)


def test_a_killed_publisher_ends_the_wait_through_the_check(kind: str, processes: Processes) -> None:
    driver = processes.start(PUBLISHER, kind, "a")

    def check() -> None:
        if driver.poll() is not None:
            raise RuntimeError("the driver has died")

    with connect(driver.stdout.readline().strip(), index=0, check=check) as subscriber:
        assert [subscriber.receive(LIMIT_S) for _ in range(3)] == [b"a0", b"a1", b"a2"]
        threading.Timer(0.3, driver.send_signal, (signal.SIGKILL,)).start()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="driver has died"):
            subscriber.receive()
        assert time.monotonic() - start < LIMIT_S / 2


def test_a_waiting_publisher_is_ended_by_its_check(kind: str) -> None:
    def check() -> None:
        raise RuntimeError("the engine stops")

    publisher = publisher_of(kind, num_slots=2, check=check)
    with publisher, pytest.raises(RuntimeError, match="engine stops"):
        publish_all(publisher, [b"x"] * 3)


def test_a_subscriber_that_never_came_is_named(kind: str) -> None:
    message = r"subscriber 1 (\(never attached\) has read 0 of|did not connect)"
    publisher = publisher_of(kind, num_subscribers=2, num_slots=2, timeout_s=0.3)
    with publisher, connect(publisher.address, index=0) as present:
        while kind == "zmq" and not publisher._peers:
            publisher._may_send()  # takes what has arrived
        with pytest.raises(TimeoutError, match=message):
            publish_all(publisher, [b"x"] * 3, read_by=present)


def test_a_subscriber_that_stopped_reading_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_channel, "MAX_UNREAD_MESSAGES", 8)
    publisher = publisher_of(kind, num_subscribers=2, num_slots=8)
    with publisher, connect(publisher.address, index=0) as reading, connect(publisher.address, index=1) as stuck:
        publish_all(publisher, [b"x"] * 8, read_by=reading)
        if kind == "zmq":
            wait_until(lambda: publisher._may_send() or publisher._acknowledged[0] == 8)
        publisher._timeout_s = 0.3
        with pytest.raises(TimeoutError, match=r"subscriber 1 .*has read 0 of 8 .* within 0.3 s"):
            publisher.publish(b"x")
        publisher._timeout_s = LIMIT_S
        assert [stuck.receive(LIMIT_S) for _ in range(8)] == [b"x"] * 8
        publisher.publish(b"y")
        assert (reading.receive(LIMIT_S), stuck.receive(LIMIT_S)) == (b"y", b"y")


def test_a_receive_that_finds_nothing_times_out_and_can_be_repeated(kind: str) -> None:
    publisher, subscriber = pair(kind)
    with publisher, subscriber:
        with pytest.raises(TimeoutError, match=r"subscriber 0 of .* no message within 0.1 s"):
            subscriber.receive(0.1)
        with pytest.raises(TimeoutError):
            subscriber.receive(0)
        publisher.publish(b"now")
        assert subscriber.receive(LIMIT_S) == b"now"


def test_a_dead_subscriber_is_named(kind: str, processes: Processes) -> None:
    with publisher_of(kind, num_subscribers=1, num_slots=4) as publisher:
        reader = processes.reader(IDLE, publisher.address)
        assert reader.stdout.readline() == "attached\n"
        publisher.publish(b"x")
        reader.kill()
        reader.wait()
        publisher._timeout_s = 0.3
        with pytest.raises((ChannelError, TimeoutError), match="subscriber 0"):
            publish_for(publisher, LIMIT_S)  # the end of a connection is noticed a moment later


def test_a_message_left_half_written_breaks_the_ring() -> None:
    publisher, subscriber = pair("ring", num_slots=2, slot_bytes=64, timeout_s=0.1)
    with publisher, subscriber:
        with pytest.raises(TimeoutError, match="subscriber 0"):
            publisher.publish(b"x" * 200)
        with pytest.raises(ChannelError, match="left after 128 of 200 bytes"):
            publisher.publish(b"y")
        with pytest.raises(TimeoutError):
            subscriber.receive(0.1)


def test_a_long_message_survives_a_timeout_in_its_middle() -> None:
    publisher, subscriber = pair("ring", num_slots=2, slot_bytes=64)
    message = os.urandom(64 * 2 + 32)
    with publisher, subscriber:
        ring = publisher._ring
        view = memoryview(message)
        ring.put(1, view[:64], 1)
        ring.put(2, view[64:128], 1)
        with pytest.raises(TimeoutError):
            subscriber.receive(0.05)
        ring.put(3, view[128:], 0)
        assert subscriber.receive(LIMIT_S) == message


def test_ipc_03_an_oversize_message_is_refused_and_harms_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_base, "MAX_MESSAGE_BYTES", 10_000)
    publisher, subscriber = pair(kind)
    with publisher, subscriber:
        with pytest.raises(ChannelError, match="message has 10001 bytes; at most 10000"):
            publisher.publish(bytes(10_001))
        publisher.publish(bytes(10_000))
        assert subscriber.receive(LIMIT_S) == bytes(10_000)


def test_ipc_03_a_ring_larger_than_free_memory_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_descriptors()
    monkeypatch.setattr(ring_channel, "available_host_bytes", lambda: 1_000_000)
    with pytest.raises(ChannelError, match=r"ring needs 2\d{6} bytes of memory and 1000000 are available"):
        publisher_of("ring")
    monkeypatch.undo()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ChannelError, match=r"cannot reserve 2\d{6} bytes of memory: No space left"):
        publisher_of("ring")
    assert num_descriptors() == before


def test_ipc_03_every_page_of_the_ring_exists_from_the_start_and_none_can_be_cut_off() -> None:
    with publisher_of("ring", num_slots=16, slot_bytes=1 << 16) as publisher:
        path = publisher.address.removeprefix("ring:").partition("?")[0]
        assert os.stat(path).st_blocks * 512 >= os.stat(path).st_size > 16 << 16
        with pytest.raises(PermissionError):
            os.truncate(path, 4096)


@pytest.mark.parametrize("index", [-1, 1, 7])
def test_an_index_the_ring_does_not_have_is_refused(index: int) -> None:
    with publisher_of("ring") as publisher, pytest.raises(ChannelError, match="ring has 1 subscribers"):
        connect(publisher.address, index=index)


def test_an_index_has_one_subscriber(kind: str) -> None:
    publisher, subscriber = pair(kind)
    with publisher, subscriber:
        publisher.publish(b"1")
        if kind == "ring":
            with pytest.raises(ChannelError, match=f"subscriber 0 of .* is taken by process {os.getpid()}"):
                connect(publisher.address, index=0)
        else:
            with connect(publisher.address, index=0) as second:
                publisher.publish(b"2")
                with pytest.raises(TimeoutError):
                    second.receive(0.2)
                assert subscriber.receive(LIMIT_S) == b"1"
                assert subscriber.receive(LIMIT_S) == b"2"
        publisher.publish(b"3")
        assert subscriber.receive(LIMIT_S) == (b"1" if kind == "ring" else b"3")


def test_a_slot_that_is_half_visible_is_read_again() -> None:
    publisher, subscriber = pair("ring")
    with publisher, subscriber:
        ring = publisher._ring
        publisher.publish(b"message")
        at = ring.slot_at(1) + ring_channel._SLOT_HEADER_BYTES
        ring.bytes[at] ^= 1
        with pytest.raises(TimeoutError):
            subscriber.receive(0.1)
        ring.bytes[at] ^= 1
        assert subscriber.receive(LIMIT_S) == b"message"


@pytest.mark.parametrize("offset", [8, 12, 16, ring_channel._SLOT_HEADER_BYTES])
def test_a_damaged_slot_is_an_error(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_channel, "TORN_LIMIT_S", 0.05)
    publisher, subscriber = pair("ring")
    with publisher, subscriber:
        publisher.publish(b"message")
        publisher._ring.bytes[publisher._ring.slot_at(1) + offset] ^= 0x80
        with pytest.raises(ChannelError, match="chunk 1 fails its checksum"):
            subscriber.receive(LIMIT_S)


def test_a_slot_overwritten_before_it_was_read_is_an_error() -> None:
    publisher, subscriber = pair("ring", num_slots=4)
    with publisher, subscriber:
        publisher._ring.put(5, memoryview(b"late"), 0)
        with pytest.raises(ChannelError, match="expects chunk 1 and finds 5"):
            subscriber.receive(LIMIT_S)


def test_a_missing_zmq_message_is_an_error() -> None:
    publisher, subscriber = pair("zmq")
    with publisher, subscriber:
        publisher.publish(b"1")
        publisher._sequence += 1
        publisher.publish(b"3")
        assert subscriber.receive(LIMIT_S) == b"1"
        with pytest.raises(ChannelError, match="expects message 2 and got 3"):
            subscriber.receive(LIMIT_S)


def test_closing_loses_nothing_that_was_published(kind: str, processes: Processes) -> None:
    with publisher_of(kind, num_slots=64, slot_bytes=1 << 17) as publisher:
        reader = processes.reader(
            "print('attached', flush=True)\nimport time\ntime.sleep(0.3)" + DIGESTS, publisher.address
        )
        assert reader.stdout.readline() == "attached\n"
        for number in range(60):
            publisher.publish(bytes([number]) * 100_000)
        publisher.publish(b"end")
    output, _ = reader.communicate(timeout=LIMIT_S)
    assert len(output.splitlines()) == 60


def test_closing_does_not_hang_on_a_stopped_subscriber(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_channel, "LINGER_S", 0.3)
    publisher = publisher_of("zmq")
    reader = processes.reader(IDLE, publisher.address)
    reader.stdout.readline()
    publisher.publish(b"x")
    reader.send_signal(signal.SIGSTOP)
    publisher.publish(bytes(50_000_000))
    start = time.monotonic()
    publisher.close()
    assert time.monotonic() - start < LIMIT_S / 2


def test_both_ends_say_that_they_are_closed_and_close_twice(kind: str) -> None:
    publisher, subscriber = pair(kind)
    for end in (publisher, subscriber, publisher, subscriber):
        end.close()
    with pytest.raises(ChannelError, match="publisher is closed"):
        publisher.publish(b"x")
    with pytest.raises(ChannelError, match=r"subscriber 0 of .* is closed"):
        subscriber.receive(0.1)


@pytest.mark.parametrize(("kind", "num_cycles"), [("ring", 200), ("zmq", 40)])
def test_openings_and_closings_leak_no_descriptor(kind: str, num_cycles: int) -> None:
    counts = []
    for cycle in range(num_cycles + 1):
        publisher, subscriber = pair(kind)
        with publisher, subscriber:
            publisher.publish(b"x")
            assert subscriber.receive(LIMIT_S) == b"x"
            if kind == "ring":
                with pytest.raises(ChannelError):
                    connect(forged(publisher.address, "token"), index=0)
        if cycle % (num_cycles // 4) == 0:
            counts.append(num_descriptors())
    with pytest.raises(ChannelError):
        connect(publisher.address, index=0, timeout_s=0.05)
    assert counts == [counts[0]] * 5
    assert num_descriptors() == counts[0]


def test_a_reader_with_a_core_to_spare_spins_longer_while_messages_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    spins: list[float] = []

    def recorded(*args: Any) -> bool:
        spins.append(args[-1])
        return channel_base.wait(*args)

    monkeypatch.setattr(ring_channel, "wait", recorded)
    monkeypatch.setattr(ring_channel, "FLOW_SPIN_S", LIMIT_S)  # messages flow, whatever else this machine does
    monkeypatch.setattr(ring_channel, "has_cores_for", lambda num_processes: num_processes < 3)
    for num_subscribers in (1, 2):
        publisher = publisher_of("ring", num_subscribers=num_subscribers)
        with publisher, connect(publisher.address, index=0) as subscriber:
            spins.clear()
            publish_all(publisher, [b"x"] * 3, read_by=subscriber)
            subscriber._flows = False  # as after a pause
            publish_all(publisher, [b"x"], read_by=subscriber)
        short, long = channel_base.SPIN_S, LIMIT_S
        assert spins == ([short, long, long, short] if num_subscribers == 1 else [short] * 4)


def test_waiting_costs_little_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_channel, "has_cores_for", lambda _: True)
    publisher, subscriber = pair(kind)
    with publisher, subscriber:
        publish_all(publisher, [b"x"] * 2, read_by=subscriber)
        start = time.thread_time()
        with pytest.raises(TimeoutError):
            subscriber.receive(1.0)
        assert time.thread_time() - start < 0.3


def hung_up(stranger: socket.socket) -> bool:
    """Whether the other side ends the connection, after a greeting or not."""
    stranger.settimeout(LIMIT_S)
    with stranger:
        try:
            while stranger.recv(4096):
                pass
        except ConnectionError:
            pass
    return True


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    context.linger = 0  # of every socket, also of one that is collected before the context ends: else it waits forever
    yield context
    context.destroy()


class Marker:
    """Pickled, it writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_sec_01_strangers_and_pickles_at_the_port_are_dropped(tmp_path: Path, context: zmq.Context) -> None:
    marker = tmp_path / "marker"
    garbage = pickle.dumps(Marker(marker))
    with publisher_of("zmq", timeout_s=0.5) as publisher:
        host, port, key, token = re.fullmatch(
            r"tcp://([\d.]+):(\d+)\?key=(\w+)&token=(\w+)", publisher.address
        ).groups()
        assert host == "127.0.0.1"
        raw = socket.create_connection((host, int(port)))
        raw.sendall(garbage * 50)
        plain, keyed = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        keyed.curve_serverkey = bytes.fromhex(key)
        keyed.curve_publickey, keyed.curve_secretkey = zmq.curve_keypair()
        for stranger in (plain, keyed):
            stranger.connect(f"tcp://{host}:{port}")
            stranger.send(garbage)
        wrong = "0" * 32 if token[0] != "0" else "1" * 32
        for frames in (
            [msgpack.packb([wrong, 0])],
            [msgpack.packb([token, 1])],
            [msgpack.packb([token, True])],
            [msgpack.packb([token])],
            [msgpack.packb(7)],
            [b""],
            [b"a", b"b"],
        ):
            keyed.send_multipart(frames)
        with pytest.raises(TimeoutError, match="subscriber 0 did not connect"):
            publisher.publish(b"reads what the strangers sent")
        publisher._timeout_s = LIMIT_S
        with connect(publisher.address, index=0) as subscriber:
            for number in range(200):
                publisher.publish(numbered(number))
            assert [subscriber.receive(LIMIT_S) for _ in range(200)] == [numbered(number) for number in range(200)]
        assert not keyed.poll(100)
        assert not plain.poll(0)
        assert hung_up(raw)
    assert not marker.exists()


def test_sec_01_a_subscriber_cannot_acknowledge_what_was_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, subscriber = pair("zmq")
    with publisher, subscriber:
        publisher.publish(b"1")
        take, taken = publisher._take, []
        monkeypatch.setattr(publisher, "_take", lambda frames: taken.append(frames) or take(frames))
        for content in (5, -1, True, "x", [1, 2]):
            subscriber._socket.send(msgpack.packb(content))
        wait_until(lambda: publisher._may_send() and len(taken) == 5)
        publisher.publish(b"2")
        assert publisher._acknowledged == [0]
        assert [subscriber.receive(LIMIT_S) for _ in range(2)] == [b"1", b"2"]


def test_sec_01_no_module_loads_pickles() -> None:
    users = [
        str(path)
        for path in SOURCE.rglob("*.py")
        if re.search(r"^\s*(import|from) (pickle|cloudpickle|dill|marshal)\b|_pyobj\(", path.read_text(), re.M)
    ]
    assert users == []


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_zmq_listens_on_an_ipv6_address() -> None:
    publisher, subscriber = pair("zmq", interface="::1")
    with publisher, subscriber:
        assert publisher.address.startswith("tcp://[::1]:")
        publisher.publish(b"x")
        assert subscriber.receive(LIMIT_S) == b"x"


def test_sec_01_zmq_does_not_listen_on_every_interface() -> None:
    for interface in ("0.0.0.0", "*", "::"):
        with pytest.raises(ChannelError, match="name one address of this host"):
            publisher_of("zmq", interface=interface)


def test_an_interrupted_publish_breaks_the_ring_and_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, subscriber = pair("ring")
    with publisher, subscriber:
        put = publisher._ring.put

        def interrupted(*args: Any) -> None:
            put(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(publisher._ring, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(b"1")
        monkeypatch.undo()
        with pytest.raises(ChannelError, match=r"ring is broken.*KeyboardInterrupt"):
            publisher.publish(b"2")
        assert subscriber.receive(LIMIT_S) == b"1"


def test_options_that_make_no_channel_are_refused() -> None:
    for options in ({"kind": "pipe", "num_subscribers": 1}, {"num_subscribers": 0}):
        with pytest.raises(ChannelError, match=r"kind is 'pipe'|num_subscribers is 0"):
            open_publisher(**options)
    with pytest.raises(ChannelError, match="ring has 0 slots"):
        publisher_of("ring", num_slots=0)
    with pytest.raises(ChannelError, match="of 100 bytes"):
        publisher_of("ring", slot_bytes=100)
    with pytest.raises(ChannelError, match=r"cannot listen on interface '203\.0\.113\.1'"):
        publisher_of("zmq", interface="203.0.113.1")

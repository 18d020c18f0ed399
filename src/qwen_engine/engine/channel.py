"""Messages from one publisher (the driver) to N subscribers (worker ranks): in order, none lost, none read twice.

    publisher = open_publisher("ring", num_subscribers=2)      # "ring": one host;  "zmq": several
    subscriber = connect(publisher.address, index=0)           # in another process
    publisher.publish(b"..."); subscriber.receive()

Ring: one anonymous memory segment that subscribers map through /proc/<pid>/fd/<fd>. It has no name, so two engines
cannot meet in it and no kind of exit leaves it behind. A random token in its header shows that an address still
means the segment it was made for.

    header | one cache line per subscriber: [acknowledged, pid] | slot 0 | slot 1 | ...
    slot = sequence, size, flags, checksum | payload

Chunk n (from 1) lies in slot (n - 1) % slots. The writer fills a slot once every subscriber has acknowledged what it
held, and stores the sequence last; the reader acknowledges after its copy has passed the checksum.

ZMQ: one encrypted TCP connection per subscriber. The address holds the publisher's public key, without which no
handshake succeeds, and a token that a subscriber repeats inside; so an address is a secret: hand it over in a pipe, a
file or an environment variable, never as a command-line argument. Error messages leave the secrets out.

Payloads are bytes to this module. Each end belongs to one thread. While an end waits it calls `check` (about every
20 ms), whose exception ends the wait: so a rank leaves when the engine dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import logging
import mmap
import os
import re
import secrets
import struct
import time
import zlib
from collections.abc import Callable
from typing import Literal, Protocol, Self

import msgpack
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from qwen_engine.errors import QwenEngineError

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30
MAX_UNREAD_MESSAGES = 256
"""ZMQ: the publisher waits when a subscriber is this many messages behind."""
SPIN_S = 0.002
"""A wait looks without pause for this long. Above the driver's time between two plans of a busy small model."""
MAX_SLEEP_S = 0.001
CHECK_PERIOD_S = 0.02
LINGER_S = 5.0
"""ZMQ: how long closing a publisher may take to get what was published off this host."""
TORN_LIMIT_S = 1.0
"""A slot whose checksum stays wrong for this long is damaged, not half visible."""

Check = Callable[[], None]


class ChannelError(QwenEngineError, ConnectionError):
    """A channel that cannot be opened or attached to, or that can no longer keep its promise of order."""


class Publisher(Protocol):
    """The one writing end."""

    @property
    def address(self) -> str:
        """What subscribers pass to `connect`. Holds secrets."""

    def publish(self, message: bytes) -> None:
        """Hands `message` to every subscriber; waits while one is too far behind.

        ChannelError: the message is above MAX_MESSAGE_BYTES (nothing was sent), or the channel is broken.
        TimeoutError: a subscriber, named by its index, stayed behind. What `check` raises passes through.
        """

    def close(self) -> None:
        """Ends this side. Subscribers that are connected can still read all that was published. May be repeated."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


class Subscriber(Protocol):
    """One reading end."""

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message; waits for it, without end by default.

        TimeoutError: none came in time; the next call goes on where this one stopped. ChannelError: the data is
        damaged or a message is missing. What `check` raises passes through.
        """

    def close(self) -> None:
        """Ends this side. May be repeated."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


def open_publisher(
    kind: Literal["ring", "zmq"] = "ring",
    *,
    num_subscribers: int,
    timeout_s: float = 60.0,
    check: Check | None = None,
    interface: str = "127.0.0.1",
    num_slots: int = 64,
    slot_bytes: int = 32 << 10,
) -> Publisher:
    """Opens the writing end.

    timeout_s: how long `publish` waits for a subscriber. interface: the IP address or network device of this host that
    ZMQ listens on, reachable from the others; the system picks the port. num_slots, slot_bytes: size of the ring.
    """
    if num_subscribers < 1:
        raise ChannelError(f"num_subscribers is {num_subscribers}; a channel needs at least 1")
    check = check or _no_check
    if kind == "ring":
        return RingPublisher(num_subscribers, num_slots, slot_bytes, timeout_s=timeout_s, check=check)
    if kind == "zmq":
        return ZmqPublisher(num_subscribers, interface, timeout_s=timeout_s, check=check)
    raise ChannelError(f"channel kind is {kind!r}; kinds are 'ring' and 'zmq'")


def connect(address: str, *, index: int, timeout_s: float = 30.0, check: Check | None = None) -> Subscriber:
    """Attaches as subscriber `index` (0 is rank 1), trying again for up to `timeout_s`. ChannelError if it fails.

    Does not need the publisher's thread: the publisher may be busy with something else meanwhile.
    """
    kinds = {"ring": RingSubscriber, "tcp": ZmqSubscriber}
    kind = kinds.get(address.partition(":")[0])
    if kind is None:
        raise ChannelError(f"channel address starts with {address[:8]!r}; known are {sorted(kinds)}")
    return kind(address, index, timeout_s=timeout_s, check=check or _no_check)


class _Closing:
    """Lets both ends be used in a `with` statement."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_HEADER = struct.Struct("<8sIIII16s")  # magic, version, slots, bytes per slot, subscribers, token
_MAGIC = b"QWENRING"
_VERSION = 1
_LINE = 64  # bytes of a cache line: cells of different writers do not share one
_LINE_CELLS = _LINE // 8
_SLOT = struct.Struct("<QIII")  # sequence, size, flags, checksum of the three before and of the payload
_CHECKED = struct.Struct("<QII")
_SLOT_HEADER_BYTES = 32
_MORE = 1  # flag: the message goes on in the next slot
_RING_ADDRESS = re.compile(r"ring:(/proc/\d+/fd/\d+)\?token=([0-9a-f]{32})")


class _Ring:
    """The layout of a mapped segment. Sequences and acknowledgements are single aligned 8-byte cells."""

    def __init__(self, memory: mmap.mmap, *, num_subscribers: int, num_slots: int, slot_bytes: int) -> None:
        self.memory = memory
        self.num_subscribers, self.num_slots, self.slot_bytes = num_subscribers, num_slots, slot_bytes
        self.bytes = memoryview(memory)
        self.cells = self.bytes.cast("Q")
        self._slots_at = _LINE * (1 + num_subscribers)
        self._stride = _SLOT_HEADER_BYTES + slot_bytes

    @staticmethod
    def size(*, num_subscribers: int, num_slots: int, slot_bytes: int) -> int:
        return _LINE * (1 + num_subscribers) + num_slots * (_SLOT_HEADER_BYTES + slot_bytes)

    @staticmethod
    def acknowledged_cell(index: int) -> int:
        return (1 + index) * _LINE_CELLS

    def slot_at(self, sequence: int) -> int:
        """Byte offset of the slot of chunk `sequence`."""
        return self._slots_at + (sequence - 1) % self.num_slots * self._stride

    def put(self, sequence: int, chunk: memoryview, flags: int) -> None:
        at = self.slot_at(sequence)
        start = at + _SLOT_HEADER_BYTES
        self.bytes[start : start + len(chunk)] = chunk
        checksum = zlib.crc32(chunk, zlib.crc32(_CHECKED.pack(sequence, len(chunk), flags)))
        _SLOT.pack_into(self.bytes, at, 0, len(chunk), flags, checksum)
        self.cells[at // 8] = sequence

    def get(self, sequence: int) -> tuple[bytes, int] | None:
        """Payload and flags of chunk `sequence`; None if what is there does not (yet) pass its checks."""
        at = self.slot_at(sequence)
        found, size, flags, checksum = _SLOT.unpack_from(self.bytes, at)
        if found != sequence or size > self.slot_bytes:
            return None
        start = at + _SLOT_HEADER_BYTES
        chunk = bytes(self.bytes[start : start + size])
        if zlib.crc32(chunk, zlib.crc32(_CHECKED.pack(sequence, size, flags))) != checksum:
            return None
        return chunk, flags

    def close(self) -> None:
        self.cells.release()
        self.bytes.release()
        self.memory.close()


class RingPublisher(_Closing):
    """Owns the segment: it lives as long as this end or a mapping of it."""

    def __init__(
        self, num_subscribers: int, num_slots: int, slot_bytes: int, *, timeout_s: float, check: Check
    ) -> None:
        if num_slots < 1 or slot_bytes < 8 or slot_bytes % 8:
            raise ChannelError(
                f"ring has {num_slots} slots of {slot_bytes} bytes; it needs at least 1 slot, and a multiple of 8 bytes"
            )
        shape = {"num_subscribers": num_subscribers, "num_slots": num_slots, "slot_bytes": slot_bytes}
        token = secrets.token_bytes(16)
        self._fd = _reserve_segment(_Ring.size(**shape))
        try:
            self._ring = _Ring(mmap.mmap(self._fd, 0), **shape)
        except BaseException:
            os.close(self._fd)
            raise
        _HEADER.pack_into(self._ring.bytes, 0, _MAGIC, _VERSION, num_slots, slot_bytes, num_subscribers, token)
        self.address = f"ring:/proc/{os.getpid()}/fd/{self._fd}?token={token.hex()}"
        self._timeout_s, self._check = timeout_s, check
        self._sequence = 0  # of the last chunk put
        self._read_by_all = 0  # every subscriber has acknowledged up to here, as of the last look
        self._fault: str | None = None
        self._closed = False

    def publish(self, message: bytes) -> None:
        _check_open("publisher", self._closed)
        _check_size(message)
        if self._fault:
            raise ChannelError(f"the ring is broken: {self._fault}")
        view = memoryview(message).cast("B")
        step = self._ring.slot_bytes
        begun = False
        for start in range(0, max(len(view), 1), step):
            sequence = self._sequence + 1
            try:
                self._wait_for_slot(sequence)
                begun = True
                self._ring.put(sequence, view[start : start + step], _MORE if start + step < len(view) else 0)
                self._sequence = sequence
            except BaseException as error:
                if begun:
                    self._fault = f"a message was left after {start} of {len(view)} bytes: {error!r}"
                raise

    def _wait_for_slot(self, sequence: int) -> None:
        oldest_needed = sequence - self._ring.num_slots

        def is_free() -> bool:
            self._read_by_all = min(self._acknowledged())
            return self._read_by_all >= oldest_needed

        if self._read_by_all >= oldest_needed or _wait(is_free, self._timeout_s, self._check, time.sleep):
            return
        behind = self._acknowledged()
        index = behind.index(min(behind))
        pid = self._ring.cells[_Ring.acknowledged_cell(index) + 1]
        raise TimeoutError(
            f"subscriber {index} ({f'pid {pid}' if pid else 'never attached'}) has read {behind[index]} of "
            f"{self._sequence} chunks and no more within {self._timeout_s:g} s; the ring has {self._ring.num_slots}"
        )

    def _acknowledged(self) -> list[int]:
        cells = self._ring.cells
        return [cells[_Ring.acknowledged_cell(index)] for index in range(self._ring.num_subscribers)]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ring.close()
            os.close(self._fd)


class RingSubscriber(_Closing):
    def __init__(self, address: str, index: int, *, timeout_s: float, check: Check) -> None:
        match = _RING_ADDRESS.fullmatch(address)
        if match is None:
            raise ChannelError("ring address must look like ring:/proc/PID/fd/FD?token=32 hex digits")
        path, token = match[1], bytes.fromhex(match[2])
        self._name = f"subscriber {index} of ring:{path}"
        found: list[_Ring | OSError] = []

        def attach() -> bool:
            found[:] = [_map_segment(path, token)]
            return isinstance(found[0], _Ring)

        try:
            attached = _wait(attach, timeout_s, check, time.sleep)
        except ChannelError as error:
            raise ChannelError(f"{self._name}: {error}") from error
        if not attached:
            raise ChannelError(f"{self._name} cannot attach within {timeout_s:g} s: {found[0]}")
        self._ring: _Ring = found[0]
        self._claim(index)
        self._check = check
        self._index = index
        self._sequence = self._ring.cells[_Ring.acknowledged_cell(index)]  # of the last chunk read
        self._parts: list[bytes] = []  # chunks of a message that has not ended
        self._more = True
        self._torn_since: float | None = None
        self._closed = False

    def _claim(self, index: int) -> None:
        cells, count = self._ring.cells, self._ring.num_subscribers
        owner = cells[_Ring.acknowledged_cell(index) + 1] if 0 <= index < count else None
        if owner == 0:
            cells[_Ring.acknowledged_cell(index) + 1] = os.getpid()
            return
        self._ring.close()
        if owner is None:
            raise ChannelError(f"{self._name}: the ring has {count} subscribers")
        raise ChannelError(f"{self._name} is taken by process {owner}")

    def receive(self, timeout_s: float | None = None) -> bytes:
        _check_open(self._name, self._closed)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._more = True
        while self._more:
            remaining = None if deadline is None else deadline - time.monotonic()
            if not _wait(self._read_chunk, remaining, self._check, time.sleep):
                raise TimeoutError(f"{self._name} got no message within {timeout_s:g} s")
        message = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        return message

    def _read_chunk(self) -> bool:
        ring, sequence = self._ring, self._sequence + 1
        found = ring.cells[ring.slot_at(sequence) // 8]
        if found < sequence:
            return False
        if found > sequence:
            raise ChannelError(f"{self._name} expects chunk {sequence} and finds {found}: chunks are lost")
        content = ring.get(sequence)
        if content is None:
            now = time.monotonic()
            self._torn_since = self._torn_since or now
            if now - self._torn_since > TORN_LIMIT_S:
                raise ChannelError(f"{self._name}: chunk {sequence} fails its checksum; the ring is damaged")
            return False
        self._torn_since = None
        chunk, flags = content
        self._parts.append(chunk)
        self._more = bool(flags & _MORE)
        self._sequence = sequence
        ring.cells[_Ring.acknowledged_cell(self._index)] = sequence
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ring.close()


def _reserve_segment(size_bytes: int) -> int:
    """A file descriptor of anonymous memory whose pages all exist: no later write can fail for want of them."""
    if not hasattr(os, "memfd_create"):
        raise ChannelError("the ring needs memfd_create, which this system lacks; use the zmq channel")
    available = _available_bytes()
    if size_bytes > available:
        raise ChannelError(f"ring needs {size_bytes} bytes of memory and {available} are available; use fewer slots")
    fd = os.memfd_create("qwen-engine-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise ChannelError(f"ring cannot reserve {size_bytes} bytes of memory: {error.strerror}") from error
    return fd


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ChannelError("/proc/meminfo has no line MemAvailable")


def _map_segment(path: str, token: bytes) -> _Ring | OSError:
    """The ring behind a path; the error if it cannot be opened (yet). ChannelError if it is another engine's."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return error
    try:
        memory = mmap.mmap(fd, 0)
    except (OSError, ValueError) as error:
        return OSError(f"{path} cannot be mapped: {error}")
    finally:
        os.close(fd)
    try:
        shape = _segment_shape(memory, token)
    except BaseException:
        memory.close()
        raise
    return _Ring(memory, **shape)


def _segment_shape(memory: mmap.mmap, token: bytes) -> dict[str, int]:
    if len(memory) < _HEADER.size:
        raise ChannelError(f"segment of {len(memory)} bytes is no ring")
    magic, version, num_slots, slot_bytes, num_subscribers, found = _HEADER.unpack_from(memory)
    if magic != _MAGIC or not hmac.compare_digest(found, token):
        raise ChannelError("token differs: the address means another engine's ring, or none")
    if version != _VERSION:
        raise ChannelError(f"ring has version {version}; this program speaks {_VERSION}")
    shape = {"num_subscribers": num_subscribers, "num_slots": num_slots, "slot_bytes": slot_bytes}
    if len(memory) != _Ring.size(**shape):
        raise ChannelError(f"ring has {len(memory)} bytes; its header says {_Ring.size(**shape)}")
    return shape


_HELLO_LIMIT_BYTES = 1024
_ENVELOPE = struct.Struct("<QQ")  # sequence, size
_ZMQ_ADDRESS = re.compile(r"(tcp://[^?]+)\?key=([0-9a-f]{64})&token=([0-9a-f]{32})")


class ZmqPublisher(_Closing):
    """A ROUTER socket: every subscriber's connection is ordered and addressed on its own.

    The first `publish` waits until all subscribers have said who they are. From then on a broken connection is an
    error: it could not be repaired without losing messages.
    """

    def __init__(self, num_subscribers: int, interface: str, *, timeout_s: float, check: Check) -> None:
        _require_curve()
        if interface in ("*", "0.0.0.0", "::"):
            raise ChannelError(
                f"interface is {interface!r}, which no host can connect to; name one address of this host"
            )
        public_key, secret_key = zmq.curve_keypair()
        token = secrets.token_hex(16)
        self._token = token
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.linger = int(LINGER_S * 1000)
        socket.curve_server = True
        socket.curve_secretkey = secret_key
        socket.router_mandatory = True
        socket.sndhwm = 0  # acknowledgements bound what is under way
        socket.maxmsgsize = _HELLO_LIMIT_BYTES
        socket.ipv6 = ":" in interface
        try:
            socket.bind(f"tcp://[{interface}]:*" if ":" in interface else f"tcp://{interface}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ChannelError(f"cannot listen on interface {interface!r}: {error}") from error
        endpoint = socket.last_endpoint.decode()
        self.address = f"{endpoint}?key={z85.decode(public_key).hex()}&token={token}"
        self._num_subscribers = num_subscribers
        self._peers: dict[int, bytes] = {}  # index -> identity of its connection
        self._acknowledged = [0] * num_subscribers
        self._sequence = 0
        self._timeout_s, self._check = timeout_s, check
        self._fault: str | None = None
        self._closed = False

    def publish(self, message: bytes) -> None:
        _check_open("publisher", self._closed)
        _check_size(message)
        if self._fault:
            raise ChannelError(f"the channel is broken: {self._fault}")
        if not self._may_send() and not _wait(self._may_send, self._timeout_s, self._check, self._pause):
            raise TimeoutError(self._who_is_behind())
        self._sequence += 1
        envelope = _ENVELOPE.pack(self._sequence, len(message))
        for index, identity in sorted(self._peers.items()):
            try:
                self._socket.send_multipart((identity, envelope, message), zmq.DONTWAIT)
            except zmq.ZMQError as error:
                self._fault = f"message {self._sequence} did not reach subscriber {index}: {error}"
                raise ChannelError(self._fault) from error

    def _may_send(self) -> bool:
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(self._socket.recv_multipart(zmq.DONTWAIT))
        return (
            len(self._peers) == self._num_subscribers and self._sequence - min(self._acknowledged) < MAX_UNREAD_MESSAGES
        )

    def _take(self, frames: list[bytes]) -> None:
        """One message of a subscriber: [token, index] at first, later the sequence it has read up to."""
        identity, *rest = frames
        index = next((known for known, peer in self._peers.items() if peer == identity), None)
        try:
            (data,) = rest
            content = msgpack.unpackb(data)
            if index is None:
                self._admit(identity, *content)
            elif type(content) is int and self._acknowledged[index] <= content <= self._sequence:
                self._acknowledged[index] = content
            else:
                logger.warning("dropped an acknowledgement of subscriber %d that makes no sense", index)
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
            logger.warning("dropped a message that no subscriber sends")

    def _admit(self, identity: bytes, token: object, index: object) -> None:
        known = isinstance(token, str) and hmac.compare_digest(token.encode(), self._token.encode())
        if not known or type(index) is not int or not 0 <= index < self._num_subscribers or index in self._peers:
            logger.warning("dropped a stranger, or a second subscriber of an index that is taken")
            return
        self._peers[index] = identity

    def _who_is_behind(self) -> str:
        missing = [index for index in range(self._num_subscribers) if index not in self._peers]
        if missing:
            return f"subscriber {missing[0]} did not connect within {self._timeout_s:g} s"
        index = self._acknowledged.index(min(self._acknowledged))
        return (
            f"subscriber {index} has read {self._acknowledged[index]} of {self._sequence} messages and no more within "
            f"{self._timeout_s:g} s"
        )

    def _pause(self, _: float) -> None:
        self._socket.poll(CHECK_PERIOD_S * 1000)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._context.destroy()


class ZmqSubscriber(_Closing):
    """A DEALER socket, connected to the publisher alone."""

    def __init__(self, address: str, index: int, *, timeout_s: float, check: Check) -> None:
        match = _ZMQ_ADDRESS.fullmatch(address)
        if match is None:
            raise ChannelError("zmq address must look like tcp://HOST:PORT?key=64 hex digits&token=32 hex digits")
        _require_curve()
        endpoint, key, token = match.groups()
        self._name = f"subscriber {index} of {endpoint}"
        self._context = zmq.Context()
        self._closed = False
        try:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._attach(endpoint, bytes.fromhex(key), timeout_s=timeout_s, check=check)
            self._socket.send(msgpack.packb([token, index]))
        except BaseException:
            self.close()
            raise
        self._check = check
        self._sequence = 0

    def _attach(self, endpoint: str, server_key: bytes, *, timeout_s: float, check: Check) -> None:
        socket = self._socket
        socket.curve_serverkey = server_key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.rcvhwm = 0  # so that a message that left the publisher is never held back by this side
        socket.ipv6 = "[" in endpoint
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

        def shaken_hands() -> bool:
            return bool(monitor.poll(0)) and bool(recv_monitor_message(monitor))

        try:
            socket.connect(endpoint)
            if not _wait(shaken_hands, timeout_s, check, lambda _: monitor.poll(CHECK_PERIOD_S * 1000)):
                raise ChannelError(f"{self._name} cannot attach within {timeout_s:g} s: no publisher, or a wrong key")
        except zmq.ZMQError as error:
            raise ChannelError(f"{self._name} cannot attach: {error}") from error
        finally:
            socket.disable_monitor()

    def receive(self, timeout_s: float | None = None) -> bytes:
        _check_open(self._name, self._closed)
        frames: list[bytes] = []

        def arrived() -> bool:
            with contextlib.suppress(zmq.Again):
                frames[:] = self._socket.recv_multipart(zmq.DONTWAIT)
            return bool(frames)

        if not _wait(arrived, timeout_s, self._check, self._pause):
            raise TimeoutError(f"{self._name} got no message within {timeout_s:g} s")
        expected = self._sequence + 1
        if len(frames) != 2 or len(frames[0]) != _ENVELOPE.size:
            raise ChannelError(
                f"{self._name} got a message of {len(frames)} frames; expected an envelope and a payload"
            )
        sequence, size = _ENVELOPE.unpack(frames[0])
        if (sequence, size) != (expected, len(frames[1])):
            raise ChannelError(
                f"{self._name} expects message {expected} and got {sequence}, of {len(frames[1])} bytes where {size} "
                "were sent"
            )
        self._sequence = sequence
        if sequence % (MAX_UNREAD_MESSAGES // 4) == 0:
            with contextlib.suppress(zmq.Again):  # the publisher has gone; what it sent can still be read
                self._socket.send(msgpack.packb(sequence), zmq.DONTWAIT)
        return frames[1]

    def _pause(self, _: float) -> None:
        self._socket.poll(CHECK_PERIOD_S * 1000)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._context.destroy()


def _wait(ready: Callable[[], bool], timeout_s: float | None, check: Check, pause: Callable[[float], object]) -> bool:
    """True once `ready()` is true; False after `timeout_s`.

    Spins for SPIN_S, then pauses for 1/200 of the time waited so far, at most MAX_SLEEP_S: a wait of a decode step
    ends within some 50 us of its event, and an idle engine costs next to no CPU.
    """
    start = time.monotonic()
    next_check = start + CHECK_PERIOD_S
    while True:
        if ready():
            return True
        now = time.monotonic()
        waited = now - start
        if timeout_s is not None and waited >= timeout_s:
            return False
        if now >= next_check:
            check()
            next_check = now + CHECK_PERIOD_S
        if waited < SPIN_S:
            os.sched_yield()
        else:
            pause(min(waited / 200, MAX_SLEEP_S))


def _no_check() -> None:
    pass


def _check_open(name: str, closed: bool) -> None:
    if closed:
        raise ChannelError(f"{name} is closed")


def _check_size(message: bytes) -> None:
    if len(message) > MAX_MESSAGE_BYTES:
        raise ChannelError(f"message has {len(message)} bytes; at most {MAX_MESSAGE_BYTES} can be published")


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise ChannelError("this build of libzmq has no CURVE encryption; install pyzmq from its wheel")

"""The ring: messages through one anonymous piece of shared memory. See the package for its layout."""

from __future__ import annotations

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

from qwen_engine.engine.channel.base import (
    FLOW_SPIN_S,
    SPIN_S,
    ChannelError,
    Check,
    Publisher,
    Subscriber,
    check_open,
    check_size,
    wait,
)
from qwen_engine.engine.memory import available_host_bytes

logger = logging.getLogger(__name__)

TORN_LIMIT_S = 1.0
"""A slot whose checksum stays wrong for this long is damaged, not half visible."""

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


class RingPublisher(Publisher):
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
        check_open("publisher", self._closed)
        check_size(message)
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

        if self._read_by_all >= oldest_needed or wait(is_free, self._timeout_s, self._check, time.sleep):
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


class RingSubscriber(Subscriber):
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
            attached = wait(attach, timeout_s, check, time.sleep)
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
        self._spins = has_cores_for(1 + self._ring.num_subscribers)
        self._flows = False  # the last message came within FLOW_SPIN_S
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
        check_open(self._name, self._closed)
        start = time.monotonic()
        spin_s = FLOW_SPIN_S if self._spins and self._flows else SPIN_S
        self._more = True
        while self._more:
            remaining = None if timeout_s is None else start + timeout_s - time.monotonic()
            if not wait(self._read_chunk, remaining, self._check, time.sleep, spin_s):
                raise TimeoutError(f"{self._name} got no message within {timeout_s:g} s")
        self._flows = time.monotonic() - start < FLOW_SPIN_S
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


def has_cores_for(num_processes: int) -> bool:
    """Whether this process may use more cores than that, so that a spinning reader takes none from anybody."""
    return len(os.sched_getaffinity(0)) > num_processes


def _reserve_segment(size_bytes: int) -> int:
    """A file descriptor of anonymous memory whose pages all exist: no later write can fail for want of them."""
    if not hasattr(os, "memfd_create"):
        raise ChannelError("the ring needs memfd_create, which this system lacks; use the zmq channel")
    available = available_host_bytes()
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

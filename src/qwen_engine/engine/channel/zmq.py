"""ZMQ: messages over one encrypted TCP connection per subscriber."""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import secrets
import struct

import msgpack
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from qwen_engine.engine.channel.base import (
    CHECK_PERIOD_S,
    ChannelError,
    Check,
    Publisher,
    Subscriber,
    check_open,
    check_size,
    wait,
)

logger = logging.getLogger(__name__)

MAX_UNREAD_MESSAGES = 256
"""The publisher waits when a subscriber is this many messages behind."""
LINGER_S = 5.0
"""How long closing a publisher may take to get what was published off this host."""

_HELLO_LIMIT_BYTES = 1024
_ENVELOPE = struct.Struct("<QQ")  # sequence, size
_ZMQ_ADDRESS = re.compile(r"(tcp://[^?]+)\?key=([0-9a-f]{64})&token=([0-9a-f]{32})")


class ZmqPublisher(Publisher):
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
        check_open("publisher", self._closed)
        check_size(message)
        if self._fault:
            raise ChannelError(f"the channel is broken: {self._fault}")
        if not self._may_send() and not wait(self._may_send, self._timeout_s, self._check, self._pause):
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


class ZmqSubscriber(Subscriber):
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
            if not wait(shaken_hands, timeout_s, check, lambda _: monitor.poll(CHECK_PERIOD_S * 1000)):
                raise ChannelError(f"{self._name} cannot attach within {timeout_s:g} s: no publisher, or a wrong key")
        except zmq.ZMQError as error:
            raise ChannelError(f"{self._name} cannot attach: {error}") from error
        finally:
            socket.disable_monitor()

    def receive(self, timeout_s: float | None = None) -> bytes:
        check_open(self._name, self._closed)
        frames: list[bytes] = []

        def arrived() -> bool:
            with contextlib.suppress(zmq.Again):
                frames[:] = self._socket.recv_multipart(zmq.DONTWAIT)
            return bool(frames)

        if not wait(arrived, timeout_s, self._check, self._pause):
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


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise ChannelError("this build of libzmq has no CURVE encryption; install pyzmq from its wheel")

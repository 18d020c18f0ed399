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

Payloads are bytes to this package. Each end belongs to one thread. While an end waits it calls `check` (about every
20 ms), whose exception ends the wait: so a rank leaves when the engine dies. `zmq.py` is imported when first needed.
"""

from __future__ import annotations

from typing import Literal

from qwen_engine.engine.channel.base import ChannelError, Check, Publisher, Subscriber, no_check
from qwen_engine.engine.channel.ring import RingPublisher, RingSubscriber

__all__ = ["ChannelError", "Check", "Publisher", "Subscriber", "connect", "open_publisher"]


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
    check = check or no_check
    if kind == "ring":
        return RingPublisher(num_subscribers, num_slots, slot_bytes, timeout_s=timeout_s, check=check)
    if kind == "zmq":
        from qwen_engine.engine.channel.zmq import ZmqPublisher

        return ZmqPublisher(num_subscribers, interface, timeout_s=timeout_s, check=check)
    raise ChannelError(f"channel kind is {kind!r}; kinds are 'ring' and 'zmq'")


def connect(address: str, *, index: int, timeout_s: float = 30.0, check: Check | None = None) -> Subscriber:
    """Attaches as subscriber `index` (0 is rank 1), trying again for up to `timeout_s`. ChannelError if it fails.

    Does not need the publisher's thread: the publisher may be busy with something else meanwhile.
    """
    check = check or no_check
    kind = address.partition(":")[0]
    if kind == "ring":
        return RingSubscriber(address, index, timeout_s=timeout_s, check=check)
    if kind == "tcp":
        from qwen_engine.engine.channel.zmq import ZmqSubscriber

        return ZmqSubscriber(address, index, timeout_s=timeout_s, check=check)
    raise ChannelError(f"channel address starts with {address[:8]!r}; known are 'ring' and 'tcp'")

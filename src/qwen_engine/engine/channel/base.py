"""What both transports share: the two ends' interface, their limits, and how they wait."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from qwen_engine.errors import QwenEngineError

MAX_MESSAGE_BYTES = 1 << 30
SPIN_S = 0.002
"""A wait looks without pause for this long. Above the driver's time between two plans of a busy small model."""
FLOW_SPIN_S = 0.05
"""A reader with a core to itself looks for this long while messages flow: it is awake when the next plan comes."""
MAX_SLEEP_S = 0.001
CHECK_PERIOD_S = 0.02

Check = Callable[[], None]


class ChannelError(QwenEngineError, ConnectionError):
    """A channel that cannot be opened or attached to, or that can no longer keep its promise of order."""


class _End(ABC):
    """Can be used in a `with` statement."""

    @abstractmethod
    def close(self) -> None:
        """Ends this side. May be repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Publisher(_End):
    """The one writing end. Subscribers that are connected when it closes can still read all that was published."""

    address: str
    """What subscribers pass to `connect`. Holds secrets."""

    @abstractmethod
    def publish(self, message: bytes) -> None:
        """Hands `message` to every subscriber; waits while one is too far behind.

        ChannelError: the message is above MAX_MESSAGE_BYTES (nothing was sent), or the channel is broken.
        TimeoutError: a subscriber, named by its index, stayed behind. What `check` raises passes through.
        """


class Subscriber(_End):
    """One reading end."""

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message; waits for it, without end by default.

        TimeoutError: none came in time; the next call goes on where this one stopped. ChannelError: the data is
        damaged or a message is missing. What `check` raises passes through.
        """


def wait(
    ready: Callable[[], bool],
    timeout_s: float | None,
    check: Check,
    pause: Callable[[float], object],
    spin_s: float = SPIN_S,
) -> bool:
    """True once `ready()` is true; False after `timeout_s`.

    Spins for `spin_s`, then pauses for 1/200 of the time waited so far, at most MAX_SLEEP_S: an idle engine costs next
    to no CPU.
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
        if waited < spin_s:
            os.sched_yield()
        else:
            pause(min(waited / 200, MAX_SLEEP_S))


def no_check() -> None:
    pass


def check_open(name: str, closed: bool) -> None:
    if closed:
        raise ChannelError(f"{name} is closed")


def check_size(message: bytes) -> None:
    if len(message) > MAX_MESSAGE_BYTES:
        raise ChannelError(f"message has {len(message)} bytes; at most {MAX_MESSAGE_BYTES} can be published")

"""The link between rank 0 and each other rank that tells who lives, how far a rank has come, and why one ends.

One stream socket per rank: a socket pair for a process that rank 0 started, a TCP connection for one that torchrun
started, here or on another host. Its end is the end of a process: a rank whose link breaks off exits at once, and rank
0 counts a rank as dead whose link ends without a farewell. Rank 0 asks with single bytes; the rank answers from a
thread of its own, so that a hanging step does not keep it from answering. Lines of JSON go back:

    {"position": [17, 61]}               the answer to ASK_POSITION
    {"farewell": null}                   it was told to stop
    {"farewell": "ValueError: ..."}      why it ends of itself

Not secret: data only. A TCP connection begins with a token, so that a stranger cannot pass for a rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import json
import logging
import os
import secrets
import socket
import threading

from qwen_engine.distributed.progress import Position, Progress
from qwen_engine.errors import summary

logger = logging.getLogger(__name__)

LINK_KEY = "status link"
"""The name of the listener's address in the store where ranks meet."""
ASK_POSITION = b"p"
ASK_STACKS = b"s"
_TOKEN_BYTES = 16
_HELLO_BYTES = 2 * _TOKEN_BYTES + 4  # the token in hexadecimal, the rank in four digits
_MAX_STRANGERS = 64
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 5))  # a host that is cut off


class StatusLink:
    """A worker rank's end. Its thread answers rank 0 until the link ends, and the process with it."""

    def __init__(self, connection: socket.socket, *, announces: bool = False) -> None:
        """announces: whether the end of the link is logged; a rank on another host has nobody else to say so."""
        self.progress = Progress()
        self._connection = connection
        self._announces = announces
        self._lock = threading.Lock()
        self._leaving = False
        threading.Thread(target=self._serve, name="qwen-engine-status", daemon=True).start()

    @classmethod
    def connect(cls, address: str, rank: int) -> StatusLink:
        """Joins the `LinkListener` of rank 0."""
        host, port, token = address.rsplit(":", 2)
        connection = socket.create_connection((host, int(port)))
        _keep_alive(connection)
        connection.sendall(f"{token}{rank:04d}".encode())
        return cls(connection, announces=True)

    def leave(self, error: BaseException | None = None) -> None:
        """Says that this rank ends, and why; None: it was told to. The link stays open, for the process to close."""
        self._leaving = True
        self._send({"farewell": None if error is None else summary(error)})

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while question := self._connection.recv(1):
                if question == ASK_POSITION:
                    self._send({"position": self.progress.position})
                elif question == ASK_STACKS:
                    faulthandler.dump_traceback(all_threads=True)
        if not self._leaving:
            if self._announces:
                logger.error("rank 0 has ended, or cannot be reached: so does this rank")
            os._exit(1)  # at once: a collective that waits for dead peers would block a regular exit

    def _send(self, content: dict[str, object]) -> None:
        with self._lock, contextlib.suppress(OSError):  # rank 0 has gone: `_serve` sees that too
            self._connection.sendall(json.dumps(content).encode() + b"\n")


class RankLink:
    """Rank 0's end of one link. `take` brings the fields up to date."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.position: Position | None = None
        """The answer to the last question; None until it has come."""
        self.has_ended = False
        self.has_left = False
        """Whether the rank has said farewell; `reason` says why if it was not told to stop."""
        self.reason: str | None = None
        self._connection = connection
        self._received = b""
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_alive(self) -> bool:
        """False once the rank has ended, or is about to, without having been told to stop."""
        return self.reason is None and (not self.has_ended or self.has_left)

    def ask(self, question: bytes) -> None:
        self.position = None
        with contextlib.suppress(OSError):
            self._connection.send(question)

    def take(self) -> None:
        """Reads what has arrived, without waiting."""
        try:
            while part := self._connection.recv(65536):
                self._received += part
            self.has_ended = True
        except BlockingIOError:
            pass
        except OSError:  # reset, or timed out
            self.has_ended = True
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, content: dict[str, object]) -> None:
        if "position" in content:
            num_steps, num_collectives = content["position"]
            self.position = num_steps, num_collectives
        else:
            self.has_left, self.reason = True, content["farewell"]

    def cut(self) -> None:
        """Ends the link, and with it the rank."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


class LinkListener:
    """Where ranks that rank 0 did not start join; it closes when all have."""

    def __init__(self, host: str, num_ranks: int) -> None:
        self._token = secrets.token_hex(_TOKEN_BYTES).encode()
        self._listener = socket.create_server((host, 0), backlog=_MAX_STRANGERS + num_ranks)
        self._listener.setblocking(False)
        self._missing = set(range(1, num_ranks))
        self._strangers: dict[socket.socket, bytes] = {}  # connections, and what each has said so far
        self.address = f"{host}:{self._listener.getsockname()[1]}:{self._token.decode()}"

    @property
    def filenos(self) -> list[int]:
        """What to poll before `take`."""
        return [self._listener.fileno(), *(stranger.fileno() for stranger in self._strangers)] if self._missing else []

    def take(self) -> list[RankLink]:
        """Ranks that have joined since the last call, without waiting."""
        if not self._missing:
            return []
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._strangers[connection] = b""
        joined = [link for connection in list(self._strangers) if (link := self._admit(connection)) is not None]
        while len(self._strangers) > _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))  # the one that has been silent for longest
        if not self._missing:
            self.close()
        return joined

    def _admit(self, connection: socket.socket) -> RankLink | None:
        said = self._strangers[connection]
        try:
            part = connection.recv(_HELLO_BYTES - len(said))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        said += part
        if part and len(said) < _HELLO_BYTES:
            self._strangers[connection] = said
            return None
        token, rank = said[: 2 * _TOKEN_BYTES], said[2 * _TOKEN_BYTES :]
        if hmac.compare_digest(token, self._token) and rank.isdigit() and int(rank) in self._missing:
            del self._strangers[connection]
            self._missing.discard(int(rank))
            _keep_alive(connection)
            return RankLink(int(rank), connection)
        self._drop(connection)
        return None

    def _drop(self, stranger: socket.socket) -> None:
        logger.warning("dropped a connection that is of no rank of this engine")
        del self._strangers[stranger]
        stranger.close()

    def close(self) -> None:
        """May be repeated."""
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()
        self._strangers.clear()
        self._missing.clear()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)

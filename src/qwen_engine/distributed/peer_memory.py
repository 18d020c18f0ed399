"""Memory on every rank's GPU that all ranks of one host can write to directly: CUDA IPC over NVLink or PCIe.

Each rank allocates an *inbox* and opens those of the others; `kernels.push_add_rms_norm` stores into them and polls its
own. Where one rank cannot (no peer access, ranks on several hosts), none of them does, and NCCL does the work.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qwen_engine.errors import summary

logger = logging.getLogger(__name__)

INBOX_BYTES = 4 << 20
"""What one rank may push to another at once. NCCL, which has no such limit, is as fast beyond it."""
NUM_SITES = 2
"""Inboxes for every sender. Pushes take them in turn: a rank that has received push n knows that the sender has seen
the end of its own push n - 1, so that the inboxes of that one are empty and may be written to by push n + 1."""

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Cudart:
    """The few functions of the CUDA runtime that torch does not offer, on the current device; RuntimeError from any."""

    def __init__(self) -> None:
        # torch has loaded it already, so the name alone finds that one.
        self._library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, num_bytes: int) -> int:
        """Zeroed memory."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cudaMemset", address, 0, ctypes.c_size_t(num_bytes))
        return address.value

    def synchronize(self) -> None:
        self._call("cudaDeviceSynchronize")

    def free(self, address: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(address))

    def export(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        opened = _IpcHandle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), opened, ctypes.c_uint(_ENABLE_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            self._library.cudaGetLastError()  # or the next call of anybody would report it
            raise RuntimeError(f"{name}: {self._library.cudaGetErrorString(code).decode()}")


class PeerMemory:
    """This rank's inboxes and the addresses of all others.

    addresses: of every rank's inboxes, int32 words [NUM_SITES, ranks, INBOX_BYTES / 4] by site and sender, as this
    rank's GPU sees them. abort_address: of a word that ends all polling once it is not zero.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._cudart = _Cudart()
        self._abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.abort_address = self._abort.data_ptr()
        self.addresses: tuple[int, ...] = ()
        with torch.cuda.device(device):
            self._own = self._cudart.allocate(NUM_SITES * size * INBOX_BYTES)
            torch.cuda.synchronize()

    def handle(self) -> bytes:
        with torch.cuda.device(self.device):
            return self._cudart.export(self._own)

    def open(self, handles: list[bytes]) -> None:
        """Opens the inboxes of all ranks, given in rank order."""
        addresses = []
        with torch.cuda.device(self.device):
            for rank, handle in enumerate(handles):
                addresses.append(self._own if rank == self.rank else self._cudart.open(handle))
                self.addresses = tuple(addresses)

    def fits(self, x: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether the numbers of x [rows, hidden], in this dtype, can be pushed: whole 32-bit words a row."""
        return x.numel() * dtype.itemsize <= INBOX_BYTES and x.shape[-1] * dtype.itemsize % 4 == 0

    def abort(self) -> None:
        """Ends the kernels that wait for a rank; what they and later ones compute is worthless."""
        self._abort.fill_(1)

    def close(self) -> None:
        """Gives the memory back once all kernels have ended. Safe to call twice, and after a CUDA error."""
        addresses, self.addresses = self.addresses, ()
        own, self._own = self._own, 0
        try:
            with torch.cuda.device(self.device):
                self._cudart.synchronize()  # kernels that were told to abort may still store into the peers' memory
                for rank, address in enumerate(addresses):
                    if rank != self.rank:
                        self._cudart.close(address)
                if own:
                    self._cudart.free(own)
        except RuntimeError as error:  # what came before it is the error to tell
            logger.warning("peer memory stays allocated until the process ends: %s", summary(error))


def open_peer_memory(
    store: dist.Store, *, rank: int, size: int, device: torch.device, self_test: Callable[[PeerMemory], None]
) -> PeerMemory | None:
    """The peer memory of a group, or None if any rank cannot have it. All ranks call it at once.

    self_test: tries it out together with the other ranks; raises if it does not work.
    """
    peers: PeerMemory | None = None
    problem = ""

    def agree(step: str, value: bytes) -> list[bytes]:
        """What every rank has to say to a step; empty when it failed there."""
        store.set(f"peer memory/{step}/{rank}", value)
        return [store.get(f"peer memory/{step}/{other}") for other in range(size)]

    def attempt(action: Callable[[], bytes]) -> bytes:
        nonlocal problem
        try:
            return action()
        except Exception as error:  # no peer access, no such library, a kernel that does not compile: NCCL can do it
            problem = summary(error)
            return b""

    def allocate() -> bytes:
        nonlocal peers
        peers = PeerMemory(rank, size, device)
        return _host_id() + peers.handle()

    def open_all() -> bytes:
        assert peers is not None
        if any(not answer.startswith(_host_id()) for answer in answers):
            raise RuntimeError("the ranks are on several hosts")
        peers.open([answer[len(_host_id()) :] for answer in answers])
        return b"1"

    def test() -> bytes:
        assert peers is not None
        self_test(peers)
        return b"1"

    try:
        for step, action in (("handle", allocate), ("opened", open_all), ("tested", test)):
            answers = agree(step, attempt(action))
            if not all(answers):
                break
        else:
            return peers
    except BaseException:  # a rank is gone
        if peers is not None:
            peers.close()
        raise
    level = logging.INFO if rank else logging.WARNING
    reason = problem or f"rank {answers.index(b'')} has none"
    logger.log(level, "all-reduce through NCCL alone, which is slower: no peer memory (%s)", reason)
    if peers is not None:
        peers.close()
    return None


def _host_id() -> bytes:
    """Equal for processes on one machine since its last boot."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot_id.read_text().strip() if boot_id.exists() else ''}\n".encode()

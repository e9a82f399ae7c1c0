"""The start of every server process: listen, announce the addresses, settle the memory."""

import asyncio
import ctypes
import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynctl.base.errors import UsageProblem, network_reason

LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: Allocations before a young, a middle and a full collection (see `settle_garbage_collector`).
_GC_THRESHOLDS = (100, 1, 30_000)
#: Parameters of mallopt(3) and their values (see `settle_malloc`).
_M_ARENA_MAX, _ARENAS = -8, 1
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 128 * 1024
#: Seconds between two tidyings of memory, and between two looks for a moment without requests.
_TIDY_S, _LOOK_S = 300.0, 0.1


class StartError(UsageProblem):
    """The frontend cannot start; the message has the change that is needed."""


def listen(
    host: str, port: int, flag: str = "--http-port", *, share: bool = False
) -> socket.socket:
    """A bound socket. ``share``: the kernel spreads connections over all that share the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host}:{port}: {network_reason(error)}; "
            f"use another {flag} or address"
        ) from None
    return listener


class Address:
    """Where a process listens for its clients. ``port``: that of the configuration until
    :meth:`listen`, the bound one afterwards."""

    def __init__(self, host: str, port: int, *, share: bool, tls: bool) -> None:
        self.host = host
        self.port = port
        self._share = share
        self._scheme = "https" if tls else "http"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self._scheme}://{host}:{self.port}"

    def listen(self) -> socket.socket:
        """As :func:`listen`."""
        listener = listen(self.host, self.port, share=self._share)
        self.port = listener.getsockname()[1]
        return listener


def accept(listener: socket.socket, backlog: int) -> None:
    """Begin to accept connections on a bound socket. Raises StartError.

    Two sockets of this system can be bound to one address as long as neither accepts; uvloop does
    not report the failure of the second, which would then serve nothing.
    """
    try:
        listener.listen(backlog)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise StartError(
            f"cannot listen on {host}:{port}: {network_reason(error)}; each listener of this host "
            "needs a port of its own"
        ) from None


def announce(record: Mapping[str, Any]) -> None:
    """Write the record of ``--announce``: one JSON line on stdout."""
    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
    sys.stdout.flush()


def settle_malloc() -> None:
    """Keep the memory that glibc's malloc holds and nothing uses small, before threads start.

    Each thread has an arena of its own by default, and a freed large block raises the size from
    which blocks are mapped apart, so that buffers of prompts and events leave holes between what
    stays. Measured with 15 requests a second and a fault every 15 s: unused memory rose from 4.3 to
    7.7 MB in 12 minutes, and with these values from 1.5 to 1.9. Other allocators, and settings of
    the environment, are left alone.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def settle_garbage_collector() -> None:
    """Collect cycles rarely, and exclude the objects of the start.

    The defaults collect every 700 allocations and stop all streams for up to 80 ms at a full
    collection; measured, that was an eighth of the CPU of a request and two thirds of the p99
    time to the first token. Rarer full collections are enough as long as requests leave no cycles,
    which `tests/dynctl/serving/test_reference_cycles.py` holds: one cycle a request was 1 GB after
    20,000 of them.
    The young ones are small, so that each is short: what survives is visited twice either way.
    What running requests free is subtracted from what they allocate, so 1,000 more objects than
    before can be 11,000 new ones: with a thousand workers their collection took 5 to 17 ms. At 100
    and 1 the longest takes half of that at 200 and 2, and all together no more CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def tidy_memory_when_idle(idle: Callable[[], bool]) -> None:
    """Collect cycles and return unused memory while ``idle``, at most every 5 minutes.

    Without it a process keeps what load peaks leave: cycles, the interpreter's free tuples (up to
    40,000), free pages of malloc. Measured at 50 requests per second: the number of objects rose by
    5,000 to 9,000 in five minutes, and each run of this function removed them. Only a request that
    arrives during a run waits for its end.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    pause = _TIDY_S
    while True:
        await asyncio.sleep(pause)
        pause = _LOOK_S
        if idle():
            gc.collect()
            if trim is not None:
                trim(0)
            pause = _TIDY_S

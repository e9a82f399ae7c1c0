"""The processes of a soak run: frontends, and engines with small caches that are restarted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from tests.ports import free_port
from tests.waiting import patience

ENGINES: Final = 4
BLOCKS: Final = 2000  # of each engine: small, so that blocks are evicted all the time
_STARTS: Final = 60


class Process:
    """A child with a JSON line on stdout when it is ready. Those of a soak run also report about
    themselves (:mod:`tests.soak.reports`)."""

    def __init__(self, child: asyncio.subprocess.Process, record: dict[str, Any]) -> None:
        self.child = child
        self.record = record
        self._reports = asyncio.Lock()

    @classmethod
    async def start(cls, *arguments: str) -> Process:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert child.stdout is not None
        async with asyncio.timeout(patience(30)):
            line = await child.stdout.readline()
        if not line:
            raise RuntimeError(f"{arguments[:2]} ended with {await child.wait()} before it served")
        return cls(child, json.loads(line))

    async def report(self) -> dict[str, Any]:
        """What the process reports about itself now."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        async with self._reports:
            self.child.stdin.write(b"\n")
            line = await self.child.stdout.readline()
        report: dict[str, Any] = json.loads(line)
        return report

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing if the process has ended."""
        if self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(number)

    async def end(self) -> None:
        """Let it finish what runs, and wait for its end."""
        self.signal(signal.SIGTERM)
        await self.child.wait()

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.child.wait()

    def usage(self) -> dict[str, int]:
        """Resident bytes, open descriptors and threads."""
        proc = Path(f"/proc/{self.child.pid}")
        pages = int((proc / "statm").read_text().split()[1])
        return {
            "memory": pages * os.sysconf("SC_PAGE_SIZE"),
            "descriptors": len(os.listdir(proc / "fd")),
            "threads": len(os.listdir(proc / "task")),
        }


class Fleet:
    """A frontend and its engines. An engine that is restarted keeps its ports."""

    def __init__(self) -> None:
        self.engines: dict[str, Process] = {}
        self.frontend: Process | None = None
        #: Of HTTP, KV events and replay: none of those that the system gives to connections.
        self._ports_of: dict[str, tuple[int, int, int]] = {}

    @property
    def url(self) -> str:
        assert self.frontend is not None
        return str(self.frontend.record["url"])

    async def start(self) -> None:
        for number in range(ENGINES):
            await self.start_engine(f"engine-{number}")
        await self.restart_frontend()

    async def restart_frontend(self) -> None:
        """Start the frontend; one that runs is killed first."""
        if self.frontend is not None:
            await self.frontend.kill()
        workers = [self.worker_spec(name) for name in self.engines]
        self.frontend = await start_frontend(workers=workers)

    def worker_spec(self, name: str) -> str:
        """The ``--worker`` of an engine."""
        record = self.engines[name].record
        return (
            f"{record['url']},name={name},kv-events={record['kv_events']},replay={record['replay']}"
        )

    def engine_options(self, name: str) -> tuple[str, ...]:
        """Options of an engine beside its name and ports."""
        return ()

    async def start_engine(self, name: str) -> None:
        """Start an engine, or one that ended again at its ports."""
        if name not in self._ports_of:
            self._ports_of[name] = (free_port(), free_port(), free_port())
        port, events, replay = self._ports_of[name]
        arguments = (
            "-m",
            "tests.soak.engine_process",
            *("--name", name, "--port", str(port)),
            *("--kv-events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{replay}"),
            *("--total-blocks", str(BLOCKS), "--speedup-ratio", "20"),
            *self.engine_options(name),
        )
        for _ in range(_STARTS):
            try:
                self.engines[name] = await Process.start(*arguments)
                return
            except RuntimeError:  # another connection has one of its ports for the moment
                await asyncio.sleep(1.0)
        raise RuntimeError(f"{name} did not start again on {port}")

    async def close(self) -> None:
        if self.frontend is not None:
            await self.frontend.kill()
        for engine in self.engines.values():
            await engine.kill()


async def start_frontend(**settings: Any) -> Process:
    """A frontend with these settings of :mod:`tests.soak.frontend_process`."""
    return await Process.start("-m", "tests.soak.frontend_process", json.dumps(settings))

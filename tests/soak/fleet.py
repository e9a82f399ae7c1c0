"""The processes of a soak run: a frontend, and engines with small caches that are restarted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from tests.waiting import patience

ENGINES: Final = 4
BLOCKS: Final = 2000  # of each engine: small, so that blocks are evicted all the time
_STARTS: Final = 60
_FRONTEND: Final = """
import sys
from dynctl.serving.routing.config import FrontendConfig, HealthConfig
from dynctl.serving.http.server import run_frontend
from dynctl.tokenization import DEMO_MODEL_DIR
sys.exit(run_frontend(FrontendConfig(
    port=0, workers=tuple(sys.argv[1:]), model_path=DEMO_MODEL_DIR, announce=True,
    log_level="error", decision_memory_bytes=2_000_000,
    health=HealthConfig(interval_s=0.5, timeout_s=5.0),
)))
"""


class Process:
    """A child with a JSON line on stdout when it is ready."""

    def __init__(self, child: asyncio.subprocess.Process, record: dict[str, Any]) -> None:
        self.child = child
        self.record = record

    @classmethod
    async def start(cls, *arguments: str) -> Process:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert child.stdout is not None
        async with asyncio.timeout(patience(30)):
            line = await child.stdout.readline()
        if not line:
            raise RuntimeError(f"{arguments[:2]} ended with {await child.wait()} before it served")
        return cls(child, json.loads(line))

    async def kill(self) -> None:
        if self.child.returncode is None:
            self.child.send_signal(signal.SIGKILL)
        await self.child.wait()

    def usage(self) -> tuple[int, int]:
        """(resident bytes, open descriptors)."""
        proc = Path(f"/proc/{self.child.pid}")
        pages = int((proc / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(proc / "fd"))


class Fleet:
    """A frontend and its engines. An engine that is restarted keeps its ports."""

    def __init__(self) -> None:
        self.engines: dict[str, Process] = {}
        self.frontend: Process | None = None

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
        workers = []
        for name, engine in self.engines.items():
            record = engine.record
            workers.append(
                f"{record['url']},name={name},kv-events={record['kv_events']},"
                f"replay={record['replay']}"
            )
        self.frontend = await Process.start("-c", _FRONTEND, *workers)

    async def start_engine(self, name: str) -> None:
        """Start an engine, or one that ended again at its ports."""
        old = self.engines.get(name)
        port, events = "0", "tcp://127.0.0.1:0"
        more: list[str] = []
        if old is not None:
            port = old.record["url"].rsplit(":", 1)[1]
            events = old.record["kv_events"]
            more = ["--replay", old.record["replay"]]
        arguments = (
            "-m",
            "dynctl.simulation.engine",
            *("--name", name, "--port", port, "--kv-events", events, *more),
            *("--total-blocks", str(BLOCKS), "--speedup-ratio", "20"),
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

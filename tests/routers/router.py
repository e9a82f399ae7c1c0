"""Routers that others made, before simulated engines.

``DYNCTL_ROUTERS`` has a name and a Python of each: ``smg=/path/to/python sglang-router=...``;
``make test-routers`` installs them and sets it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx

from tests.dynamo.processes import ProcessGroup
from tests.ports import free_port
from tests.waiting import patience

# Read when imported, since the tests' environment is emptied of DYNCTL_* variables.
_NAMED: Final = os.environ.get("DYNCTL_ROUTERS", "").split()
#: Name -> its Python.
ROUTERS: Final = dict(router.split("=", 1) for router in _NAMED)
_START_S: Final = 60.0
_COMMANDS: Final = {
    "sglang-router": ("-m", "sglang_router.launch_router"),
    "smg": ("-c", "from smg.cli import main; main()", "launch"),
    "vllm-router": ("-m", "vllm_router.launch_router"),
}


@asynccontextmanager
async def router_before(
    name: str, engines: Sequence[str], directory: Path, policy: str = "cache_aware"
) -> AsyncIterator[str]:
    """The URL of a router before engines."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [ROUTERS[name], *_COMMANDS[name], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--log-level", "error"]
    command += ["--policy", policy, "--worker-urls", *engines]
    group = ProcessGroup(directory)
    try:
        process = group.start(name, command, {"PATH": os.environ["PATH"], "HOME": str(directory)})
        async with httpx.AsyncClient(trust_env=False) as client:
            async with asyncio.timeout(patience(_START_S)):
                while not await _lists_models(client, url):
                    assert process.alive, process.tail()
                    await asyncio.sleep(0.1)
        yield url
    finally:
        group.close()


async def _lists_models(client: httpx.AsyncClient, url: str) -> bool:
    """Whether the router knows a model: it has reached its engines then."""
    try:
        return (await client.get(f"{url}/v1/models")).status_code == 200
    except httpx.HTTPError:
        return False

"""`serve frontend` as a process: ready line, SIGTERM, and an engine killed under load."""

import asyncio
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from contextlib import asynccontextmanager

import aiohttp
import pytest

from dynctl.base.tasks import end_tasks
from dynctl.serving.http import start
from dynctl.serving.http.start import settle_garbage_collector
from tests.dynctl.serving.fleets import chat_body, site, until
from tests.waiting import patience

FRONTEND = f"""
import os, sys
from dynctl.serving.routing.config import FrontendConfig, HealthConfig, Limits
from dynctl.serving.http.server import run_frontend
from dynctl.tokenization import DEMO_MODEL_DIR
sys.exit(run_frontend(FrontendConfig(
    port=0, workers=tuple(sys.argv[1:]), model_path=DEMO_MODEL_DIR, announce=True,
    health=HealthConfig(interval_s=0.2, timeout_s={patience(1.0)}),
    limits=Limits(shutdown_delay_s=float(os.environ.get("SHUTDOWN_DELAY_S", "0"))),
)))
"""


@asynccontextmanager
async def process(*arguments: str):
    """A child of ours and the record that it prints when it is ready; it is gone afterwards."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        async with asyncio.timeout(patience(20)):
            line = await child.stdout.readline()
        assert line, (await child.stderr.read()).decode()
        yield child, json.loads(line)
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def all_read(url: str, connector: aiohttp.BaseConnector | None = None) -> None:
    """Until a frontend has read its engines: one that was late for its first probe gets no request
    before the next."""
    async with aiohttp.ClientSession(connector=connector) as client, asyncio.timeout(patience(20)):
        while True:
            async with client.get(f"{url}/v1/workers") as answer:
                rows = (await answer.json())["workers"]
            if all(row["status"] == "ready" for row in rows):
                return
            await asyncio.sleep(0.05)


def engine(name: str, *more: str):
    return process(
        "-m",
        "dynctl.simulation.engine",
        "--port",
        "0",
        "--name",
        name,
        "--speedup-ratio",
        "10",
        *more,
    )


async def test_sigterm_lets_running_streams_end_and_exits_0():
    async with (
        aiohttp.ClientSession() as client,
        engine("a0") as (_, ready),
        process("-c", FRONTEND, f"{ready['url']},name=a0") as (frontend, record),
    ):
        await all_read(record["url"])
        url = record["url"] + "/v1/chat/completions"
        body = chat_body("hi there", stream=True, max_tokens=300)
        async with client.post(url, json=body) as answer:
            assert answer.status == 200
            await answer.content.readany()
            frontend.send_signal(signal.SIGTERM)
            rest = await answer.read()
            assert rest.endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(frontend.wait(), patience(10)) == 0
        talk = (await frontend.stderr.read()).decode()
        assert "serving on http://127.0.0.1:" in talk
        assert "stopping: 1 requests are running" in talk
        assert "hi there" not in talk


async def test_the_shutdown_delay_answers_new_requests_and_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SHUTDOWN_DELAY_S", str(patience(2)))
    async with (
        aiohttp.ClientSession() as client,
        engine("a0") as (_, ready),
        process("-c", FRONTEND, f"{ready['url']},name=a0") as (frontend, record),
    ):
        await all_read(record["url"])

        async def status(path: str) -> int:
            async with client.get(record["url"] + path) as answer:
                return answer.status

        assert await status("/ready") == 200
        frontend.send_signal(signal.SIGTERM)
        async with asyncio.timeout(patience(2)):
            while await status("/ready") != 503:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        async with client.post(
            record["url"] + "/v1/chat/completions", json=chat_body("hi", max_tokens=4)
        ) as answer:
            assert answer.status == 200
        assert await asyncio.wait_for(frontend.wait(), patience(20)) == 0


async def test_killing_an_engine_under_64_streams_leaves_no_client_without_an_answer():
    async with engine("a0") as (first, one), engine("a1") as (_, two):
        workers = [f"{one['url']},name=a0", f"{two['url']},name=a1"]
        async with (
            process("-c", FRONTEND, *workers) as (_, record),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
        ):
            await all_read(record["url"])
            began = 0
            ends: list[str] = []

            async def stream(i: int) -> None:
                nonlocal began
                body = chat_body(f"prompt {i}", stream=True, max_tokens=400)
                async with client.post(record["url"] + "/v1/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        ends.append(f"status {answer.status}")
                        return
                    seen = await answer.content.readany()
                    began += 1
                    seen += await answer.read()
                    last = seen.rstrip(b"\n").rpartition(b"\n\n")[2]
                    ends.append("error" if last.startswith(b'data: {"error"') else last.decode())

            async with asyncio.timeout(patience(30)):
                streams = [asyncio.create_task(stream(i)) for i in range(64)]
                await until(lambda: began == 64, 15)
                os.kill(first.pid, signal.SIGKILL)
                await asyncio.gather(*streams)
            assert len(ends) == 64
            assert set(ends) == {"error", "data: [DONE]"}  # both engines had some

            rows = await _rows(client, record["url"])
            while rows["a0"]["status"] == "ready":
                await asyncio.sleep(0.05)
                rows = await _rows(client, record["url"])
            for row in rows.values():
                for rank in row["ranks"]:
                    assert rank["active_requests"] == rank["active_decode_blocks"] == 0
            for i in range(8):
                body = chat_body(f"after {i}", max_tokens=2)
                async with client.post(record["url"] + "/v1/chat/completions", json=body) as answer:
                    assert answer.status == 200


async def _rows(client, url):
    async with client.get(url + "/v1/workers") as answer:
        return {row["name"]: row for row in (await answer.json())["workers"]}


def test_a_young_collection_visits_few_objects(monkeypatch: pytest.MonkeyPatch):
    """What requests free that end counts against what those make that begin. So a collection that
    waits for many more objects than before visits nearly all that running requests have."""
    young = []

    def begins(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            young.append(len(gc.get_objects(generation=0)))

    before = gc.get_threshold()
    monkeypatch.setattr(gc, "freeze", lambda: None)
    alive = deque([number] for number in range(10_000))
    try:
        settle_garbage_collector()
        gc.callbacks.append(begins)
        for number in range(20_000):
            alive.append([number])
            if number % 10:  # nine of ten begin when others end
                alive.popleft()
    finally:
        gc.callbacks.remove(begins)
        gc.set_threshold(*before)
    assert len(young) > 2
    assert max(young) < 5_000


async def test_memory_is_tidied_while_no_request_runs(monkeypatch):
    monkeypatch.setattr(start, "_TIDY_S", 0.0)
    monkeypatch.setattr(start, "_LOOK_S", 0.0)
    async with site([{"name": "one", "speedup_ratio": 1.0}]) as fleet:
        process = fleet.frontend
        gc.disable()
        try:
            running = asyncio.create_task(fleet.chat(max_tokens=20))
            await until(lambda: not process.is_idle())
            task = asyncio.create_task(start.tidy_memory_when_idle(process.is_idle))
            await asyncio.sleep(0)
            cycle = Cycle()
            kept = weakref.ref(cycle)
            del cycle
            for _ in range(50):
                await asyncio.sleep(0)
            assert kept() is not None
            assert (await running)[0] == 200
            await until(lambda: kept() is None)
        finally:
            gc.enable()
            await end_tasks([task])


class Cycle:
    def __init__(self) -> None:
        self.itself = self


ARENAS = """
import ctypes, tempfile, threading
from dynctl.serving.http.start import settle_malloc

settle_malloc()
meet = threading.Barrier(5)

def allocate():
    held = [bytearray(4000) for _ in range(100)]
    meet.wait()  # each thread of these has its own arena, if there is one for it

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
meet.wait()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap nr="))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another malloc")
@pytest.mark.parametrize(
    ("environment", "bounded"),
    [
        ({}, True),
        ({"MALLOC_ARENA_MAX": "8"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}, False),
    ],
)
def test_threads_share_an_arena_unless_the_environment_says_otherwise(
    environment: dict[str, str], bounded: bool
):
    ours = ("MALLOC_", "GLIBC_TUNABLES")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, "-c", ARENAS]
    output = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, check=True
    ).stdout
    assert (int(output) == 1) == bounded

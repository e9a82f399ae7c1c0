"""A router that restarts at its address: followers show the new process, and nothing of the old."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynctl.documents.snapshot import DecisionReport
from dynctl.sources.frontend.live import LiveFrontends
from dynctl.sources.query import DecisionQuery
from dynctl.top.history import History
from tests.forks import Program
from tests.ports import free_port
from tests.waiting import patience


@contextmanager
def running(*arguments: str, log: Path) -> Iterator[Program]:
    """A process of dynctl."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "DYNCTL_"))}
    with log.open("ab") as errors:
        process = Program(["dynctl", *arguments], stdout=subprocess.PIPE, stderr=errors, env=clean)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("engine") / "log"
    words = ("serve", "engine", "--name", "a0", "--speedup-ratio", "1000")
    with running(*words, log=log) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], patience(30))
        assert ready, log.read_text()
        engine = json.loads(process.stdout.readline())
        yield f"{engine['url']},name=a0,kv-events={engine['kv_events']}"


@contextmanager
def frontend(worker: str, port: int, log: Path, *flags: str) -> Iterator[str]:
    words = ("serve", "frontend", "--worker", worker, "--http-port", str(port), *flags)
    with running(*words, log=log) as process:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + patience(30)
        while not healthy(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield url


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str, times: int) -> set[str]:
    """Send requests; the ids of their decisions."""
    found = set()
    for number in range(times):
        body = {
            "model": httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"],
            "messages": [{"role": "user", "content": f"question {number}"}],
            "max_tokens": 1,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=30)
        assert answer.status_code == 200, answer.text
        found.add(answer.headers["x-dynctl-decision"])
    return found


@pytest.mark.parametrize(("before", "after"), [(3, 5), (4, 2), (3, 3)])
async def test_top_shows_the_router_that_is_at_the_address_now(
    worker: str, tmp_path: Path, before: int, after: int
) -> None:
    """Also where the new router made as many decisions, or more, before it was read again."""
    port, log, history = free_port(), tmp_path / "log", History()
    with frontend(worker, port, log) as url:
        old = await asyncio.to_thread(ask, url, before)
        source = LiveFrontends((url,), timeout=patience(10))
        await source.__aenter__()
        first = await source.snapshot()
        history.add(first)
    try:
        assert {line.id for line in first.decisions} == old
        assert (first.header.recorded, first.header.mode) == (before, "kv")
        assert (await source.snapshot()).problem
        with frontend(worker, port, log, "--router-mode", "round-robin") as url:
            new = await asyncio.to_thread(ask, url, after)
            async with asyncio.timeout(patience(30)):
                while (shown := await source.snapshot()).problem or len(shown.decisions) < after:
                    assert not old & {line.id for line in shown.decisions} or shown.problem
                    await asyncio.sleep(0.05)
            assert {line.id for line in shown.decisions} == new
            assert shown.header.recorded == after
            assert shown.header.mode == "round-robin"
            assert (shown.missed, shown.restarts) == (0, 1)
            assert shown.header.traffic.requests == after  # type: ignore[union-attr]
            history.add(shown)
            assert history.rates(shown.at) is None  # one reading of this process
    finally:
        await source.__aexit__(None, None, None)


async def test_decisions_are_followed_from_the_first_of_the_new_process(
    worker: str, tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "log"
    with frontend(worker, port, log) as url:
        old = await asyncio.to_thread(ask, url, 3)
        source = LiveFrontends((url,), timeout=patience(10))
        reports = source.follow_decisions(DecisionQuery())
        first = await anext(reports)
        assert {line.id for line in first.decisions} == old
        waiting = asyncio.create_task(_next(reports))
        await asyncio.sleep(0)
    with frontend(worker, port, log) as url:
        new = await asyncio.to_thread(ask, url, 5)
        seen: set[str] = set()
        async with asyncio.timeout(patience(60)):
            while not new <= seen:
                seen |= {line.id for line in (await waiting).decisions}
                waiting = asyncio.create_task(_next(reports))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await reports.aclose()
    await source.__aexit__(None, None, None)
    assert seen == new


async def _next(reports: Any) -> DecisionReport:
    found: DecisionReport = await anext(reports)
    return found

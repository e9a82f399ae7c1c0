"""`serve frontend --processes N`: real processes behind one port, killed and ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dynctl.serving.http.start import StartError
from dynctl.serving.routing.config import FrontendConfig, ReplicaConfig
from dynctl.serving.services.processes import (
    _frontend_config,
    _router_config,
    merged,
    run_processes,
)
from dynctl.serving.telemetry.exposition import Family, samples
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import start_engine
from tests.dynctl.serving.fleets import chat_body
from tests.dynctl.serving.hostile import HostileEngine, answers, hostile
from tests.waiting import patience, slowdown


class Serving:
    """The running command, its record, and a client."""

    def __init__(self, process: asyncio.subprocess.Process, record: dict[str, Any]) -> None:
        self.process = process
        self.record = record
        self.url: str = record["url"]
        self.children = list(record["processes"].values())

    async def get(self, path: str, url: str = "", token: str = "") -> tuple[int, str]:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # A connection for each request: it reaches any of the frontends.
        async with (
            aiohttp.ClientSession() as client,
            client.get((url or self.url) + path, headers=headers) as answer,
        ):
            return answer.status, await answer.text()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        url = self.url + "/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, json=chat_body("hello", max_tokens=2, **fields)) as answer,
        ):
            await answer.read()
            return answer.status, answer.headers.get("x-dynctl-decision")

    async def answered(self) -> str:
        """The decision of a request that was answered; on a busy machine an engine's probes may
        be late, and the first attempt be refused."""
        async with asyncio.timeout(patience(30)):
            while True:
                status, decision = await self.chat()
                if status == 200:
                    assert decision
                    return str(decision)
                await asyncio.sleep(0.05)

    async def until_ok(self, path: str, url: str = "") -> None:
        async with asyncio.timeout(patience(30)):
            while (await self.get(path, url))[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def metrics(self) -> dict[tuple[str, str], float]:
        """(name, process) -> the sum of its samples, from the system port."""
        system = f"http://127.0.0.1:{self.record['system_port']}"
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families((await self.get("/metrics", system))[1]):
            for sample in family.samples:
                key = sample.name, sample.labels["process"]
                found[key] = found.get(key, 0) + sample.value
        return found

    async def until_counted(self, requests: int) -> None:
        """Wait until the frontends together, and the router, count so many requests."""
        name = "dynamo_frontend_requests_total"
        async with asyncio.timeout(patience(30)):
            while True:
                found = await self.metrics()
                both = [found.get((name, f"frontend-{number}"), 0) for number in (1, 2)]
                if min(sum(both), found.get((name, "router"), 0)) >= requests:
                    return
                await asyncio.sleep(0.05)

    async def until_condition(self, subject: str, text: str) -> None:
        """Wait until the fleet has the condition of a process that ended this way."""
        async with asyncio.timeout(patience(30)):
            while True:
                status, body = await self.get("/v1/fleet")
                found = json.loads(body)["conditions"] if status == 200 else []
                if any(
                    (one["code"], one["subject"]) == ("PROCESS_RESTARTED", subject)
                    and text in one["message"]
                    for one in found
                ):
                    return
                await asyncio.sleep(0.05)

    async def until_restarted(self, name: str) -> None:
        async with asyncio.timeout(patience(60)):
            while True:
                found = await self.metrics()
                if (
                    found["dynctl_process_restarts_total", name]
                    and found["dynctl_process_up", name]
                ):
                    return
                await asyncio.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def children_of(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(patience(30)):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110 - not our children
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(*arguments: str, **environment: str) -> AsyncIterator[Serving]:
    """Two frontends, a router and an engine; all are gone afterwards."""
    engine = await start_engine(EngineConfig(port=0, speedup_ratio=10.0, name="a0"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dynctl", "serve", "frontend", "--processes", "2", "--announce",
        "--http-port", "0", "--system-port", "0", "--log-level", "error", "--drain-timeout", "300",
        "--worker", f"{engine.url},name=a0", *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(patience(60)):
            line = await process.stdout.readline()
        assert line, await process.wait()
        yield Serving(process, json.loads(line))
    finally:
        left = [] if process.returncode is not None else children_of(process.pid)
        if process.returncode is None:
            process.kill()
        await process.wait()
        await until_gone(left)
        await engine.close()


async def test_killed_processes_start_again_and_sigterm_ends_all():
    async with serving() as fleet:
        # Requests and the commands of operators work with the shared port.
        for _ in range(8):
            decision = await fleet.answered()
            await fleet.until_ok(f"/v1/decisions/{decision}")
        workers = json.loads((await fleet.get("/v1/workers"))[1])["workers"]
        assert [row["name"] for row in workers] == ["a0"]
        system = f"http://127.0.0.1:{fleet.record['system_port']}"
        for path in ("/live", "/ready", "/health"):
            await fleet.until_ok(path, system)
        await fleet.until_counted(8)
        async with asyncio.timeout(patience(30)):
            # Each frontend answers with the metrics of all.
            while "dynctl_process_up" not in (await fleet.get("/metrics"))[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

            text = (await fleet.get("/metrics"))[1]
            assert text.count("# HELP dynamo_frontend_requests_total ") == 1

        os.kill(fleet.record["processes"]["frontend-1"], signal.SIGKILL)
        await fleet.until_restarted("frontend-1")
        await fleet.answered()
        await fleet.until_condition("frontend-1", "was killed by signal 9")

        os.kill(fleet.record["processes"]["router"], signal.SIGKILL)
        await fleet.until_restarted("router")
        async with asyncio.timeout(patience(30)):
            # Its counters begin at 0: it decides again.
            while not (await fleet.metrics()).get(("dynctl_decisions_total", "router")):
                await fleet.answered()

        running = children_of(fleet.process.pid)
        assert len(running) == 3
        body = chat_body("hi there", stream=True, max_tokens=300)
        async with AsyncExitStack() as streams:
            opened = []
            for _ in range(6):  # over both frontends, all but surely
                client = await streams.enter_async_context(aiohttp.ClientSession())
                answer = await streams.enter_async_context(
                    client.post(fleet.url + "/v1/chat/completions", json=body)
                )
                assert answer.status == 200
                await answer.content.readany()
                opened.append(answer)
            fleet.process.send_signal(signal.SIGTERM)
            for answer in opened:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(fleet.process.wait(), patience(30)) == 0
        assert not any(alive(pid) for pid in [*running, *fleet.children])


async def test_sigkill_of_the_parent_ends_its_children_and_secrets_are_in_no_process_list():
    async with serving("--api-key", "k3y", "--admin-token", "adm1n") as fleet:
        assert len(fleet.children) == 3
        for pid in fleet.children:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()  # noqa: ASYNC240 - /proc
            assert b"dynctl.web.child" in command
            assert b"k3y" not in command
            assert b"adm1n" not in command
        # The operators' token reaches the router through any frontend.
        assert (await fleet.get("/v1/workers"))[0] == 401
        status, body = await fleet.get("/v1/workers", token="adm1n")
        assert (status, len(json.loads(body)["workers"])) == (200, 1)
        assert (await fleet.chat())[0] == 401
        fleet.process.kill()
        await fleet.process.wait()
        await until_gone(fleet.children)


async def test_processes_that_do_not_respond_are_killed_and_start_again():
    async with serving("--process-timeout", f"{3 * slowdown():g}") as fleet:
        before = fleet.record["processes"]
        for name in ("frontend-1", "router"):
            os.kill(before[name], signal.SIGSTOP)
        for name in ("frontend-1", "router"):
            await fleet.until_restarted(name)
            assert not alive(before[name])
            # Of its own end too: the next router finds it.
            await fleet.until_condition(name, "did not respond for")
        await fleet.answered()
        found = await fleet.metrics()
        assert not found["dynctl_process_restarts_total", "frontend-2"]


async def test_engines_get_the_keys_of_their_variables(tmp_path: Path):
    answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": "x"}}]})
    good = answers(answer.encode(), "application/json")
    async with hostile(good, good) as engines:
        seen: dict[str, set[str]] = {}

        def watched(engine: HostileEngine) -> None:
            async def behave(request: web.Request) -> web.StreamResponse:
                seen.setdefault(engine.url, set()).add(request.headers.get("authorization", ""))
                return await good(request)

            engine.behave = behave

        for engine in engines:
            watched(engine)
        file = tmp_path / "workers.yaml"
        file.write_text(
            f"workers:\n- {{url: '{engines[1].url}', name: e1, model: keys, api-key-env: KEY_B}}\n"
        )
        spec = f"{engines[0].url},name=e0,model=keys,api-key-env=KEY_A"
        async with serving(
            "--worker", spec, "--workers-file", str(file), KEY_A="of-a", KEY_B="of-b"
        ) as fleet:
            expected = {engines[0].url: {"Bearer of-a"}, engines[1].url: {"Bearer of-b"}}
            async with asyncio.timeout(patience(30)):
                while seen.keys() != expected.keys():
                    await fleet.chat(model="keys")
            for _ in range(8):
                await fleet.chat(model="keys")
            assert seen == expected


async def test_a_router_that_cannot_start_ends_the_command():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dynctl", "serve", "frontend", "--processes", "2", "--http-port", "0",
        "--worker", "http://127.0.0.1:1,name=a", "--worker", "http://127.0.0.1:2,name=a",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(patience(60)):
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 2
    assert b"{process=router}: cannot start: --worker http://127.0.0.1:2,name=a" in err
    assert b"error: --processes: router ended with code 2 before it was ready" in err
    assert b"Traceback" not in err


def test_load_is_shared_with_other_commands_by_the_router_alone():
    replicas = ReplicaConfig(bind="127.0.0.1:5560", peers=("tcp://127.0.0.1:5561",))
    config = FrontendConfig(replicas=replicas)
    assert _router_config(config).replicas == replicas
    assert _frontend_config(config).replicas is None


def test_a_port_of_another_program_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
            run_processes(FrontendConfig(port=port), 2)


def test_expositions_of_processes_become_one():
    counter = "# HELP a_total Text.\n# TYPE a_total counter\n"
    texts = [
        ("router", counter + 'a_total{x="{1}"} 1\n# HELP b Other.\n# TYPE b gauge\nb 2\n'),
        ("frontend-1", counter + 'a_total{x="2"} 3\na_total 4\n'),
    ]
    assert merged(texts) == (
        counter
        + 'a_total{process="router",x="{1}"} 1\n'
        + 'a_total{process="frontend-1",x="2"} 3\n'
        + 'a_total{process="frontend-1"} 4\n'
        + '# HELP b Other.\n# TYPE b gauge\nb{process="router"} 2\n'
    )


pieces = st.sampled_from(
    ["# HELP y", "# TYPE y", *"\u2028\x85\x0b\n", "{", "}", '"', "\\", " ", "a", ","]
)
labels = st.lists(pieces, max_size=6).map("".join)


@given(st.lists(labels, min_size=1, max_size=3, unique=True))
def test_no_label_breaks_the_metrics_of_several_processes(models: list[str]):
    family = Family("x", "counter", "Requests.", ("model",))
    text = samples(family, [((model,), 2.0) for model in models])
    page = merged([("1", text), ("2", text)])
    (parsed,) = text_string_to_metric_families(page)
    read = {(one.labels["process"], one.labels["model"]): one.value for one in parsed.samples}
    # Labels stay distinct, with what is unsafe on a terminal escaped.
    assert len(read) == 2 * len(models) == len(parsed.samples)
    assert set(read.values()) == {2.0}

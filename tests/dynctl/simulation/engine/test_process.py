"""The engine as a process: ready line, exit codes, drain, and what it does not import."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from dynctl.simulation.engine.__main__ import main
from tests.waiting import patience

ROOT = Path(__file__).parents[4]
Spawn = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def spawn() -> AsyncIterator[Spawn]:
    """`await spawn(*flags, **environment)` starts `python -m dynctl.simulation.engine`."""
    started: list[asyncio.subprocess.Process] = []

    async def spawn_one(*flags: str, **environment: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dynctl.simulation.engine",
            *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )
        started.append(process)
        return process

    yield spawn_one
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready(process: asyncio.subprocess.Process) -> dict:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), patience(30))
    record: dict = json.loads(line)
    return record


@pytest.mark.seed("router-topology: runtime contract: topology_domains")
@pytest.mark.seed("router-topology: runtime contract: kv_transfer_domain")
@pytest.mark.seed("router-topology: runtime contract: kv_transfer_enforcement")
async def test_the_seeds_example_ends_in_the_published_config(spawn: Spawn, tmp_path: Path) -> None:
    """mkdir / printf / export of the worker environment contract, run by a shell as written."""
    topology = tmp_path / "dynamo-topology"
    script = f"""
mkdir -p {topology}
printf 'us-east-1a\\n' > {topology}/zone

export DYN_TOPOLOGY_ENABLED=true
export DYN_TOPOLOGY_MOUNT_PATH={topology}
export DYN_KV_TRANSFER_DOMAIN=zone
export DYN_KV_TRANSFER_ENFORCEMENT=required
exec {sys.executable} -m dynctl.simulation.engine --port 0 --name prefill-a0 --role prefill
"""
    process = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        script,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        record = await ready(process)
        assert record["engine"] == "prefill-a0"
        async with (
            aiohttp.ClientSession() as session,
            session.get(record["url"] + "/engine/info") as answer,
        ):
            info = await answer.json()
        assert info["role"] == "prefill"
        assert info["kv_events"][0]["endpoint"] == record["kv_events"]
        assert info["kv_events"][0]["replay"] == record["replay"]
        published = info["runtime_config"]
        assert published["topology_domains"] == {"zone": "us-east-1a"}
        assert published["kv_transfer_domain"] == "zone"
        assert published["kv_transfer_enforcement"] == "required"
        assert published["taints"] == ["dynamo.topology/zone=us-east-1a"]
    finally:
        process.terminate()
        _, err = await asyncio.wait_for(process.communicate(), patience(30))
    assert process.returncode == 0
    assert b"engine prefill-a0 (prefill, simulated) serves demo on http://127.0.0.1:" in err


async def test_sigterm_finishes_running_streams_and_refuses_new_ones(spawn: Spawn) -> None:
    process = await spawn("--decode-itl-ms", "20")
    record = await ready(process)
    url = record["url"] + "/v1/completions"
    body = {"model": "demo", "prompt": "hello", "max_tokens": 40, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        await answer.content.readline()
        process.terminate()
        async with session.get(record["url"] + "/health") as health:
            while health.status == 200:  # the signal is on its way
                health = await session.get(record["url"] + "/health")
            assert health.status == 503
        async with session.post(url, json=body) as refused:
            assert refused.status == 503
            assert "draining" in (await refused.json())["error"]["message"]
        text = await answer.text()
    assert text.endswith("data: [DONE]\n\n")
    _, err = await asyncio.wait_for(process.communicate(), patience(30))
    assert process.returncode == 0
    assert b"Traceback" not in err


async def test_sigint_leaves_at_once(spawn: Spawn) -> None:
    process = await spawn()
    await ready(process)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), patience(30))
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "DYN_KV_TRANSFER_DOMAIN is not set"),
        (
            {"DYN_KV_TRANSFER_DOMAIN": "zone", "DYN_KV_TRANSFER_ENFORCEMENT": "sometimes"},
            "kv_transfer_enforcement must be 'required' or 'preferred', got \"sometimes\"",
        ),
    ],
)
@pytest.mark.seed("dep-topology: startup failures: topology files not present")
async def test_a_bad_topology_environment_exits_1_with_its_message(
    spawn: Spawn, tmp_path: Path, environment: dict, says: str
) -> None:
    (tmp_path / "zone").write_text("a")
    process = await spawn(
        DYN_TOPOLOGY_ENABLED="true", DYN_TOPOLOGY_MOUNT_PATH=str(tmp_path), **environment
    )
    out, err = await asyncio.wait_for(process.communicate(), patience(30))
    assert process.returncode == 1
    assert out == b""
    assert err.decode().startswith("ERROR ")
    assert says in err.decode()


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        (["--block-size", "0"], {}, "--block-size is 0; expected 1..4096"),
        (["--kv-events", "udp://x"], {}, "--kv-events is 'udp://x'; expected tcp://HOST:PORT"),
        (["--max-model-len", "9999999"], {}, "blocks of 16 tokens hold 65536"),
        (["--model-path", "/nowhere"], {}, "--model-path: "),
        ([], {"DYNCTL_ENGINE_PORT": "http"}, "DYNCTL_ENGINE_PORT is 'http'; expected a whole"),
        (["--fault-refuse", "200"], {}, "--fault-refuse is 200"),
    ],
)
def test_a_bad_option_exits_2_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    environment: dict,
    says: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(flags) == 2
    assert says in capsys.readouterr().err


async def test_a_port_in_use_exits_2_and_is_named(spawn: Spawn) -> None:
    first = await spawn()
    port = (await ready(first))["url"].rpartition(":")[2]
    second = await spawn("--port", port)
    _, err = await asyncio.wait_for(second.communicate(), patience(30))
    assert second.returncode == 2
    assert f"--port {port}: the address is in use" in err.decode()


async def test_an_engine_imports_nothing_of_the_command_line(spawn: Spawn) -> None:
    """A fleet of engines must stay small."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, dynctl.simulation.engine.__main__; print(*sys.modules)",
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    out, _ = await process.communicate()
    loaded = {name.partition(".")[0] for name in out.decode().split()}
    heavy = {"typer", "rich", "click", "pydantic", "transformers", "httpx", "prometheus_client"}
    assert not loaded & heavy
    assert "dynctl" in loaded

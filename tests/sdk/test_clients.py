"""Client libraries of others against a frontend: openai, anthropic, litellm, and aiperf's load."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from dynctl.tokenization import DEMO_MODEL_DIR
from tests.dynctl.serving.fleets import SLOW_HEALTH, Site, site
from tests.waiting import patience

TWO: list[dict[str, Any]] = [{"name": "a0"}, {"name": "a1"}]
PAIR: list[dict[str, Any]] = [{"name": "p0", "role": "prefill"}, {"name": "d0", "role": "decode"}]
KEY = "sk-of-a-client"
#: The libraries take up to ten seconds to import.
_TIMEOUT_S = 60.0


async def run(python: str, *arguments: str, home: Path) -> str:
    """The output of a program in the environment of the libraries."""
    environment = {
        "PATH": str(Path(python).parent),
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "COLUMNS": "160",
    }
    process = await asyncio.create_subprocess_exec(
        python, *arguments, env=environment, cwd=home,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(patience(_TIMEOUT_S)):
            output, errors = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, output.decode() + errors.decode()
    return output.decode()


async def calls(python: str, name: str, fleet: Site, home: Path) -> dict[str, Any]:
    client = str(Path(__file__).with_name("client.py"))
    output = await run(python, client, name, fleet.frontend.url, KEY, home=home)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


async def test_openai(sdk_python: str, tmp_path: Path) -> None:
    async with site(TWO, api_keys=(KEY,), health=SLOW_HEALTH) as fleet:
        found = await calls(sdk_python, "openai_calls", fleet, tmp_path)
        assert found["chat"] == found["chat_stream"]
        assert found["chat_usage"] == 5
        assert found["text"]
        assert found["response"]
        assert found["response_usage"][1] == 5
        assert found["response_events"][0] == "response.created"
        assert found["response_events"].count("response.output_text.delta") >= 1
        assert found["response_events"][-1] == "response.completed"
        # The same prompt in the same template, and so the same simulated answer.
        assert found["response_final"] == found["chat"]
        assert found["embeddings"] == [16, 16]
        assert found["models"] == ["demo"]


async def test_errors_are_those_that_openais_library_knows(sdk_python: str, tmp_path: Path) -> None:
    async with site(TWO, api_keys=(KEY,), health=SLOW_HEALTH) as fleet:
        assert await calls(sdk_python, "openai_errors", fleet, tmp_path) == {
            "model": ["NotFoundError", 404, "model"],
            "kept": ["BadRequestError", 400, "previous_response_id"],
            "forced": ["BadRequestError", 400, "tool_choice"],
            "key": ["AuthenticationError", 401, None],
            "path": ["NotFoundError", 404, None],
        }


async def test_anthropic(sdk_python: str, tmp_path: Path) -> None:
    async with site(TWO, api_keys=(KEY,), health=SLOW_HEALTH) as fleet:
        found = await calls(sdk_python, "anthropic_calls", fleet, tmp_path)
        assert found["answer"]
        assert found["stop_reason"] == "max_tokens"
        assert found["plain"] == found["stream"]
        assert sum(found["usage"]) == found["count"]
        assert found["output_tokens"] == 5
        assert found["key"] == ["AuthenticationError", 401, "authentication_error"]
        assert found["model"] == ["NotFoundError", 404, "not_found_error"]


async def test_litellm(sdk_python: str, tmp_path: Path) -> None:
    async with site(TWO, api_keys=(KEY,), health=SLOW_HEALTH) as fleet:
        found = await calls(sdk_python, "litellm_calls", fleet, tmp_path)
        assert found["chat"] == found["stream"] == found["anthropic"]
        # litellm asks for OpenAI's minimum of output tokens, 16.
        assert found["response"].startswith(found["chat"])
        assert found["embedding"] == 16


@pytest.mark.parametrize("kind", ["chat", "responses"])
async def test_aiperf(sdk_python: str, tmp_path: Path, kind: str) -> None:
    """NVIDIA's load generator, with streams, on a fleet that hands over: every request succeeds."""
    async with site(PAIR, health=SLOW_HEALTH) as fleet:
        await run(
            sdk_python, "-m", "aiperf", "profile",
            "--model", "demo", "--tokenizer", str(DEMO_MODEL_DIR), "--url", fleet.frontend.url,
            "--endpoint-type", kind, "--streaming",
            "--request-count", "24", "--concurrency", "4", "--random-seed", "7",
            "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "8",
            "--ui", "none", "--artifact-dir", str(tmp_path / "out"),
            home=tmp_path,
        )  # fmt: skip
        (report,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
        found = json.loads(report.read_text())
        assert found["request_count"]["avg"] == 24
        assert found["time_to_first_token"]["p99"] > 0
        _, metrics = await fleet.get("/metrics")
        endpoint = "chat_completions" if kind == "chat" else "responses"
        assert f'endpoint="{endpoint}"'.encode() in metrics
        await fleet.idle()

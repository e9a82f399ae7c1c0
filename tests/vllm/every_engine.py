"""Scenarios of each kind of engine. A suite binds them to names of tests, in its order.

``joined``, ``stack``, ``engines``, ``frontend``: the fixtures of the suite's module.
"""

import asyncio
import json
import random
import shutil
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest

from dynctl.documents.trial import TrialReport
from dynctl.experiments.trial import TrialOptions, run_trial
from dynctl.findings.report import State
from tests.dynctl.experiments.faulty_proxy import RoundRobin, faulty_proxy
from tests.ports import free_port
from tests.vllm.conftest import Judge
from tests.vllm.joined import Joined
from tests.vllm.rates import ask_all
from tests.vllm.stack import BLOCK, Engine, Frontend, Stack
from tests.vllm.traffic import mixed, tool_conversation, words
from tests.waiting import patience, until_now

# -- behind a Dynamo frontend, through `dynctl serve attach` ---------------------------------------


def a_dynamo_frontend_serves_the_tokens_of_the_engine(joined: Joined) -> None:
    prompt = words(random.Random(1), 100)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    own = joined.engine.http.post("/v1/completions", json=body).json()
    answer = joined.ask(prompt, 24)
    assert answer.body["usage"]["completion_tokens"] == own["usage"]["completion_tokens"]
    assert answer.body["choices"][0]["text"] == own["choices"][0]["text"]
    assert answer.body["choices"][0]["finish_reason"] == own["choices"][0]["finish_reason"]
    streamed = joined.ask(prompt, 24, stream=True)
    texts = [chunk["choices"][0]["text"] or "" for chunk in streamed.chunks if chunk["choices"]]
    assert "".join(texts) == own["choices"][0]["text"]


def cached_prefixes_are_known_to_the_frontend_and_reused(joined: Joined) -> None:
    prompt = words(random.Random(2), 100)
    assert joined.hit_rate(prompt) < 0.2
    until_now(lambda: joined.hit_rate(prompt) > 0.5)
    details = joined.ask(prompt).body["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 4 * BLOCK


def a_killed_sidecar_comes_back_with_the_cache_of_the_engine(joined: Joined) -> None:
    prompt = words(random.Random(3), 100)
    joined.ask(prompt)
    until_now(lambda: joined.hit_rate(prompt) > 0.5)
    joined.sidecar.kill(signal.SIGKILL)
    joined.workers(0)
    joined.attach()
    joined.workers(1)
    # From the engine's replay socket, by the recovery endpoint: the engine has the blocks already
    # and does not publish them again. The frontend applies it a moment later.
    until_now(lambda: joined.hit_rate(prompt) > 0.5, 20)


def accepted_requests_end_whole_in_a_drain(joined: Joined) -> None:
    running = joined.fleet.frontend.begin(
        words(random.Random(4), 50), max_tokens=200, ignore_eos=True
    )
    running.wait_first()
    joined.sidecar.kill(signal.SIGTERM, wait=False)
    joined.workers(0)
    answer = running.result()
    assert answer.ok
    choices = [chunk["choices"][0] for chunk in answer.chunks if chunk.get("choices")]
    assert "length" in [choice.get("finish_reason") for choice in choices]
    assert joined.sidecar.popen.wait(patience(30)) == 0


# -- behind `dynctl serve frontend` ----------------------------------------------------------------


def cache_salts(frontend: Frontend, judged: Judge) -> None:
    """Equal prompts with different salts share nothing; ``nvext.cache_salt`` means the same."""
    chance = random.Random(4)
    bodies = []
    for body in mixed(40, seed=4):
        for salt in chance.sample([None, "tenant-1", "tenant-2"], 2):
            given: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
            if salt is not None and chance.random() < 0.3:
                given = {"nvext": given}
            bodies.append({**body, **given})
    judged("cache salts, in the body and in nvext", ask_all(frontend, bodies))


def small_requests_prove_the_fleet(
    frontend: Frontend,
    engines: dict[str, Engine],
    at_engine: Collection[str] = (),
    passed: Collection[str] = (),
) -> None:
    """`dynctl test` finds nothing wrong at the frontend, where it also passes ``passed``; at one
    engine with one cache it finds ``at_engine``."""
    engine = list(engines.values())[-1]
    urls: dict[str, set[str]] = {
        str(frontend.http.base_url): set(),
        str(engine.http.base_url): set(at_engine),
    }
    for url, known in urls.items():
        report = asyncio.run(tested(url))
        checks = {check.code: check for check in report.checks}
        assert wrong(report).keys() == known, (url, wrong(report))
        for code in ("DYE0202", "DYE0203", "DYE0303", "DYE0401", "DYE0404"):
            assert checks[code].state is State.PASS, (url, checks[code])
        for code in passed if engine.url != url.rstrip("/") else ():
            assert checks[code].state is State.PASS, (url, checks[code])


def tool_calls_without_content(frontend: Frontend, judged: Judge) -> None:
    """Assistant turns of tool calls have ``content: null``, which engines render as nothing."""
    bodies = [body for seed in range(8) for body in tool_conversation(seed)]
    judged("tools and content: null", ask_all(frontend, bodies))


def engines_tokenize_without_a_model_path(
    stack: Stack, engines: dict[str, Engine], judged: Judge
) -> None:
    frontend = stack.frontend(*(engine.spec() for engine in engines.values()), model_path=False)
    bodies = [*mixed(40, seed=5), *tool_conversation(5), *mixed(20, seed=5)]
    judged("no --model-path: POST /tokenize", ask_all(frontend, bodies))
    stack.stop(frontend)


def a_body_without_a_model(frontend: Frontend, judged: Judge) -> None:
    bodies = [{**body} for body in mixed(20, seed=6)]
    for body in bodies:
        del body["model"]
    judged("bodies without a model", ask_all(frontend, bodies))


def a_frontend_that_joins_late(
    stack: Stack, frontend: Frontend, engines: dict[str, Engine], judged: Judge
) -> None:
    """The engines have cached for minutes: their replay sockets have the events."""
    late = stack.frontend(*(engine.spec() for engine in engines.values()))
    until_now(lambda: late.cached_blocks() == frontend.cached_blocks(), 30)
    judged("late join through replay", ask_all(late, mixed(40)))
    stack.stop(late)


# -- `dynctl test` of real engines with a fault ----------------------------------------------------


async def tested(url: str, *groups: str) -> TrialReport:
    """Report of `dynctl test`; without ``groups`` of all of them."""
    wanted = TrialOptions(
        url, only=groups, timeout=patience(60), duration=patience(600), settle=patience(0.1)
    )
    return await run_trial(wanted)


def wrong(report: TrialReport) -> dict[str, str]:
    """Code of each check that warns or fails -> its findings."""
    return {
        check.code: " ".join(map(str, check.findings)) or check.message
        for check in report.checks
        if check.state in (State.WARN, State.FAIL)
    }


@dataclass(frozen=True)
class FaultyFrontend:
    """``start`` makes a frontend of engine ``b``; ``codes``: of all checks that must not pass."""

    name: str
    start: Callable[[Stack, Engine], Frontend]
    codes: Collection[str]


def _with_another_template(stack: Stack, engine: Engine) -> Frontend:
    """Its template begins each prompt with a sentence that is not in the engine's template."""
    models = stack.directory / "models"
    if not (models / "changed").exists():
        shutil.copytree(models / "llama", models / "changed")
        file = models / "changed" / "tokenizer_config.json"
        config = json.loads(file.read_text())
        config["chat_template"] = "Answer in English.\n" + config["chat_template"]
        file.write_text(json.dumps(config))
    return stack.frontend(engine.spec(), model="changed")


def _at_a_port_without_events(stack: Stack, engine: Engine) -> Frontend:
    unused = f"tcp://127.0.0.1:{free_port()}"
    return stack.frontend(engine.spec(kv_events=unused, replay="off"), index="disconnected")


def _with_another_block_size(stack: Stack, engine: Engine) -> Frontend:
    return stack.frontend(engine.spec(block_size=BLOCK // 2))


FAULTY_FRONTENDS = (
    FaultyFrontend("another template", _with_another_template, {"DYE0502"}),
    FaultyFrontend("no events", _at_a_port_without_events, {"DYE0502"}),
    # The engine reports its block size, and the frontend uses that one.
    FaultyFrontend("another block size", _with_another_block_size, ()),
)


@pytest.mark.parametrize("faulty", FAULTY_FRONTENDS, ids=lambda faulty: faulty.name)
def a_faulty_frontend_is_named(
    stack: Stack, engines: dict[str, Engine], faulty: FaultyFrontend
) -> None:
    frontend = faulty.start(stack, engines["b"])
    report = asyncio.run(tested(str(frontend.http.base_url), "names", "tokens", "reuse", "index"))
    stack.stop(frontend)
    assert wrong(report).keys() == set(faulty.codes), wrong(report)


def a_router_that_takes_turns_is_named(
    engines: dict[str, Engine], codes: Collection[str] = ("DYE0402",)
) -> None:
    """Both engines behind a proxy that does not look at prompts, and lists the models of ``a``."""

    async def test() -> TrialReport:
        async with faulty_proxy([engine.url for engine in engines.values()], RoundRobin()) as url:
            return await tested(url, "names", "tokens", "reuse", "index")

    report = asyncio.run(test())
    assert wrong(report).keys() == set(codes), wrong(report)

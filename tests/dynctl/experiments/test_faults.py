"""`dynctl test` on fleets with one fault each: it names each by its own codes and no others."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web

from dynctl.experiments.groups.all import GROUPS
from dynctl.findings.report import State
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.simulation.engine.config import EngineConfig, Faults
from dynctl.simulation.engine.process import RunningEngine, start_engine
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer
from router_core import RouterConfig
from tests.dynctl.experiments.faulty_proxy import (
    Body,
    Fault,
    RoundRobin,
    error,
    faulty_proxy,
    first_text,
)
from tests.dynctl.experiments.trials import ENGINE, result_of, wrong
from tests.dynctl.serving.fleets import QUICK_HEALTH, TOKENIZER, site
from tests.ports import free_port
from tests.waiting import until

SLOW = {"name": "e0", "speedup_ratio": 0.5}
ADAPTER = "sql"
TESTED_ELSEWHERE = ("topology", "load", "change", "restart")
"""Groups that need a fleet of their own: test_fleet_groups.py and test_restart.py."""


# -- proxies: models and names ---------------------------------------------------------------------


class NoModels(Fault):
    def models(self, document: Body) -> web.Response | None:
        return error(404, "Not Found")


class EmptyList(Fault):
    def models(self, document: Body) -> None:
        document["data"] = []


class AnotherProgram(Fault):
    def models(self, document: Body) -> web.Response:
        return web.Response(text="<html>It works!</html>", content_type="text/html")


class GhostName(Fault):
    def models(self, document: Body) -> None:
        document["data"].append({"id": "ghost", "object": "model"})


class HalfAName(Fault):
    """A name of which every second engine does not know."""

    def request(self, body: Body) -> web.Response | None:
        return error(404, "The model does not exist.") if next(self.number) % 2 else None


class SometimesBadGateway(Fault):
    def request(self, body: Body) -> web.Response | None:
        return error(502, "Bad Gateway") if next(self.number) % 3 == 2 else None


class ErrorAs200(Fault):
    def request(self, body: Body) -> web.Response | None:
        return web.json_response({"error": {"message": "out of memory"}})


class SometimesErrorAs200(Fault):
    def request(self, body: Body) -> web.Response | None:
        failed = {"object": "error", "message": "out of memory"}
        return web.json_response(failed) if next(self.number) % 3 == 2 else None


class NoChoices(Fault):
    def answer(self, document: Body) -> None:
        document["choices"] = []


# -- proxies: tokens -------------------------------------------------------------------------------


class NoUsage(Fault):
    def answer(self, document: Body) -> None:
        del document["usage"]


class SometimesNoUsage(Fault):
    def answer(self, document: Body) -> None:
        if next(self.number) % 2:
            document["usage"] = None


class UsageIsText(Fault):
    def answer(self, document: Body) -> None:
        document["usage"]["prompt_tokens"] = str(document["usage"]["prompt_tokens"])


class OtherTemplate(Fault):
    """Every third request goes to an engine whose template adds a text."""

    def request(self, body: Body) -> None:
        if next(self.number) % 3 == 0:
            first_text(body, lambda text: text + " Think about it step by step.")


class CountsThatGrow(Fault):
    """The count of all prompts so far."""

    def answer(self, document: Body) -> None:
        document["usage"]["prompt_tokens"] *= max(1, next(self.number))


class AddedText(Fault):
    def request(self, body: Body) -> None:
        first_text(body, lambda text: text + " Be brief.")


class SystemPrompt(Fault):
    def request(self, body: Body) -> None:
        body["messages"].insert(0, {"role": "system", "content": "You are a polite assistant."})


class CountsWords(Fault):
    def answer(self, document: Body) -> None:
        document["usage"]["prompt_tokens"] = 42


# -- proxies: streams ------------------------------------------------------------------------------


class Buffers(Fault):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        for line in [line async for line in lines]:
            yield line


class BuffersBlocks(Fault):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        block = b""
        async for line in lines:
            block += line
            if len(block) >= 8192:
                yield block
                block = b""
        yield block


class NoEnd(Fault):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if b"[DONE]" not in line:
                yield line


class SometimesNoEnd(NoEnd):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        ends = next(self.number) % 3
        async for line in lines:
            if ends or b"[DONE]" not in line:
                yield line


class CutsStreams(Fault):
    """A read timeout that is shorter than a long answer."""

    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        passed = 0
        async for line in lines:
            yield line
            passed += 1
            if passed == 20:
                raise ConnectionError


class ErrorInStream(Fault):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if b"[DONE]" in line:
                yield b'data: {"error": {"message": "out of memory"}}\n\n'
            yield line


class NeverStreams(Fault):
    def request(self, body: Body) -> None:
        body.pop("stream_options", None)
        body.pop("stream", None)


class NoStreamOptions(Fault):
    def request(self, body: Body) -> None:
        body.pop("stream_options", None)


class DropsUsageEvents(Fault):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if b'"prompt_tokens"' not in line:
                yield line


class KeepsStreams(Fault):
    reads_to_the_end = True


class Repeats(Fault):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            yield line
            if b'"content"' in line:
                yield b"\n" + line


class Reorders(Fault):
    """The fifth event comes last."""

    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        events, late = 0, b""
        async for line in lines:
            events += b'"choices"' in line
            if events == 5 and not late:
                late = line + b"\n"
            elif b"[DONE]" in line:
                yield late + line
            else:
                yield line


class MixesAnswers(Fault):
    """Every second event is that of another request."""

    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            other = b'"id":"' in line and next(self.number) % 2
            yield line.replace(b'"id":"', b'"id":"other-') if other else line


class GoesOnAfterTheEnd(Fault):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        last = b""
        async for line in lines:
            yield line
            if b"[DONE]" in line:
                yield b"\n" + last
            elif b'"content"' in line:
                last = line


# -- proxies: reuse --------------------------------------------------------------------------------


class NewIdInFront(Fault):
    def request(self, body: Body) -> None:
        first_text(body, lambda text: f"{uuid4()} {text}")


class NoCacheAsVllm(Fault):
    """Reuse of 0, which vLLM leaves out of the usage."""

    def request(self, body: Body) -> None:
        body["cache_salt"] = str(uuid4())

    def answer(self, document: Body) -> None:
        document["usage"]["prompt_tokens_details"] = None


class TimeInSystemPrompt(Fault):
    def request(self, body: Body) -> None:
        time = f"It is {next(self.number)} seconds past noon."
        body["messages"].insert(0, {"role": "system", "content": time})


class SometimesNewId(Fault):
    def request(self, body: Body) -> None:
        if len(body["messages"][0]["content"]) > 500 and next(self.number) % 4 == 1:
            first_text(body, lambda text: f"{uuid4()} {text}")


class OneBlockCached(Fault):
    def answer(self, document: Body) -> None:
        document["usage"]["prompt_tokens_details"] = {"cached_tokens": 16}


class AllCached(Fault):
    def answer(self, document: Body) -> None:
        usage = document["usage"]
        usage["prompt_tokens_details"] = {"cached_tokens": usage["prompt_tokens"] - 1}


class MoreThanAllCached(Fault):
    def answer(self, document: Body) -> None:
        usage = document["usage"]
        usage["prompt_tokens_details"] = {"cached_tokens": 2 * usage["prompt_tokens"]}


class SendsTwice(Fault):
    """A proxy that sends each request again, though the first answer came."""

    sends = 2


class CutsHistory(Fault):
    def request(self, body: Body) -> None:
        del body["messages"][:-1]


class SummarizesHistory(Fault):
    def request(self, body: Body) -> None:
        earlier = body["messages"][:-1]
        if earlier:
            summary = f"Summary of {len(earlier)} messages."
            body["messages"][:-1] = [{"role": "user", "content": summary}]


class KeepsTheEndAlone(Fault):
    """An engine with a sliding window that has dropped the blocks before the window: a prompt can
    only be continued where it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: set[str] = set()
        self.goes_on = False

    def request(self, body: Body) -> None:
        first = body["messages"][0]["content"]
        self.goes_on = first in self.ended
        self.ended.add(first)

    def answer(self, document: Body) -> None:
        if not self.goes_on:
            document["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}


class KeepsWherePromptsPart(KeepsTheEndAlone):
    """As vLLM: where two prompts part, the window is kept too, so that the third one is reused."""

    def __init__(self) -> None:
        super().__init__()
        self.parted: set[str] = set()

    def request(self, body: Body) -> None:
        first = body["messages"][0]["content"]
        others = self.ended - {first}
        beginnings = {text for text in others if first.startswith(text.split("\n")[0])}
        super().request(body)
        self.goes_on = self.goes_on or bool(beginnings & self.parted)
        self.parted |= beginnings


async def not_found(_: web.Request) -> web.Response:
    return error(404, "not found")


class WithoutGauges(RoundRobin):
    """One whose address has no metrics."""

    routes = (web.get("/metrics", not_found),)


class ByPrompt(Fault):
    """A router that sends equal prompts to equal servers, and each new one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, int] = {}

    def place(self, body: Body, servers: int) -> int:
        first = body["messages"][0]["content"]
        return self.places.setdefault(first, len(self.places) % servers)


class ByWholePrompts(Fault):
    """A router that hashes whole prompts: those that begin as another one are sent to others of
    its three servers."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[str] = set()

    def place(self, body: Body, servers: int) -> int:
        words = body["messages"][0]["content"].split("\n")[0]
        begins = any(words.startswith(text) and words != text for text in self.known)
        self.known |= set() if begins else {words}
        return 1 + next(self.number) % 2 if begins else 0


# -- proxies: isolation and limits -----------------------------------------------------------------


class NoSalt(Fault):
    def request(self, body: Body) -> None:
        body.pop("cache_salt", None)


class OneSalt(Fault):
    def request(self, body: Body) -> None:
        body["cache_salt"] = "all tenants"


class OtherSalt(Fault):
    def request(self, body: Body) -> None:
        if "cache_salt" in body:
            body["cache_salt"] = str(uuid4())


class NewSalt(Fault):
    """What an engine without a prefix cache looks like."""

    def request(self, body: Body) -> None:
        body["cache_salt"] = str(uuid4())


class AdapterIsBase(Fault):
    def request(self, body: Body) -> None:
        body["model"] = "demo"


class AnyModel(Fault):
    def request(self, body: Body) -> None:
        body["model"] = "demo"


class UnknownModelFails(Fault):
    def request(self, body: Body) -> web.Response | None:
        return None if body["model"] == "demo" else error(500, "no such upstream")


class BadJsonIsOurs(Fault):
    def unreadable(self, data: bytes) -> web.Response:
        return error(500, "Internal Server Error")


class BadJsonIsFine(Fault):
    def unreadable(self, data: bytes) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "What?"}}]})


class CutsPrompts(Fault):
    def request(self, body: Body) -> None:
        first_text(body, lambda text: text[:2000])


class LongPromptsFail(Fault):
    def request(self, body: Body) -> web.Response | None:
        long = len(body["messages"][0]["content"]) > 5000
        return error(500, "Internal Server Error") if long else None


class Dies(Fault):
    """An engine that does not answer any more after one bad request."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = False

    def request(self, body: Body) -> web.Response | None:
        return error(503, "no worker is ready") if self.dead else None


class DiesOfBadJson(Dies):
    def unreadable(self, data: bytes) -> None:
        self.dead = True


class DiesOfUnknownModel(Dies):
    def request(self, body: Body) -> web.Response | None:
        refused = super().request(body)
        self.dead = body["model"] != "demo"
        return refused


class DiesOfLongPrompts(Dies):
    def request(self, body: Body) -> web.Response | None:
        refused = super().request(body)
        self.dead = len(body["messages"][0]["content"]) > 5000
        return refused


class WrongKeyFails(Fault):
    """The check of keys is broken: only the right key passes, and another one is an error."""

    keys: tuple[str, ...] = ("Bearer right",)

    def authorize(self, authorization: str) -> web.Response | None:
        return None if authorization in self.keys else error(500, "key service failed")


# -- fleets with a fault of their own --------------------------------------------------------------

Fleet = Callable[[Path], AbstractAsyncContextManager[str]]


def proxied(fault: type[Fault], **engine: Any) -> Fleet:
    """The fault between the client and the frontend of one engine."""

    @asynccontextmanager
    async def fleet(_: Path) -> AsyncIterator[str]:
        async with (
            site([{**ENGINE, **engine}]) as running,
            faulty_proxy(running.frontend.url, fault()) as url,
        ):
            yield url

    return fleet


def direct(**engine: Any) -> Fleet:
    """The fault is one of the engine."""

    @asynccontextmanager
    async def fleet(_: Path) -> AsyncIterator[str]:
        async with site([{**ENGINE, **engine}]) as running:
            yield running.frontend.url

    return fleet


@asynccontextmanager
async def engines_alone(*settings: dict[str, Any]) -> AsyncIterator[list[RunningEngine]]:
    """Engines without a frontend. ``tokenizer``: another one."""
    async with AsyncExitStack() as stack:
        started = []
        for number, given in enumerate(settings):
            tokenizer = given.pop("tokenizer", TOKENIZER)
            config = EngineConfig(**{**ENGINE, "name": f"e{number}", **given})
            engine = await start_engine(config, tokenizer)
            stack.push_async_callback(engine.close)
            started.append(engine)
        yield started


def balanced(fault: type[Fault], *settings: dict[str, Any]) -> Fleet:
    """A router of others before engines: ``fault`` is its choice."""

    @asynccontextmanager
    async def fleet(_: Path) -> AsyncIterator[str]:
        async with (
            engines_alone(*(dict(given) for given in settings)) as engines,
            faulty_proxy([engine.url for engine in engines], fault()) as url,
        ):
            yield url

    return fleet


@asynccontextmanager
async def one_engine_without_a_cache(_: Path) -> AsyncIterator[str]:
    async with engines_alone({}, {}) as (first, second), AsyncExitStack() as stack:
        without = await stack.enter_async_context(faulty_proxy(second.url, NewSalt()))
        yield await stack.enter_async_context(faulty_proxy([first.url, without], ByPrompt()))


@asynccontextmanager
async def one_engine_with_another_tokenizer(directory: Path) -> AsyncIterator[str]:
    shutil.copytree(DEMO_MODEL_DIR, directory / "model")
    file = directory / "model" / "tokenizer.json"
    document = json.loads(file.read_text())
    del document["model"]["merges"][400:]
    file.write_text(json.dumps(document))
    other = {"tokenizer": load_tokenizer(directory / "model")}
    async with balanced(RoundRobin, {}, other)(directory) as url:
        yield url


@asynccontextmanager
async def router_with_another_template(directory: Path) -> AsyncIterator[str]:
    shutil.copytree(DEMO_MODEL_DIR, directory / "model")
    file = directory / "model" / "chat_template.jinja"
    file.write_text("Answer in English.\n" + file.read_text())
    async with site([ENGINE], model_path=directory / "model") as running:
        yield running.frontend.url


@asynccontextmanager
async def events_of_another_engine(_: Path) -> AsyncIterator[str]:
    ports = free_port(), free_port()
    engines = [
        {**ENGINE, "name": f"e{number}", "kv_events": f"tcp://127.0.0.1:{port}"}
        for number, port in enumerate(ports)
    ]
    specs = {
        f"e{number}": f",kv-events=tcp://127.0.0.1:{port},replay=off"
        for number, port in enumerate(reversed(ports))
    }
    async with site(engines, specs=specs) as running:
        yield running.frontend.url


@asynccontextmanager
async def frontend_before(url: str, **settings: Any) -> AsyncIterator[str]:
    """A frontend whose only worker is at ``url``."""
    spec = f"{url},name=e0{settings.pop('spec', '')}"
    values = {"port": 0, "model_path": DEMO_MODEL_DIR, "health": QUICK_HEALTH, **settings}
    frontend = build_frontend(FrontendConfig(workers=(spec,), **values))
    await frontend.start()
    try:
        await until(lambda: all(member.worker for member in frontend.fleet))
        yield frontend.url
    finally:
        await frontend.close()


@asynccontextmanager
async def engine_that_gets_other_prompts(_: Path) -> AsyncIterator[str]:
    """The router estimates caches from what it sent."""
    async with engines_alone({}) as (engine,), faulty_proxy(engine.url, NewIdInFront()) as url:
        estimating = RouterConfig(use_kv_events=False)
        async with frontend_before(url, spec=",kv-events=off", router=estimating) as frontend:
            yield frontend


@asynccontextmanager
async def engine_that_forgets_silently(_: Path) -> AsyncIterator[str]:
    """It loses its cache, without an event, once the prompts of the index were sent."""
    async with engines_alone({}) as (engine,):

        class Forgets(Fault):
            def request(self, body: Body) -> None:
                if next(self.number) == 1 + 8:  # a greeting, and each prompt for the first time
                    for rank in engine.engine.ranks:
                        rank.scheduler.forget()

        async with faulty_proxy(engine.url, Forgets()) as url, frontend_before(url) as frontend:
            yield frontend


# -- the faults and their codes --------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    fleet: Fleet
    group: str
    codes: set[str]
    options: dict[str, Any] = field(default_factory=dict)


def proxies(group: str, code: str, *faults: type[Fault], **engine: Any) -> list[Case]:
    return [Case(fault.__name__, proxied(fault, **engine), group, {code}) for fault in faults]


ALIAS = {"lora": ("alias",)}
CASES: Sequence[Case] = (
    *proxies("names", "DYE0101", NoModels, EmptyList, AnotherProgram),
    *proxies("names", "DYE0102", GhostName, ErrorAs200, NoChoices),
    *proxies("names", "DYE0103", HalfAName, SometimesBadGateway, SometimesErrorAs200),
    Case("a name of one engine", balanced(RoundRobin, ALIAS, {}), "names", {"DYE0103"}),
    *proxies("tokens", "DYE0201", NoUsage, SometimesNoUsage, UsageIsText),
    *proxies("tokens", "DYE0202", OtherTemplate),
    Case("CountsThatGrow", proxied(CountsThatGrow), "tokens", {"DYE0202"}),
    Case("another tokenizer", one_engine_with_another_tokenizer, "tokens", {"DYE0202"}),
    *proxies("tokens", "DYE0203", AddedText, SystemPrompt, CountsWords),
    *proxies("streams", "DYE0301", Buffers, BuffersBlocks, speedup_ratio=1.0),
    *proxies("streams", "DYE0302", NoEnd, SometimesNoEnd, CutsStreams, ErrorInStream, NeverStreams),
    *proxies("streams", "DYE0303", NoStreamOptions, DropsUsageEvents),
    *proxies("streams", "DYE0304", KeepsStreams, speedup_ratio=0.5),
    *proxies("streams", "DYE0305", Repeats, Reorders, MixesAnswers, GoesOnAfterTheEnd),
    *proxies("reuse", "DYE0401", NewIdInFront, TimeInSystemPrompt, OneBlockCached, NewSalt),
    Case("a vLLM without a cache", balanced(NoCacheAsVllm, {}), "reuse", {"DYE0401"}),
    Case("three blindly", balanced(RoundRobin, {}, {}, {}), "reuse", {"DYE0401"}),
    *proxies("reuse", "DYE0402", SometimesNewId),
    Case("two blindly", balanced(RoundRobin, {}, {}), "reuse", {"DYE0402"}),
    Case("one engine without a cache", one_engine_without_a_cache, "reuse", {"DYE0402"}),
    *proxies("reuse", "DYE0403", AllCached, MoreThanAllCached, SendsTwice),
    *proxies("reuse", "DYE0404", CutsHistory, SummarizesHistory),
    *proxies("reuse", "DYE0405", KeepsTheEndAlone),
    Case("by whole prompts", balanced(ByWholePrompts, {}, {}, {}), "reuse", {"DYE0405"}),
    Case("other prompts", engine_that_gets_other_prompts, "index", {"DYE0501"}),
    Case("a cache that is lost", engine_that_forgets_silently, "index", {"DYE0501"}),
    Case("events of another engine", events_of_another_engine, "index", {"DYE0501"}),
    Case("no events", direct(faults=Faults(stop_publishing=True)), "index", {"DYE0502"}),
    Case("lost", direct(replay="", faults=Faults(drop_events=8)), "index", {"DYE0502"}),
    Case("another template", router_with_another_template, "index", {"DYE0502"}),
    *proxies("isolation", "DYE0601", NoSalt, OneSalt),
    *proxies("isolation", "DYE0602", OtherSalt),
    *proxies("isolation", "DYE0603", AdapterIsBase, lora=(ADAPTER,)),
    *proxies("limits", "DYE0901", AnyModel, UnknownModelFails),
    *proxies("limits", "DYE0902", BadJsonIsOurs, BadJsonIsFine),
    *proxies("limits", "DYE0903", CutsPrompts, LongPromptsFail),
    Case("any key", direct(), "limits", {"DYE0904"}, {"key": "right"}),
    Case("WrongKeyFails", proxied(WrongKeyFails), "limits", {"DYE0904"}, {"key": "right"}),
    *proxies("limits", "DYE0905", DiesOfBadJson, DiesOfUnknownModel, DiesOfLongPrompts),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_fault_is_named_by_its_codes_alone(case: Case, tmp_path: Path):
    async with case.fleet(tmp_path) as url:
        report = await result_of(url, only=(case.group,), model="demo", **case.options)
    assert wrong(report) == case.codes, report.checks


async def test_misses_are_a_doubt_where_nothing_shows_the_load_of_others(tmp_path: Path):
    """The same router is a fault (above) where gauges show that no other request runs."""
    async with balanced(WithoutGauges, {}, {})(tmp_path) as url:
        report = await result_of(url, only=("reuse",), model="demo")
    check = next(check for check in report.checks if check.code == "DYE0402")
    assert (check.state, wrong(report)) == (State.SKIP, set())
    assert "nothing shows whether other requests run" in check.message


async def test_a_router_without_a_tokenizer_has_no_expectation_to_judge():
    """Its count of cached blocks is unknown: 0 tokens are neither too few nor enough."""

    async def not_found(_: web.Request) -> web.Response:
        return error(404, "Not Found")

    class NoTokenizer(Fault):
        routes = (web.post("/tokenize", not_found),)

    async with (
        engines_alone({}) as (engine,),
        faulty_proxy(engine.url, NoTokenizer()) as url,
        frontend_before(url, model_path=None) as frontend,
    ):
        report = await result_of(frontend, only=("index",), model="demo")
    for check in report.checks:
        assert check.state is State.SKIP
        assert "cache overlap not modelled: no tokenizer" in check.message


async def test_a_beginning_that_is_reused_from_the_third_prompt_on_is_no_fault(tmp_path: Path):
    async with proxied(KeepsWherePromptsPart)(tmp_path) as url:
        report = await result_of(url, only=("reuse",), model="demo")
    check = next(check for check in report.checks if check.code == "DYE0405")
    assert (check.state, wrong(report)) == (State.PASS, set())
    assert "only from the third prompt on" in check.message


def test_every_check_has_a_fault_here_and_the_kinds_are_many():
    groups = [group for group in GROUPS if group.word not in TESTED_ELSEWHERE]
    checks = {check.code for group in groups for check in group.checks}
    assert checks == {code for case in CASES for code in case.codes}
    assert len({case.name for case in CASES}) == len(CASES) >= 60

"""`dynctl test` on healthy fleets, and on fleets with one fault each, which it names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web

from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.documents.trial import TrialReport
from dynctl.experiments.groups.all import GROUPS
from dynctl.experiments.prompts import Prompts
from dynctl.experiments.trial import TrialOptions, announcement, run_trial
from dynctl.findings.catalogue import catalogue
from dynctl.findings.report import State
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.simulation.engine.config import Faults
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import RouterConfig
from tests.dynctl.experiments.faulty_proxy import Body, Fault, error, faulty_proxy, first_text
from tests.dynctl.serving.fleets import QUICK_HEALTH, site
from tests.ports import free_port
from tests.waiting import patience, until

ENGINE = {"name": "e0", "speedup_ratio": 2.0, "max_model_len": 2048}
SLOW = {"name": "e0", "speedup_ratio": 0.5}


async def result_of(url: str, **options: Any) -> TrialReport:
    options = {"timeout": patience(30), "duration": 600, "settle": patience(0.1), **options}
    return await run_trial(TrialOptions(url, **options))


def wrong(report: TrialReport) -> set[str]:
    return {check.code for check in report.checks if check.state in (State.WARN, State.FAIL)}


def states(report: TrialReport) -> dict[str, State]:
    return {check.code: check.state for check in report.checks}


# -- faults ----------------------------------------------------------------------------------------


class NoModels(Fault):
    def models(self, document: Body) -> web.Response | None:
        return error(404, "Not Found")


class GhostName(Fault):
    def models(self, document: Body) -> None:
        document["data"].append({"id": "ghost", "object": "model"})


class HalfAName(Fault):
    """A name of which every second engine does not know."""

    def request(self, body: Body) -> web.Response | None:
        return error(404, "The model does not exist.") if next(self.number) % 2 else None


class NoUsage(Fault):
    def answer(self, document: Body) -> None:
        del document["usage"]


class OtherTemplate(Fault):
    """Every third request goes to an engine whose template adds a text."""

    def request(self, body: Body) -> None:
        if next(self.number) % 3 == 0:
            first_text(body, lambda text: text + " Think about it step by step.")


class AddedText(Fault):
    def request(self, body: Body) -> None:
        first_text(body, lambda text: text + " Be brief.")


class Buffers(Fault):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        for line in [line async for line in lines]:
            yield line


class NoEnd(Fault):
    async def events(self, lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if b"[DONE]" not in line:
                yield line


class NoStreamOptions(Fault):
    def request(self, body: Body) -> None:
        body.pop("stream_options", None)


class KeepsStreams(Fault):
    reads_to_the_end = True


class NewIdInFront(Fault):
    def request(self, body: Body) -> None:
        first_text(body, lambda text: f"{uuid4()} {text}")


class SometimesNewId(Fault):
    def request(self, body: Body) -> None:
        if len(body["messages"][0]["content"]) > 500 and next(self.number) % 4 == 1:
            first_text(body, lambda text: f"{uuid4()} {text}")


class AllCached(Fault):
    def answer(self, document: Body) -> None:
        usage = document["usage"]
        usage["prompt_tokens_details"] = {"cached_tokens": usage["prompt_tokens"] - 1}


class CutsHistory(Fault):
    def request(self, body: Body) -> None:
        del body["messages"][:-1]


class NoSalt(Fault):
    def request(self, body: Body) -> None:
        body.pop("cache_salt", None)


class OtherSalt(Fault):
    def request(self, body: Body) -> None:
        if "cache_salt" in body:
            body["cache_salt"] = str(uuid4())


class AnyModel(Fault):
    def request(self, body: Body) -> None:
        body["model"] = "demo"


class LikeSglang(AnyModel):
    """The engine that is known to ignore the name, and says who it is."""

    def models(self, document: Body) -> None:
        for row in document["data"]:
            row["owned_by"] = "sglang"


class BadJsonIsOurs(Fault):
    def unreadable(self, data: bytes) -> web.Response:
        return error(500, "Internal Server Error")


class CutsPrompts(Fault):
    def request(self, body: Body) -> None:
        first_text(body, lambda text: text[:2000])


class DiesOfBadJson(Fault):
    def __init__(self) -> None:
        super().__init__()
        self.dead = False

    def unreadable(self, data: bytes) -> None:
        self.dead = True

    def request(self, body: Body) -> web.Response | None:
        return error(503, "no worker is ready") if self.dead else None


FAULTS: list[tuple[type[Fault], str, set[str]]] = [
    (NoModels, "names", {"DYE0101"}),
    (GhostName, "names", {"DYE0102"}),
    (HalfAName, "names", {"DYE0103"}),
    (NoUsage, "tokens", {"DYE0201"}),
    (OtherTemplate, "tokens", {"DYE0202"}),
    (AddedText, "tokens", {"DYE0203"}),
    (Buffers, "streams", {"DYE0301"}),
    (NoEnd, "streams", {"DYE0302"}),
    (NoStreamOptions, "streams", {"DYE0303"}),
    (NewIdInFront, "reuse", {"DYE0401"}),
    (SometimesNewId, "reuse", {"DYE0402"}),
    (AllCached, "reuse", {"DYE0403"}),
    (CutsHistory, "reuse", {"DYE0404"}),
    (NoSalt, "isolation", {"DYE0601"}),
    (OtherSalt, "isolation", {"DYE0602"}),
    (AnyModel, "limits", {"DYE0901"}),
    (BadJsonIsOurs, "limits", {"DYE0902"}),
    (CutsPrompts, "limits", {"DYE0903"}),
    (DiesOfBadJson, "limits", {"DYE0905"}),
]


@pytest.mark.parametrize(
    ("fault", "group", "codes"), FAULTS, ids=lambda v: getattr(v, "__name__", "")
)
async def test_a_fault_is_named_by_its_code_alone(fault: type[Fault], group: str, codes: set[str]):
    async with (
        site([ENGINE]) as fleet,
        faulty_proxy(fleet.frontend.url, fault()) as url,
    ):
        report = await result_of(url, only=(group,), model="demo")
    assert wrong(report) == codes


async def test_a_proxy_without_a_fault_is_not_blamed():
    async with site([ENGINE]) as fleet, faulty_proxy(fleet.frontend.url, Fault()) as url:
        report = await result_of(url)
    assert wrong(report) == set()
    assert states(report)["DYE0401"] is State.PASS


async def test_an_engine_that_ignores_names_by_design_is_no_fault():
    async with site([ENGINE]) as fleet, faulty_proxy(fleet.frontend.url, LikeSglang()) as url:
        report = await result_of(url, only=("limits",), model="demo")
    assert wrong(report) == set()
    assert states(report)["DYE0901"] is State.SKIP


async def test_a_proxy_that_reads_to_the_end_keeps_the_engine():
    async with site([SLOW]) as fleet, faulty_proxy(fleet.frontend.url, KeepsStreams()) as url:
        report = await result_of(url, only=("streams",))
    assert wrong(report) == {"DYE0304"}


async def test_a_proxy_that_ends_with_its_client_frees_the_engine():
    async with site([SLOW]) as fleet, faulty_proxy(fleet.frontend.url, Fault()) as url:
        report = await result_of(url, only=("streams",))
    assert states(report)["DYE0304"] is State.PASS


async def test_a_server_that_accepts_any_key_is_found():
    async with site([ENGINE]) as fleet:
        report = await result_of(fleet.frontend.url, only=("limits",), key="right")
    assert wrong(report) == {"DYE0904"}


async def test_an_engine_that_is_believed_to_have_what_it_lost():
    """The router estimates caches from what it sent, and the engine gets other prompts."""
    async with (
        site([ENGINE]) as fleet,
        faulty_proxy(fleet.engines["e0"].url, NewIdInFront()) as url,
    ):
        estimating = FrontendConfig(
            port=0,
            workers=(f"{url},name=e0,kv-events=off",),
            model_path=DEMO_MODEL_DIR,
            router=RouterConfig(use_kv_events=False),
            health=QUICK_HEALTH,
        )
        frontend = build_frontend(estimating)
        await frontend.start()
        try:
            await until(lambda: all(member.worker for member in frontend.fleet))
            report = await result_of(frontend.url, only=("index",), model="demo")
        finally:
            await frontend.close()
    assert wrong(report) == {"DYE0501"}


async def test_a_router_that_does_not_get_the_events_of_an_engine():
    silent = {**ENGINE, "faults": Faults(stop_publishing=True)}
    async with site([silent]) as fleet:
        report = await result_of(fleet.frontend.url, only=("index",))
    assert wrong(report) == {"DYE0502"}


# -- healthy fleets --------------------------------------------------------------------------------


async def test_a_fleet_passes_and_its_workers_are_counted():
    engines = [{**ENGINE, "name": f"e{number}"} for number in range(3)]
    async with site(engines) as fleet:
        report = await result_of(fleet.frontend.url, model_path=DEMO_MODEL_DIR)
    assert wrong(report) == set()
    checks = {check.code: check for check in report.checks}
    for code in ("DYE0202", "DYE0401", "DYE0402", "DYE0404", "DYE0501", "DYE0502", "DYE0601"):
        assert checks[code].state is State.PASS, checks[code]
    assert re.search(r"by [123] workers", checks["DYE0402"].message)


async def test_an_engine_alone_passes():
    async with site([ENGINE]) as fleet:
        report = await result_of(fleet.engines["e0"].url)
    assert wrong(report) == set()
    assert states(report)["DYE0401"] is State.PASS


async def test_a_router_that_knows_no_caches_is_not_called_broken():
    engines = [{**ENGINE, "name": f"e{number}"} for number in range(2)]
    async with site(engines, router=RouterConfig(router_mode="round-robin")) as fleet:
        report = await result_of(fleet.frontend.url, only=("reuse",))
    assert wrong(report) <= {"DYE0402"}


async def test_prefill_and_decode_workers_are_not_blamed_for_a_count_of_the_decode_worker():
    engines = [
        {"name": "p0", "role": "prefill"},
        {"name": "d0", "role": "decode"},
        {"name": "d1", "role": "decode"},
    ]
    async with site(engines) as fleet:
        report = await result_of(fleet.frontend.url, only=("reuse", "isolation"))
    assert wrong(report) == set()


# -- bounds and errors -----------------------------------------------------------------------------


async def test_a_test_ends_at_its_budget_and_says_so():
    async with site([ENGINE]) as fleet:
        report = await result_of(fleet.frontend.url, requests=10)
    assert report.spent.requests == 10
    last = next(check for check in report.checks if check.code == "DYE0905")
    assert last.state is State.SKIP
    assert last.message == "the budget of 10 requests is spent; raise --budget"
    assert not report.passes("warn")


async def test_what_is_announced_is_not_exceeded():
    async with site([ENGINE]) as fleet:
        wanted = TrialOptions(fleet.frontend.url, timeout=patience(30), duration=600)
        report = await run_trial(wanted)
    promised = [int(number) for number in re.findall(r"\d+", announcement(wanted).replace(",", ""))]
    assert report.spent.requests <= promised[0]
    assert report.spent.generated_tokens <= promised[1]


async def test_a_server_that_does_not_answer():
    with pytest.raises(Unreachable, match="does not answer"):
        await result_of(f"http://127.0.0.1:{free_port()}")


async def test_a_key_that_is_missing_is_named():
    class Locked(Fault):
        def models(self, document: Body) -> web.Response:
            return error(401, "no key")

    async with site([ENGINE]) as fleet, faulty_proxy(fleet.frontend.url, Locked()) as url:
        with pytest.raises(DynctlError) as caught:
            await result_of(url)
    assert "401 no key" in caught.value.message
    assert "--api-key-env" in (caught.value.hint or "")


async def test_an_unknown_group_is_a_usage_problem():
    with pytest.raises(UsageProblem, match="unknown group"):
        await result_of("http://127.0.0.1:9", only=("everything",))


async def test_a_hanging_server_is_bounded():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client goes
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        with pytest.raises(Unreachable, match="no response within"):
            await run_trial(TrialOptions(f"http://127.0.0.1:{port}", timeout=0.2))
    finally:
        server.close()
        await server.wait_closed()


def test_texts_are_new_and_equal_in_length():
    prompts, again = Prompts(7), Prompts(7)
    assert prompts.fresh(20) == again.fresh(20)
    assert prompts.fresh(20) != prompts.fresh(20)
    texts = prompts.reordered(20, 3)
    assert len(set(texts)) == 3
    assert len({tuple(sorted(text.split())) for text in texts}) == 1


def test_every_code_of_the_family_has_a_check_and_a_fault_here():
    checks = {check.code for group in GROUPS for check in group.checks}
    assert checks == {code for code in catalogue() if code.startswith("DYE")}
    named = {code for _, _, codes in FAULTS for code in codes} | {
        "DYE0304",
        "DYE0501",
        "DYE0502",
        "DYE0904",
        # Those of test_fleet_groups.py:
        *("DYE0701", "DYE0702", "DYE0801", "DYE0802"),
        *("DYE1001", "DYE1002", "DYE1003", "DYE1004", "DYE1005"),
    }
    assert named == checks

"""`dynctl test` on healthy fleets, its bounds and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest
from aiohttp import web

from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.experiments.prompts import Prompts
from dynctl.experiments.trial import TrialOptions, announcement, run_trial, run_until_passed
from dynctl.findings.report import State
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import RouterConfig
from tests.dynctl.experiments.faulty_proxy import Body, Fault, error, faulty_proxy
from tests.dynctl.experiments.trials import ENGINE, result_of, states, wrong
from tests.dynctl.serving.fleets import site
from tests.ports import free_port
from tests.waiting import patience

# -- healthy fleets --------------------------------------------------------------------------------


async def test_a_proxy_without_a_fault_is_not_blamed():
    async with site([ENGINE]) as fleet, faulty_proxy(fleet.frontend.url, Fault()) as url:
        report = await result_of(url)
    assert wrong(report) == set()
    assert states(report)["DYE0401"] is State.PASS


async def test_an_engine_that_ignores_names_by_design_is_no_fault():
    class LikeSglang(Fault):
        def request(self, body: Body) -> None:
            body["model"] = "demo"

        def models(self, document: Body) -> None:
            for row in document["data"]:
                row["owned_by"] = "sglang"

    async with site([ENGINE]) as fleet, faulty_proxy(fleet.frontend.url, LikeSglang()) as url:
        report = await result_of(url, only=("limits",), model="demo")
    assert wrong(report) == set()
    assert states(report)["DYE0901"] is State.SKIP


async def test_a_fleet_passes_and_its_workers_are_counted():
    engines = [{**ENGINE, "name": f"e{number}"} for number in range(3)]
    async with site(engines) as fleet:
        report = await result_of(fleet.frontend.url, model_path=DEMO_MODEL_DIR)
    assert wrong(report) == set()
    checks = {check.code: check for check in report.checks}
    for code in (
        "DYE0202",
        "DYE0401",
        "DYE0402",
        "DYE0404",
        "DYE0405",
        "DYE0501",
        "DYE0502",
        "DYE0601",
    ):
        assert checks[code].state is State.PASS, checks[code]
    assert re.search(r"by (1 worker|[23] workers)$", checks["DYE0402"].message)


async def test_a_refused_token_is_named_and_counts_as_unread():
    """Without a token the operator's facts are no part of the test, and their absence is none."""

    async def refuse(_: web.Request) -> web.Response:
        return error(401, "wrong token")

    class RefusesTokens(Fault):
        routes = (web.get("/v1/workers", refuse), web.get("/v1/decisions/{name}", refuse))

    groups = ("index", "topology", "load", "change")
    async with site([ENGINE]) as fleet, faulty_proxy(fleet.frontend.url, RefusesTokens()) as url:
        wrong_token = await result_of(url, only=groups, token="wrong", changes=True)
        no_token = await result_of(url, only=groups, changes=True)
    for code in ("DYE0501", "DYE0701", "DYE0802", "DYE0803", "DYE1001"):
        refused = next(check for check in wrong_token.checks if check.code == code)
        assert "the server refuses the token of --token-file" in refused.message, code
        assert refused.unread, code
        without = next(check for check in no_token.checks if check.code == code)
        assert "to its operator (--token-file)" in without.message, code
        assert not without.unread, code
    assert not wrong_token.passes("skip")


async def test_a_model_that_is_not_listed_does_not_count_as_listed():
    async with site([ENGINE]) as fleet:
        report = await result_of(fleet.frontend.url, only=("names",), model="unlisted")
    checks = {check.code: check for check in report.checks}
    assert (wrong(report), checks["DYE0101"].message) == ({"DYE0102"}, "1 listed")


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
    assert last.message == (
        "the budget of 10 requests is spent, limits may take 8 requests; raise --budget"
    )
    assert not report.passes("warn")


async def test_what_is_announced_is_not_exceeded():
    async with site([ENGINE]) as fleet:
        wanted = TrialOptions(fleet.frontend.url, timeout=patience(30), duration=600)
        report = await run_trial(wanted)
    promised = [int(number) for number in re.findall(r"\d+", announcement(wanted).replace(",", ""))]
    assert report.spent.requests <= promised[0]
    assert report.spent.generated_tokens <= promised[1]


async def test_a_test_is_repeated_until_it_passes(monkeypatch: pytest.MonkeyPatch):
    """A server that starts lists no model, then one that it does not serve yet."""

    class Starts(Fault):
        lists = 0

        def models(self, document: Body) -> web.Response | None:
            self.lists += 1
            if self.lists == 1:
                return error(503, "starting")
            if self.lists == 2:
                document["data"].clear()
            if self.lists == 3:
                document["data"].append({"id": "soon", "object": "model"})
            return None

    monkeypatch.setattr("dynctl.experiments.trial._AGAIN_S", 0.01)
    said: list[str] = []
    starts = Starts()
    async with site([ENGINE]) as fleet, faulty_proxy(fleet.frontend.url, starts) as url:
        wanted = TrialOptions(url, only=("names",), timeout=patience(30), wait=patience(60))
        report = await run_until_passed(wanted, lambda report: report.passes("fail"), said.append)
        assert (wrong(report), starts.lists) == (set(), 4)
        starts.lists = 2
        report = await run_until_passed(TrialOptions(url, only=("names",)), lambda _: False)
        assert (wrong(report), starts.lists) == ({"DYE0102"}, 3)
    assert said.count("waiting for the server") == 3


async def test_a_server_that_does_not_answer():
    with pytest.raises(Unreachable, match="does not answer") as caught:
        await result_of(f"http://127.0.0.1:{free_port()}")
    assert caught.value.hint == "check the address and the port"


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
        with contextlib.closing(writer):
            await reader.read()  # until the client goes, or the test ends

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

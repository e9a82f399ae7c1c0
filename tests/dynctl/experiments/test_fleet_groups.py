"""Groups of `dynctl test` that know the workers of a fleet: topology, load, change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from aiohttp import web
from msgspec import UNSET
from prometheus_client.parser import text_string_to_metric_families

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.documents.fleet_load import LastTest
from dynctl.experiments.groups import change
from dynctl.experiments.journal import ChangeJournal, FleetChange
from dynctl.experiments.shares import at_most_by_chance, share_interval
from dynctl.findings.report import State
from dynctl.screens.render import render_result
from dynctl.sources.client import AsyncFrontendClient
from dynctl.sources.http import async_client
from dynctl.top.header import last_test
from router_core import OK, RouterConfig, ThresholdsSet, busy
from router_core.busy import BusyTracker, Thresholds
from router_core.policies import BusyFilter
from router_core.router_queue import QueueEntry
from router_core.workers import ModelRuntimeConfig
from tests.dynctl.experiments.faulty_proxy import Body, Fault, error, faulty_proxy, first_text
from tests.dynctl.experiments.trials import journals, messages, result_of, states, wrong
from tests.dynctl.serving.fleets import Site, site, until
from tests.waiting import patience


def worker(name: str, role: str, zone: str, **policy: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "topology_domains": {"zone": zone}, **policy}


def transfer(enforcement: str, weight: float | None = None) -> dict[str, Any]:
    policy: dict[str, Any] = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": enforcement}
    return policy if weight is None else policy | {"kv_transfer_preferred_weight": weight}


def two_zones(**policy: Any) -> list[dict[str, Any]]:
    return [
        worker("p-a", "prefill", "a", **policy),
        worker("p-b", "prefill", "b", **policy),
        worker("d-a", "decode", "a"),
        worker("d-b", "decode", "b"),
    ]


class NamesDecode(Fault):
    """Each reply names a decode worker of the other zone, as if it had been chosen.

    ``every``: only of every so many replies.
    """

    def __init__(self, fleet: Site, every: int = 1) -> None:
        super().__init__()
        rows = {row.name: row.worker_id for row in fleet.service.router.registry}
        self._other = {rows["p-a"]: rows["d-b"], rows["p-b"]: rows["d-a"]}
        self._turns = cycle([*[False] * (every - 1), True])

    def answer(self, document: Body) -> None:
        workers = document.get("nvext", {}).get("worker_id", {})
        if workers.get("prefill_worker_id") in self._other and next(self._turns):
            workers["decode_worker_id"] = self._other[workers["prefill_worker_id"]]


# -- topology --------------------------------------------------------------------------------------


async def test_required_hand_offs_stay_and_their_pairs_are_counted():
    async with site(two_zones(**transfer("required"))) as fleet:
        report = await result_of(fleet.frontend.url, only=("topology",))
    assert states(report) == {"DYE0701": State.PASS, "DYE0702": State.SKIP}
    assert "a to a" in messages(report)["DYE0701"]
    assert "b to b" in messages(report)["DYE0701"]


@pytest.mark.parametrize("every", [1, 6])
async def test_a_hand_off_out_of_the_required_domain_is_found(every: int):
    async with site(two_zones(**transfer("required"))) as fleet:
        fault = NamesDecode(fleet, every)
        async with faulty_proxy(fleet.frontend.url, fault) as url:
            report = await result_of(url, only=("topology",))
    assert wrong(report) == {"DYE0701"}
    finding = next(check for check in report.checks if check.code == "DYE0701").findings[0]
    assert finding.subject in ("p-a", "p-b")
    assert "zone" in finding.value


async def test_preferred_hand_offs_follow_the_weight():
    async with site(two_zones(**transfer("preferred", 0.9))) as fleet:
        report = await result_of(fleet.frontend.url, only=("topology",))
    assert states(report) == {"DYE0701": State.SKIP, "DYE0702": State.PASS}
    assert "95 % interval" in messages(report)["DYE0702"]


async def test_hand_offs_that_avoid_the_preferred_domain_are_found():
    async with (
        site(two_zones(**transfer("preferred", 0.9))) as fleet,
        faulty_proxy(fleet.frontend.url, NamesDecode(fleet)) as url,
    ):
        report = await result_of(url, only=("topology",))
    assert wrong(report) == {"DYE0702"}


async def test_a_preference_that_load_outweighs_is_not_a_fault():
    """Half of the hand-offs stay, as many as without a preference."""
    async with (
        site(two_zones(**transfer("preferred", 0.9))) as fleet,
        faulty_proxy(fleet.frontend.url, NamesDecode(fleet, 2)) as url,
    ):
        report = await result_of(url, only=("topology",))
    assert wrong(report) == set()
    assert "not decided" in messages(report)["DYE0702"]


async def test_the_routers_own_policy_counts():
    router = RouterConfig(kv_transfer_domain="zone", kv_transfer_enforcement="required")
    async with site(two_zones(), router=router) as fleet:
        report = await result_of(fleet.frontend.url, only=("topology",))
    assert states(report)["DYE0701"] is State.PASS


async def test_without_hand_offs_or_domains_the_reason_is_named():
    async with site([{"name": "e0"}]) as fleet:
        report = await result_of(fleet.frontend.url, only=("topology",))
        engine = await result_of(fleet.engines["e0"].url, only=("topology",))
    assert "no prefill worker serves this model" in messages(report)["DYE0701"]
    assert "do not name workers" in messages(engine)["DYE0701"]


def test_an_interval_holds_the_share_and_chance_adds_up():
    low, high = share_interval(5, 10)
    assert 0.23 < low < 0.24
    assert 0.76 < high < 0.77
    assert share_interval(0, 0) == (0.0, 1.0)
    assert at_most_by_chance(0, 4, 0.5) == 0.0625
    assert at_most_by_chance(4, 4, 0.5) == 1.0


# -- load ------------------------------------------------------------------------------------------

SLOW = {"speedup_ratio": 0.5, "max_model_len": 2048}


def engines(number: int, **settings: Any) -> list[dict[str, Any]]:
    return [{"name": f"e{place}", **SLOW, **settings} for place in range(number)]


SKIPPED_LOAD = dict.fromkeys(("DYE0802", "DYE0803", "DYE0804"), State.SKIP)


async def test_busy_workers_are_passed_over():
    async with site(engines(3)) as fleet:
        report = await result_of(fleet.frontend.url, only=("load",))
    assert states(report) == {"DYE0801": State.PASS, **SKIPPED_LOAD}
    assert messages(report)["DYE0801"].startswith("0 of ")
    assert "--allow-changes" in messages(report)["DYE0802"]


async def test_a_router_that_ignores_load_is_found():
    router = RouterConfig(router_mode="round-robin")
    async with site(engines(3), router=router) as fleet:
        report = await result_of(fleet.frontend.url, only=("load",))
    assert wrong(report) == {"DYE0801"}


async def test_ranks_of_one_worker_are_places_of_their_own(tmp_path: Path):
    async with site(engines(1, data_parallel_size=3)) as fleet:
        url = fleet.frontend.url
        report = await result_of(url, only=("load",), changes=True, state=tmp_path)
    assert states(report) == {"DYE0801": State.PASS, **SKIPPED_LOAD}
    assert "of 3 workers" in messages(report)["DYE0801"]
    assert "data-parallel" in messages(report)["DYE0802"]


async def test_load_of_others_is_not_a_fault():
    """A router that ignores load is not blamed where others' load may decide."""
    router = RouterConfig(router_mode="round-robin")
    async with site(engines(3), router=router) as fleet:
        others = [asyncio.create_task(busy_client(fleet, number)) for number in range(2)]
        try:
            report = await result_of(fleet.frontend.url, only=("load",))
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
    assert states(report)["DYE0801"] is State.SKIP
    assert "other requests" in messages(report)["DYE0801"]


async def busy_client(fleet: Site, number: int) -> None:
    while True:
        await fleet.chat(f"client {number} " * 30, max_tokens=60)


async def test_one_worker_has_no_load_to_compare():
    async with site(engines(1)) as fleet:
        report = await result_of(fleet.frontend.url, only=("load",))
    assert messages(report)["DYE0801"] == "one worker answers: no other can be chosen"


@pytest.mark.parametrize("number", [2, 6])
async def test_a_threshold_acts_and_is_put_back(number: int, tmp_path: Path):
    async with site(engines(number)) as fleet:
        url = fleet.frontend.url
        report = await result_of(url, only=("load",), changes=True, state=tmp_path)
        held = fleet.service.router.busy.thresholds("demo")
    assert states(report)["DYE0802"] is State.PASS
    assert ("refused: 529" in messages(report)["DYE0802"]) == (number == 2)
    below, above = map(float, re.findall(r"at (0\.\d+)", messages(report)["DYE0802"]))
    assert 0 < below < above < 2 * below
    assert held.active_decode_blocks_threshold is None
    assert not journals(tmp_path)


class SeesThresholds(Fault):
    """No fault: it sees the thresholds of each request."""

    def __init__(self, fleet: Site) -> None:
        super().__init__()
        self._busy = fleet.service.router.busy
        self.seen: list[Thresholds] = []

    def request(self, body: Body) -> web.Response | None:
        self.seen.append(self._busy.thresholds("demo"))
        return None


async def test_other_thresholds_do_not_act_while_one_is_tried(tmp_path: Path):
    async with site(engines(2)) as fleet:
        own = ThresholdsSet("demo", {"active_prefill_tokens_threshold": 100_000})
        assert fleet.service.apply(own) == OK
        proxy = SeesThresholds(fleet)
        async with faulty_proxy(fleet.frontend.url, proxy) as url:
            report = await result_of(url, only=("load",), changes=True, state=tmp_path)
        held = fleet.service.router.busy.thresholds("demo")
    assert states(report)["DYE0802"] is State.PASS
    tried = [seen for seen in proxy.seen if seen.active_decode_blocks_threshold is not None]
    assert {seen.active_prefill_tokens_threshold for seen in tried} == {None}
    assert held.active_prefill_tokens_threshold == 100_000


class AnswersAsBusy(Fault):
    """Requests that were refused as all workers are busy are answered all the same."""

    def __init__(self, fleet: Site) -> None:
        super().__init__()
        self._fleet = fleet

    def request(self, body: Body) -> web.Response | None:
        busy = self._fleet.service.router.busy
        if body.get("stream") or busy.thresholds("demo").active_decode_blocks_threshold is None:
            return None
        first = next(iter(self._fleet.service.router.registry)).worker_id
        named = {"prefill_worker_id": first, "decode_worker_id": first}
        choices = [{"message": {"role": "assistant", "content": "word"}}]
        return web.json_response({"choices": choices, "nvext": {"worker_id": named}})


async def test_a_threshold_without_effect_is_found(tmp_path: Path):
    async with (
        site(engines(1)) as fleet,
        faulty_proxy(fleet.frontend.url, AnswersAsBusy(fleet)) as url,
    ):
        report = await result_of(url, only=("load",), changes=True, state=tmp_path)
    assert wrong(report) == {"DYE0802"}


@pytest.mark.parametrize(
    ("factor", "seen"), [(10.0, "not busy after 2 s"), (0.1, "hold fewer blocks and are busy")]
)
async def test_a_threshold_that_acts_at_another_value_is_found(
    factor: float, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The router compares with the blocks of a larger or smaller cache."""
    is_over = BusyTracker._is_over

    def is_over_another(
        self: BusyTracker, slot: int, config: ModelRuntimeConfig, thresholds: Thresholds
    ) -> bool:
        blocks = round((config.total_kv_blocks or 0) * factor)
        return is_over(self, slot, replace(config, total_kv_blocks=blocks), thresholds)

    monkeypatch.setattr(BusyTracker, "_is_over", is_over_another)
    async with site(engines(2)) as fleet:
        url = fleet.frontend.url
        report = await result_of(url, only=("load",), changes=True, state=tmp_path)
        held = fleet.service.router.busy.thresholds("demo")
    assert wrong(report) == {"DYE0802"}
    finding = next(check for check in report.checks if check.code == "DYE0802").findings[0]
    assert seen in finding.value
    assert held.active_decode_blocks_threshold is None


SLOW_PREFILL = {"prefill_tokens_per_s": 1000.0}


@pytest.mark.parametrize("roles", [("aggregated", "aggregated"), ("prefill", "decode")])
async def test_thresholds_of_prompt_tokens_act_at_their_value(roles: Sequence[str], tmp_path: Path):
    workers = [
        {"name": f"e{place}", "role": role, **SLOW, **SLOW_PREFILL}
        for place, role in enumerate(roles)
    ]
    own = {"active_prefill_tokens_threshold": 100_000}
    async with site(workers) as fleet:
        fleet.service.apply(ThresholdsSet("demo", own))
        url = fleet.frontend.url
        report = await result_of(url, only=("load",), changes=True, state=tmp_path)
        held = fleet.service.router.busy.thresholds("demo")
    assert states(report)["DYE0804"] is State.PASS, messages(report)
    text = messages(report)["DYE0804"]
    below, at = (int(number.replace(",", "")) for number in re.findall(r" (\d,\d+|\d+)\b", text))
    assert 800 < below < at < below + 64
    assert text.endswith("active_prefill_tokens_threshold_frac")
    assert held == Thresholds(active_prefill_tokens_threshold=100_000)
    assert not journals(tmp_path)


@pytest.mark.parametrize(("factor", "seen"), [(1.1, "and not busy"), (0.9, "tokens, and busy")])
async def test_a_threshold_of_prompt_tokens_at_another_value_is_found(
    factor: float, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    limits = busy._prefill_limits
    monkeypatch.setattr(
        busy,
        "_prefill_limits",
        lambda *of: [(name, value, limit * factor) for name, value, limit in limits(*of)],
    )
    async with site(engines(1, **SLOW_PREFILL)) as fleet:
        url = fleet.frontend.url
        report = await result_of(url, only=("load",), changes=True, state=tmp_path)
    assert wrong(report) == {"DYE0804"}
    findings = next(check for check in report.checks if check.code == "DYE0804").findings
    assert len(findings) == 2
    assert all(finding.value.endswith(seen) for finding in findings)


async def test_requests_that_a_threshold_of_prompt_tokens_lets_pass_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The frontend shows the worker as busy, and routes to it."""
    monkeypatch.setattr(BusyFilter, "mask", lambda *_: -1)
    async with site(engines(1, **SLOW_PREFILL)) as fleet:
        url = fleet.frontend.url
        report = await result_of(url, only=("load",), changes=True, state=tmp_path)
    assert "DYE0804" in wrong(report)
    findings = next(check for check in report.checks if check.code == "DYE0804").findings
    assert all("a request was answered at" in finding.value for finding in findings)


async def test_a_worker_that_computes_too_fast_is_not_judged(tmp_path: Path):
    fast = {"prefill_tokens_per_s": 10_000_000.0, "max_model_len": 8192}
    async with site(engines(1, **fast)) as fleet:
        url = fleet.frontend.url
        report = await result_of(url, only=("load",), changes=True, state=tmp_path)
    assert states(report)["DYE0804"] is State.SKIP
    assert "before it was read" in messages(report)["DYE0804"]


QUEUE = RouterConfig(router_queue_threshold=0.01)
"""Requests wait above 81 active prompt tokens of a worker."""


async def test_of_two_that_wait_the_higher_priority_is_first():
    async with site(engines(2, **SLOW_PREFILL), router=QUEUE) as fleet:
        report = await result_of(fleet.frontend.url, only=("load",))
    assert states(report)["DYE0803"] is State.PASS, messages(report)
    assert "priority 100 waited" in messages(report)["DYE0803"]


async def test_prefill_workers_have_the_queue():
    workers = [
        {"name": name, "role": role, **SLOW, **SLOW_PREFILL}
        for name, role in (("p0", "prefill"), ("d0", "decode"))
    ]
    async with site(workers, router=QUEUE) as fleet:
        report = await result_of(fleet.frontend.url, only=("load",))
    assert messages(report)["DYE0803"].startswith("p0: priority 100")


class DropsHints(Fault):
    """The hints of a request do not reach the router."""

    headers = ("x-dynctl-decision",)

    def request(self, body: Body) -> web.Response | None:
        body.get("nvext", {}).pop("agent_hints", None)
        return None


async def test_a_priority_that_is_lost_on_the_way_is_found():
    async with (
        site(engines(1, **SLOW_PREFILL), router=QUEUE) as fleet,
        faulty_proxy(fleet.frontend.url, DropsHints()) as url,
    ):
        report = await result_of(url, only=("load",))
    assert wrong(report) == {"DYE0803"}
    finding = next(check for check in report.checks if check.code == "DYE0803").findings[0]
    assert "priority 0" in finding.value


async def test_a_queue_that_ignores_priorities_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(QueueEntry, "key", property(lambda entry: (0.0, 0.0, entry.number)))
    async with site(engines(1, **SLOW_PREFILL), router=QUEUE) as fleet:
        report = await result_of(fleet.frontend.url, only=("load",))
    assert wrong(report) == {"DYE0803"}
    finding = next(check for check in report.checks if check.code == "DYE0803").findings[0]
    assert "left after" in finding.value


async def test_a_queue_that_is_off_or_out_of_reach_is_skipped():
    async with site(engines(1)) as fleet:
        off = await result_of(fleet.frontend.url, only=("load",))
    async with site(engines(1), router=RouterConfig(router_queue_threshold=4.0)) as fleet:
        far = await result_of(fleet.frontend.url, only=("load",))
    assert "the router queue is off" in messages(off)["DYE0803"]
    assert "above 32,768 active prompt tokens" in messages(far)["DYE0803"]
    assert messages(far)["DYE0803"].endswith("at --router-queue-threshold 0.39 they do")


# -- change ----------------------------------------------------------------------------------------


async def test_a_worker_is_cordoned_drains_and_returns(tmp_path: Path):
    async with site(engines(2)) as fleet:
        url = fleet.frontend.url
        report = await result_of(url, only=("change",), changes=True, state=tmp_path)
        cordoned = dict(fleet.service.membership.cordoned)
    assert set(states(report).values()) == {State.PASS}, messages(report)
    assert "a stream that ran on it" in messages(report)["DYE1002"]
    assert not cordoned
    assert not journals(tmp_path)


async def test_nothing_changes_where_the_fleet_would_be_left_without_a_worker(tmp_path: Path):
    async with site([*engines(1), {"name": "other", "model": "second"}]) as fleet:
        url = fleet.frontend.url
        report = await result_of(url, only=("change",), changes=True, state=tmp_path, model="demo")
    assert states(report)["DYE1001"] is State.SKIP
    assert "left without a worker" in messages(report)["DYE1001"]


class WhileCordoned(Fault):
    """A fault that begins with the cordon of a worker."""

    def __init__(self, fleet: Site) -> None:
        super().__init__()
        self.fleet = fleet
        self.begun = False

    def request(self, body: Body) -> web.Response | None:
        self.begun = self.begun or bool(self.fleet.service.membership.cordoned)
        return self.after(body) if self.begun else None

    def after(self, body: Body) -> web.Response | None:
        raise NotImplementedError


class SendsToCordoned(WhileCordoned):
    def after(self, body: Body) -> web.Response | None:
        return None

    def answer(self, document: Body) -> None:
        cordoned = next(iter(self.fleet.service.membership.cordoned), None)
        if cordoned is not None:
            row = self.fleet.service.router.registry.by_name(cordoned)
            document["nvext"]["worker_id"]["decode_worker_id"] = row.worker_id


class Loses(WhileCordoned):
    def after(self, body: Body) -> web.Response | None:
        return error(503, "no worker is ready") if next(self.number) % 3 == 0 else None


class ForgetsCaches(WhileCordoned):
    def after(self, body: Body) -> web.Response | None:
        first_text(body, lambda text: f"{uuid4()} {text}")
        return None


@pytest.mark.parametrize(
    ("fault", "code"),
    [(SendsToCordoned, "DYE1001"), (Loses, "DYE1002"), (ForgetsCaches, "DYE1004")],
)
async def test_what_goes_wrong_during_a_cordon_is_found(
    fault: type[WhileCordoned], code: str, tmp_path: Path
):
    async with site(engines(2)) as fleet:
        async with faulty_proxy(fleet.frontend.url, fault(fleet)) as url:
            report = await result_of(url, only=("change",), changes=True, state=tmp_path)
        assert not fleet.service.membership.cordoned
    assert wrong(report) == {code}


async def test_a_request_that_does_not_end_keeps_a_worker_from_draining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(change, "_DRAINED_S", 1.0)
    async with site(engines(2, speedup_ratio=0.2)) as fleet:
        running = [
            asyncio.create_task(fleet.chat(f"{name} " * 40, max_tokens=1500, ignore_eos=True))
            for name in ("one", "two", "three", "four")
        ]
        await until(lambda: all(row[0] for row in fleet.load().values()))
        url = fleet.frontend.url
        report = await result_of(url, only=("change",), changes=True, state=tmp_path)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert wrong(report) - {"DYE1004"} == {"DYE1003"}


async def test_two_tests_do_not_change_one_server(tmp_path: Path):
    async with site(engines(2)) as fleet:
        other = ChangeJournal(fleet.frontend.url, tmp_path)
        other.open()
        with pytest.raises(UsageProblem, match="another test changes"):
            await result_of(fleet.frontend.url, changes=True, state=tmp_path)
        other.close()


# -- what a test leaves ----------------------------------------------------------------------------


async def start_test(url: str, state: Path, group: str) -> asyncio.subprocess.Process:
    """A test by the command line that changes a frontend."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynctl", "test", url, "--only", group, "--allow-changes"),
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_an_interrupted_test_is_put_back(number: signal.Signals, tmp_path: Path):
    """At once by Ctrl-C and SIGTERM; after SIGKILL by the next test, which reports it."""
    async with site(engines(2)) as fleet:
        url, cordoned = fleet.frontend.url, fleet.service.membership.cordoned
        process = await start_test(url, tmp_path, "change")
        await until(lambda: bool(cordoned), 30)
        process.send_signal(number)
        _, shown = await process.communicate()
        assert process.returncode != 0
        killed = number is signal.SIGKILL
        assert bool(cordoned) is killed
        assert (b"interrupted; put back: cordon of worker" in shown) is not killed
        assert bool(journals(tmp_path / "dynctl")) is killed
        state = tmp_path / "dynctl"
        if killed:
            report = await result_of(url, only=("change",), state=state)
            assert wrong(report) == {"DYE1005"}
            assert cordoned
        report = await result_of(url, only=("limits",), state=state, changes=True)
        assert not cordoned
        assert (len(report.sources) == 2) is killed
        assert not killed or "put back after an earlier test: cordon" in report.sources[1]


async def test_a_threshold_of_a_killed_test_is_put_back(tmp_path: Path):
    name, state = "active_decode_blocks_threshold", tmp_path / "dynctl"
    async with site(engines(2)) as fleet:
        url, busy = fleet.frontend.url, fleet.service.router.busy
        fleet.service.apply(ThresholdsSet("demo", {name: 0.85}))
        process = await start_test(url, tmp_path, "load")
        await until(lambda: busy.thresholds("demo").active_decode_blocks_threshold != 0.85, 30)
        process.kill()
        await process.wait()
        assert busy.thresholds("demo").active_decode_blocks_threshold != 0.85
        report = await result_of(url, only=("limits",), state=state, changes=True)
        assert busy.thresholds("demo").active_decode_blocks_threshold == 0.85
    assert "put back" in report.sources[1]
    assert not journals(state)


async def test_a_value_that_somebody_changed_since_stays(tmp_path: Path):
    async with site(engines(2)) as fleet:
        url, busy = fleet.frontend.url, fleet.service.router.busy
        name = "active_decode_blocks_threshold"
        journal = ChangeJournal(url, tmp_path)
        journal.open()
        _, load = await fleet.get("/v1/fleet")
        process = load["process"]
        journal.add(FleetChange("thresholds", "demo", {name: 0.5}, {name: 0.0}, 0.0, process))
        journal.add(
            FleetChange("thresholds", "demo", {name: 0.5}, {name: 0.7}, 0.0, "before restart")
        )
        journal.close()
        fleet.service.apply(ThresholdsSet("demo", {name: 0.7}))
        await result_of(url, only=("change",), changes=True, state=tmp_path)
        assert busy.thresholds("demo").active_decode_blocks_threshold == 0.7
    assert not journals(tmp_path)


async def test_the_cordon_of_a_worker_that_left_is_lifted_for_its_return(tmp_path: Path):
    async with site(engines(2)) as fleet:
        url, (_, load) = fleet.frontend.url, await fleet.get("/v1/fleet")
        membership = fleet.service.membership
        membership.cordon("gone", cordoned=True)
        journal = ChangeJournal(url, tmp_path)
        journal.open()
        before, after = {"cordoned": False}, {"cordoned": True}
        for name in ("gone", "long gone"):
            journal.add(FleetChange("cordon", name, {**before}, {**after}, 0.0, load["process"]))
        journal.close()
        report = await result_of(url, only=("limits",), changes=True, state=tmp_path)
        assert not membership.cordoned
    assert report.sources[1:] == [
        "put back after an earlier test: cordon of worker gone",
        "put back after an earlier test: cordon of worker long gone",
    ]
    assert not journals(tmp_path)


async def test_thresholds_of_a_model_that_left_stay_in_the_journal(tmp_path: Path):
    async with site(engines(2)) as fleet:
        url, (_, load) = fleet.frontend.url, await fleet.get("/v1/fleet")
        journal = ChangeJournal(url, tmp_path)
        journal.open()
        before, after = (
            {"active_decode_blocks_threshold": None},
            {"active_decode_blocks_threshold": 0.5},
        )
        journal.add(FleetChange("thresholds", "gone", {**before}, {**after}, 0.0, load["process"]))
        journal.close()
        report = await result_of(url, only=("change",), changes=True, state=tmp_path)
    assert wrong(report) == {"DYE1005"}
    assert journals(tmp_path)


async def test_nothing_changes_where_several_frontends_answer(tmp_path: Path):
    async with site(engines(2)) as one, site(engines(2)) as other:
        ports = cycle(int(fleet.frontend.url.rpartition(":")[2]) for fleet in (one, other))

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(asyncio.current_task())
            back, forth = await asyncio.open_connection("127.0.0.1", next(ports))
            await asyncio.gather(pass_on(reader, forth), pass_on(back, writer))

        connections: list[asyncio.Task[None] | None] = []
        balancer = await asyncio.start_server(connect, "127.0.0.1", 0)
        port = balancer.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        report = await result_of(url, only=("load", "change"), changes=True, state=tmp_path)
        balancer.close()
        await asyncio.gather(*filter(None, connections), return_exceptions=True)
    assert "several frontends" in messages(report)["DYE1001"]
    assert not journals(tmp_path)


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def test_a_journal_that_is_not_one_is_named(tmp_path: Path):
    journal = ChangeJournal("http://127.0.0.1:1", tmp_path)
    journal.path.write_text("{}")
    with pytest.raises(UsageProblem, match="not a list of changes"):
        journal.left()


# -- the result ------------------------------------------------------------------------------------


async def test_the_frontend_remembers_a_whole_test_and_top_shows_its_age():
    engine = {**SLOW, "name": "e0", "speedup_ratio": 50.0}
    async with site([engine], api_token="t0ken") as fleet, async_client("t0ken") as client:
        url = fleet.frontend.url
        await result_of(url, token="t0ken", only=("limits",))
        read = AsyncFrontendClient(client, url, patience(5.0))
        assert (await read.fleet(None)).tested is UNSET
        report = await result_of(url, token="t0ken", model="demo")
        tested = (await read.fleet(None)).tested
        await result_of(url, model="demo")  # without rights nothing is reported, nor refused
    assert isinstance(tested, LastTest)
    assert (tested.passed, tested.failed) == (report.summary.passed, report.summary.failed)
    assert last_test(tested, tested.at + 180) == "tested 3 min ago"
    worse = msgspec.structs.replace(tested, failed=2, warnings=1)
    assert last_test(worse, tested.at + 7200) == "tested 2.0 h ago: 2 failed, 1 warning"


@pytest.mark.parametrize("body", [{}, {"passed": -1}, {"passed": "all"}])
async def test_a_report_that_is_not_one_is_refused(body: dict[str, Any]):
    async with site([{"name": "e0"}]) as fleet:
        status, answer, _ = await fleet.post("/v1/test", body)
        assert status == 400
        assert "passed" in answer["error"]["message"]
        status, load = await fleet.get("/v1/fleet")
    assert "tested" not in load


async def test_prometheus_reads_the_result():
    async with site([{"name": "e0"}]) as fleet:
        report = await result_of(fleet.frontend.url, only=("limits",))
    text = render_result(report, GlobalOptions(output=OutputFormat.PROMETHEUS))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    states = {
        (sample.labels["code"], sample.labels["state"]): sample.value
        for sample in families["dynctl_test_check"].samples
    }
    assert len(states) == 4 * len(report.checks)
    for check in report.checks:
        assert {name for (code, name), value in states.items() if value and code == check.code} == {
            check.state.value
        }
    assert families["dynctl_test_requests"].samples[0].value == report.spent.requests
    assert families["dynctl_test_end_timestamp_seconds"].samples[0].value == round(report.at, 3)

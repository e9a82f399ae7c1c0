"""Every surface shows the same health: one table of situations through all of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from dynctl.base.options import GlobalOptions
from dynctl.base.tasks import SLICE, end_tasks
from dynctl.cli.bundle import sections
from dynctl.documents.codec import decode
from dynctl.documents.config import ConfigDocument, config_document
from dynctl.documents.decisions import DecisionList
from dynctl.documents.doubts import doubt
from dynctl.documents.fleet_load import Condition, FleetLoad, joined_rows
from dynctl.documents.workers import WorkerList, WorkerRow, decode_worker_rows
from dynctl.findings.catalogue import all_codes
from dynctl.findings.report import FLEET, State
from dynctl.health.checks.run import judge
from dynctl.health.conditions import INDEX_OR_LOAD, NOT_MODELLED
from dynctl.health.evaluation import DERIVED_CODES, FleetState, condition_texts, evaluate
from dynctl.health.facts import CheckFacts, FrontendFacts
from dynctl.planning.domain_capacity import topology_show
from dynctl.screens.canvas import Canvas
from dynctl.screens.topology import topology_show as topology_screen
from dynctl.screens.workers import worker_list
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.refusal import HttpError
from dynctl.serving.routing.service import RoutingService
from dynctl.sources.alerts import AlertBoard
from dynctl.sources.domains import DomainBoard
from dynctl.sources.dynamo import check_facts
from dynctl.sources.frontend.snapshot import FrontendReadings, frontend_snapshot
from router_core import LoadReported, ModelRuntimeConfig, Role, Router, RouterConfig, Worker
from tests.dynctl.health.situations import SITUATIONS, Rig, Situation, rig
from tests.waiting import patience

Messages = dict[tuple[str, str], str]
#: The side of an operator: a program on this machine, over TCP.
PEER = {"peername": ("127.0.0.1", 40000)}
TRANSPORT = Mock(get_extra_info=lambda name, default=None: PEER.get(name, default))
REQUEST = make_mocked_request("GET", "/", headers={"host": "127.0.0.1"}, transport=TRANSPORT)
SAMPLE = re.compile(r"^(\w+){(.*)} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Reader:
    """Reads a frontend of this process."""

    name = "http://frontend"

    def __init__(self, rig: Rig) -> None:
        self._frontend = rig.frontend

    async def fleet(self, cards: str | None) -> FleetLoad:
        return decode(
            msgspec.json.encode(self._frontend.administration.feed.read(cards)), FleetLoad
        )

    async def decisions(
        self, since: int, limit: int, wait: int, process: str = "", ends: int | None = None
    ) -> DecisionList:
        raise NotImplementedError

    async def config(self) -> ConfigDocument:
        config = self._frontend.service.router.config
        return config_document(config, version="test", preset=None, sources={})


def settings(made: Rig) -> dict[str, Any]:
    config = made.service.router.config
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def messages(rows: Any) -> Messages:
    found = {(row.code, Path(row.subject).name): row.message for row in rows}
    assert len(found) == len(list(rows))
    return found


def subjects(in_force: Messages, *codes: str) -> set[str]:
    return {subject for code, subject in in_force if code in codes}


def test_the_table_has_every_situation_once():
    assert len({one.name for one in SITUATIONS}) == len(SITUATIONS) >= 25


@pytest.mark.parametrize("one", SITUATIONS, ids=lambda one: one.name)
async def test_every_surface_shows_the_same(
    one: Situation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with rig(tmp_path, **one.settings) as made:
        # An evaluation of the time before must not be shown after the change.
        await made.frontend.administration.control.health(REQUEST)
        await one.make(made)
        in_force = await http_conditions(made, one.status)
        assert set(in_force) == one.expected
        assert {code for code, _ in in_force} <= set(all_codes())

        health = made.service.health()
        assert health.status == one.status
        assert messages(made.service.conditions) == in_force
        derived = {key for key in in_force if key[0] in DERIVED_CODES}
        assert {(row.code, row.subject) for row in health.derived} == derived

        metrics_agree(made, in_force)
        load = await Reader(made).fleet(None)
        assert messages(load.conditions) == in_force
        check_and_bundle_agree(load, in_force, monkeypatch)
        await top_agrees(made, in_force)
        assert load.workers is not None
        rows = joined_rows(load.workers, load.loads)
        encoded = msgspec.json.encode({"workers": made.frontend.fleet.rows()})
        for found in (rows, decode_worker_rows(encoded)):
            workers_agree(found, in_force)
        topology_agrees(rows, settings(made), in_force)
        await route_agrees(made, in_force)


def test_a_large_fleet_is_not_evaluated_at_every_reading():
    now = 1000.0
    service = RoutingService(clock=lambda: now)
    for number in range(1, 501):
        assert service.membership.upsert(Worker(number, f"w{number}", "demo")).ok
    first = service.health()
    service.membership.set_available(1, "refused")
    now += 0.4
    assert service.health() is first
    now += 0.2
    assert service.health().models[0].ready == {"aggregated": 499}


async def test_what_a_reader_of_a_large_fleet_awaited_is_read_again_a_moment_later():
    now = 1000.0
    service = large_fleet(500)
    service.clock = lambda: now
    first = await service.refresh_health()
    now += 0.4
    assert await service.refresh_health() is first
    # Older than an evaluation may be shown, but a scrape writes what it awaited.
    now += 0.4
    assert service.health() is first
    now += 0.2
    assert service.health() is not first


def test_a_worker_that_joins_or_leaves_changes_no_condition_of_another():
    service = RoutingService(router=Router(RouterConfig(router_approximate_cache_policy="lru")))

    def without_capacity() -> dict[str, int]:
        conditions = [item for item in service.conditions if item.code == "CAPACITY_UNKNOWN"]
        return {condition.subject: condition.count for condition in conditions}

    for number in (1, 2, 3):
        assert service.membership.upsert(Worker(number, f"w{number}", "demo", kv_events=False)).ok
    assert without_capacity() == {"w1": 1, "w2": 1, "w3": 1}
    service.membership.remove(1)
    assert without_capacity() == {"w2": 1, "w3": 1}
    # The settings change all of them.
    service.configure({"router_approximate_cache_policy": "ttl"})
    assert without_capacity() == {}
    service.configure({"router_approximate_cache_policy": "lru"})
    assert without_capacity() == {"w2": 1, "w3": 1}


def large_fleet(workers: int) -> RoutingService:
    """A service with prefill and decode workers, each bound to its zone."""
    service = RoutingService()
    for number in range(workers):
        role = Role.PREFILL if number % 2 else Role.DECODE
        card = ModelRuntimeConfig(
            topology_domains={"zone": f"z{number % 9}"},
            kv_transfer_domain="zone",
            kv_transfer_enforcement="required",
        )
        assert service.membership.upsert(
            Worker(number, f"w{number}", "demo", role, runtime_config=card)
        ).ok
    return service


async def test_a_large_fleet_is_evaluated_in_steps_of_few_workers():
    service = large_fleet(1000)
    steps = 0

    async def count() -> None:
        nonlocal steps
        while True:
            steps += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    found = await service.refresh_health()
    await end_tasks([counting])
    assert steps >= 1000 // SLICE + 500 // SLICE
    assert found == evaluate(health_inputs(service))
    assert found.models[0].ready == {"decode": 500, "prefill": 500}
    assert service.health() is found


def health_inputs(service: RoutingService) -> FleetState:
    config = service.router.config
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return FleetState(service.workers(), settings=values, age_s=0.0)


async def test_an_evaluation_in_steps_shows_no_fleet_that_never_was():
    service = large_fleet(1000)
    evaluating = asyncio.create_task(service.refresh_health())
    for number in range(0, 1000, 2):
        await asyncio.sleep(0)
        service.membership.remove(number)
    found = await evaluating
    # Whatever was left when the last evaluation began, its counts are of one moment.
    [model] = found.models
    assert model.registered["prefill"] == 500
    assert model.ready == model.registered
    gone = {f"w{number}" for number in range(0, 1000, 2)}
    await service.refresh_health()
    assert not gone & {one.subject for one in service.conditions}


async def test_a_fleet_that_changes_in_each_turn_is_evaluated_in_steps():
    """The evaluation is of the moment when it began, and the next one shows what changed since."""
    service = large_fleet(1000)
    service.started_at -= 1e4
    for number in range(1000):
        service.apply(LoadReported(number, 0, 1, 1, 1))
    late = service.clock() + 1e4
    service.clock = lambda: late  # every load report is overdue
    left = 0

    async def leave() -> None:
        nonlocal left
        while left < 500:
            service.membership.remove(left)
            left += 1
            await asyncio.sleep(0)

    leaving = asyncio.create_task(leave())
    found = await service.refresh_health()
    # Less than one worker left in each turn of three evaluations: none was made in one turn.
    assert left >= 3 * (1000 // SLICE)
    await end_tasks([leaving])
    registered = sum(found.models[0].registered.values())
    assert 1000 - left <= registered < 1000
    overdue = {one.subject for one in service.conditions if one.code == "LOAD_OVERDUE"}
    assert not overdue & {f"w{number}" for number in range(left)}
    late += 1e4
    found = await service.refresh_health()
    assert sum(found.models[0].registered.values()) == 1000 - left


async def test_rows_of_an_evaluation_are_of_the_workers_when_it_began():
    frontend = build_frontend(FrontendConfig(port=0, log_level="error"))
    service = frontend.service
    for number in range(4):
        assert service.membership.upsert(Worker(number, f"w{number}", "demo")).ok
        service.apply(LoadReported(number, 0, 1, 1, 1))
    rows = service.rows()
    service.membership.remove(0)
    assert service.membership.upsert(Worker(9, "w9", "demo")).ok
    service.membership.set_available(1, "gone")
    found = {row.name: row for row in rows}
    assert list(found) == ["w0", "w1", "w2", "w3"]
    assert {row.status for row in found.values()} == {"ready"}
    assert [rank.load_age_s for rank in found["w0"].ranks] == [None]
    assert found["w2"].ranks[0].load_age_s is not None
    await frontend.close()


async def test_readers_of_a_large_fleet_share_an_evaluation():
    service = large_fleet(300)
    first, *others = await asyncio.gather(*(service.refresh_health(patience(1)) for _ in range(5)))
    assert all(one is first for one in others)


# -- one surface each ------------------------------------------------------------------------------


async def http_conditions(made: Rig, expected: str) -> Messages:
    """The conditions of GET /health; GET /ready agrees with them."""
    serves = expected in ("healthy", "degraded")
    status, answer = body(await made.frontend.administration.control.health(REQUEST))
    assert (status, answer["status"]) == (200 if serves else 503, expected)
    in_force = messages(msgspec.convert(answer["conditions"], list[Condition]))
    status, answer = body(await made.frontend.administration.control.ready(REQUEST))
    assert (status, answer["ready"]) == (200 if serves else 503, serves)
    not_ready = {row["model"] for row in answer["models"] if not row["ready"]}
    assert not_ready == subjects(in_force, "MODEL_NOT_SERVED")
    return in_force


def body(answer: Any) -> tuple[int, Any]:
    return answer.status, msgspec.json.decode(answer.body)


def metrics_agree(made: Rig, in_force: Messages) -> None:
    samples = [
        (name, dict(LABEL.findall(labels)), value)
        for name, labels, value in SAMPLE.findall(made.frontend.administration.metrics.render())
    ]
    shown = [labels for name, labels, _ in samples if name == "dynctl_condition"]
    assert {(row["code"], Path(row["subject"]).name) for row in shown} == set(in_force)
    not_ready = {
        labels["model"]
        for name, labels, value in samples
        if name == "dynamo_frontend_model_ready" and float(value) == 0
    }
    assert not_ready == subjects(in_force, "MODEL_NOT_SERVED")


def check_and_bundle_agree(
    load: FleetLoad, in_force: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = FrontendFacts(Reader.name, "dynctl", mode="kv", conditions=tuple(load.conditions))
    facts = CheckFacts(frontends=(frontend,))
    report = judge(facts)
    checks = [check for check in report.checks if check.section == FLEET]
    findings = [(check.code, one) for check in checks for one in check.findings]
    shown = {(code, Path(one.subject).name): one.value for code, one in findings}
    assert shown == in_force
    levels = {code: condition_texts(code).level for code, _ in in_force}
    wrong = {check.code: str(check.state) for check in checks if check.state is not State.PASS}
    assert wrong == levels
    assert report.passes("fail") == ("fail" not in levels.values())
    monkeypatch.setattr(check_facts, "gather", lambda options: facts)
    assert sections._check(GlobalOptions()) == report


async def top_agrees(made: Rig, in_force: Messages) -> None:
    readings = FrontendReadings(Reader(made), lambda: made.now)
    await readings.read()
    snapshot = frontend_snapshot([readings], Reader.name, made.now)
    alerts = AlertBoard().alerts(snapshot, DomainBoard().capacity(snapshot))
    assert messages(alerts) == in_force
    for alert in alerts:
        level, _, fix = condition_texts(alert.code)
        assert (alert.level, alert.fix) == (level, fix)


def workers_agree(rows: list[WorkerRow], in_force: Messages) -> None:
    ready = [row for row in rows if row.status == "ready"]
    dead = {row.name for row in rows if row not in ready}
    assert dead == subjects(in_force, "WORKER_UNREACHABLE", "WORKER_REJECTED")
    down = {row.name for row in ready if any(rank.index == "disconnected" for rank in row.ranks)}
    assert down == subjects(in_force, "STREAM_DISCONNECTED")
    lines = worker_list(WorkerList("test", rows), Canvas(width=200)).splitlines()
    for name in down:
        assert "disconnected" in next(line for line in lines if line.startswith(f"{name} "))


def topology_agrees(rows: list[WorkerRow], values: Mapping[str, Any], in_force: Messages) -> None:
    shown = topology_show("test", rows, values)
    dead = subjects(in_force, "WORKER_UNREACHABLE", "WORKER_REJECTED")
    refused = subjects(in_force, "MODEL_NOT_SERVED")
    for row in shown.rows:
        assert (row.state == "down") == (set(row.workers) <= dead)
        if row.model not in refused:
            stranded = ("DYT0901", f"{shown.domain}={row.value}") in in_force
            assert (row.state == "stranded") == stranded
    screen = topology_screen(shown, Canvas(width=200))
    assert screen.count(" is DOWN: ") == sum(row.state == "down" for row in shown.rows)


async def route_agrees(made: Rig, in_force: Messages) -> None:
    request = {"model": "demo", "prompt": "Hello"}
    if "demo" not in made.service.models():
        with pytest.raises(HttpError, match="demo"):
            await made.frontend.core.inference.explain(request, preset=None)
        return
    answer = await made.frontend.core.inference.explain(request, preset=None)
    dead = subjects(in_force, "WORKER_UNREACHABLE", "WORKER_REJECTED")
    expected = {
        doubt(
            "DYR0760" if code in NOT_MODELLED else "DYR0705",
            workers=subject,
            why=f"{code} {message}",
        ).what
        for (code, subject), message in in_force.items()
        if code in INDEX_OR_LOAD and subject not in dead
    } | {message for (code, _), message in in_force.items() if code == "NO_TOKENIZER"}
    found = [one for one in answer.doubts if one.code in ("DYR0704", "DYR0705", "DYR0760")]
    assert {one.what for one in found} == expected

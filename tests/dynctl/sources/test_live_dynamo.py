"""A live Dynamo on memory planes: reported values are shown, others are unknown."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynctl.adapters.dynamo.planes import Planes
from dynctl.adapters.ports import Listed
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.snapshot import Snapshot
from dynctl.sources.domains import DomainBoard
from dynctl.sources.dynamo import frontends as dynamo_frontends
from dynctl.sources.dynamo import live as planes_module
from dynctl.sources.dynamo.live import LiveDynamo
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import open_view_bytes
from dynctl.top.header import State, header
from dynctl.top.history import History
from dynctl.wire.dynamo.active_sequences import SequenceAdded, SequenceFreed, encode_sequences
from dynctl.wire.dynamo.events import KvMetrics, encode_kv_metrics
from router_core import Role
from tests.dynctl.serving.test_observer import CAPTURE, Requests
from tests.waiting import patience, until

OPTIONS = GlobalOptions(discovery="file", file_kv=Path("unused"))


class Live:
    """The captured two-zone deployment, with its planes in memory."""

    def __init__(self) -> None:
        from dynctl.adapters.memory import MemoryDiscovery
        from tests.memory_planes import MemoryEventPlane

        self.values: dict[str, Any] = {
            key: row["value"] for key, row in json.loads(CAPTURE.read_text()).items()
        }
        self.discovery = MemoryDiscovery()
        self.events = MemoryEventPlane()
        self.requests = Requests()
        for key, value in self.values.items():
            self.discovery.put(key, json.dumps(value).encode())

    def planes(self, _options: GlobalOptions) -> Planes:
        return Planes("memory", self.discovery, lambda _: self.events, self.requests, [])


@pytest.fixture
async def live(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Live]:
    made = Live()
    monkeypatch.setattr(planes_module, "open_planes", made.planes)
    monkeypatch.setattr(dynamo_frontends, "METRICS_S", 0.0)
    yield made
    await made.events.close()


class Frontend:
    """Answers as Dynamo's frontend does, for the paths that the dashboard reads."""

    def __init__(self) -> None:
        self.thresholds: dict[str, Any] = {
            "active_decode_blocks_threshold": None,
            "active_prefill_tokens_threshold": 1_000,
            "active_prefill_tokens_threshold_frac": None,
        }
        self.loads: dict[int, tuple[int, int]] = {}
        self.queued = 0
        self.requests = {"": 0, "overload": 0}
        self.away = False

    def metrics(self) -> str:
        lines = [
            'dynamo_frontend_router_queue_pending_requests{model="tiny",policy_class="default",'
            f'worker_type="decode"}} {self.queued}',
            'dynamo_frontend_model_ready{model="tiny"} 1',
        ]
        for kind, number in self.requests.items():
            labels = f'model="tiny",error_type="{kind}"'
            lines.append(f"dynamo_frontend_requests_total{{{labels}}} {number}")
        for worker_id, (blocks, tokens) in self.loads.items():
            labels = f'worker_id="{worker_id}",dp_rank="0",worker_type="decode"'
            lines.append(f"dynamo_frontend_worker_active_decode_blocks{{{labels}}} {blocks}")
            lines.append(f"dynamo_frontend_worker_active_prefill_tokens{{{labels}}} {tokens}")
            router = f'router_worker_id="{worker_id}",dp_rank="0",worker_type="decode"'
            lines.append(f"dynamo_component_router_worker_registered{{{router}}} 1")
        return "\n".join(lines) + "\n"

    def app(self) -> web.Application:
        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=self.metrics(), status=503 if self.away else 200)

        async def thresholds(request: web.Request) -> web.Response:
            if request.method == "POST":
                values = await request.json()
                self.thresholds |= {k: v for k, v in values.items() if k in self.thresholds}
                return web.json_response({"model": "tiny", **self.thresholds})
            return web.json_response({"thresholds": [{"model": "tiny", **self.thresholds}]})

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        app.router.add_route("*", "/busy_threshold", thresholds)
        return app


@asynccontextmanager
async def frontend() -> AsyncIterator[tuple[Frontend, str]]:
    made = Frontend()
    async with TestServer(made.app()) as server:
        yield made, str(server.make_url("")).rstrip("/")


async def seen(source: LiveDynamo, wanted: Callable[[Snapshot], Any]) -> Snapshot:
    async with asyncio.timeout(patience(5)):
        while True:
            shown = await source.snapshot()
            if wanted(shown):
                return shown
            await asyncio.sleep(0.01)


def worker_id(source: LiveDynamo, role: Role, zone: str) -> int:
    observer, _ = source._open_planes_once()
    return next(
        worker.worker_id
        for worker in observer.router.registry
        if worker.role is role and worker.domains["zone"] == zone
    )


def channel(source: LiveDynamo, kind: str) -> Any:
    observer, _ = source._open_planes_once()
    return getattr(observer.deployment, kind)[0]


async def following(live: Live, source: LiveDynamo, *kinds: str) -> None:
    """Until these channels are followed: earlier messages are lost."""
    wanted = {channel(source, kind) for kind in kinds}
    await until(lambda: wanted <= live.events.followed)


async def test_workers_of_two_namespaces_with_one_id_are_both_shown(live: Live) -> None:
    """As pods of one name in two namespaces of Kubernetes."""
    text = json.dumps(live.values).replace('"dynamo"', '"second"').replace("/dynamo/", "/second/")
    for key, value in json.loads(text.replace("127.0", "10.0")).items():
        live.discovery.put(key, json.dumps(value).encode())
    async with LiveDynamo(replace(OPTIONS, dyn_namespace="*")) as source:
        rows = (await source.snapshot()).workers
    ids = Counter(row.worker_id for row in rows)
    assert set(ids.values()) == {2}
    assert len({(row.worker_id, row.name) for row in rows}) == len(rows) == 8
    hidden = [row for row in rows if row.name.startswith("second/")]
    assert len(hidden) == 4
    assert all(not row.ranks and "it has the id of dynamo/" in (row.reason or "") for row in hidden)


async def test_unreported_parts_are_unknown(live: Live):
    async with LiveDynamo(OPTIONS) as source:
        shown = await source.snapshot()
        assert [row.role for row in shown.workers].count("prefill") == 2
        assert live.requests.requested == [], "no cache is read without a request"
        unknown = {part for part, one in shown.parts.items() if one.unknown}
        assert unknown == {
            "load", "requests", "index", "waiting", "decisions", "transfers", "thresholds",
            "queue", "rates",
        }  # fmt: skip
        for part in ("load", "thresholds", "queue", "rates"):
            assert "--frontend" in shown.parts[part].provide
        assert "--frontend-log" in shown.parts["decisions"].provide
        assert "--router-replica-sync" in shown.parts["decisions"].provide
        assert (shown.decisions, shown.transfers, shown.header.queue) == ((), (), None)
        (row, _) = DomainBoard().view(shown).rows
        assert (row.waiting, row.crossing_share, row.capacity.decode.kv_used_blocks) == (None,) * 3


async def test_engines_report_queues_and_blocks(live: Live):
    async with LiveDynamo(OPTIONS) as source:
        await following(live, source, "passes", "loads")
        decode = worker_id(source, Role.DECODE, "zone-a")
        report = {
            "worker_id": str(decode),
            "dp_rank": 0,
            "queued_requests": {"num_prefill_requests": 2, "num_decode_requests": 1},
        }
        live.events.publish(channel(source, "passes"), msgspec.msgpack.encode(report))
        live.events.publish(channel(source, "passes"), b"\xc1")
        used = encode_kv_metrics(KvMetrics(decode, 0, None, None, 14))
        live.events.publish(channel(source, "loads"), used)
        shown = await seen(source, lambda s: s.unknown("waiting") is None)
        row = next(row for row in shown.workers if row.worker_id == decode)
        assert row.ranks[0].reported.waiting_requests == 3
        shown = await seen(
            source, lambda s: any(r.ranks[0].reported.kv_used_blocks for r in s.workers)
        )
        zone_a = DomainBoard().view(shown).rows[0]
        assert (zone_a.waiting, zone_a.capacity.decode.kv_used_blocks) == (3, 14)


async def test_winners_are_joined_from_replica_sync_events(live: Live):
    async with LiveDynamo(OPTIONS) as source:
        await following(live, source, "sequences")
        prefill = worker_id(source, Role.PREFILL, "zone-a")
        decode = worker_id(source, Role.DECODE, "zone-b")
        live.events.publish(
            channel(source, "sequences"),
            encode_sequences(
                [
                    SequenceAdded("r1", prefill, 0, None, 100, 5),
                    SequenceAdded("r1", decode, 0, (1, 2, 3), 0, 5),
                ]
            ),
        )
        shown = await seen(source, lambda s: s.decisions and s.decisions[0].decode)
        (line,) = shown.decisions
        assert (line.complete, line.blocks, line.cost) == (False, 3, None)
        assert shown.unknown("decisions") is None
        assert "replica-sync" in shown.parts["load"].source
        row = next(row for row in shown.workers if row.worker_id == decode)
        assert row.ranks[0].active_decode_blocks == 3
        zone_a = DomainBoard().view(shown).rows[0]
        assert (zone_a.local, zone_a.crossing) == (0, 1)
        with pytest.raises(UsageProblem, match="reports only the winner"):
            await source.decision(line)


async def test_winners_are_read_from_a_frontends_log(live: Live, tmp_path: Path):
    log = tmp_path / "frontend.log"
    log.write_text("starting\n")
    async with LiveDynamo(OPTIONS, frontend_log=str(log)) as source:
        origin = (await source.snapshot()).parts["decisions"]
        assert (origin.unknown, "no `Selected worker` line yet" in origin.source) == ("", True)
        prefill = worker_id(source, Role.PREFILL, "zone-a")
        with log.open("a") as file:
            file.write(
                f'Selected worker router_mode="kv" request_id="r1" worker_id={prefill} '
                "worker_type=prefill dp_rank=0 logit=2.5 effective_cached_blocks=4.0\n"
            )
        shown = await seen(source, lambda s: s.decisions)
        assert (shown.decisions[0].cost, shown.decisions[0].cached_blocks) == (2.5, 4)
        assert shown.decisions[0].prefill_domains["zone"] == "zone-a"
        assert shown.parts["decisions"].source == "frontend log"


async def test_a_missing_log_is_an_error_before_anything_is_opened():
    with pytest.raises(UsageProblem, match=r"--frontend-log nowhere\.log"):
        LiveDynamo(OPTIONS, frontend_log="nowhere.log")


async def test_frontends_add_load_queue_and_thresholds(live: Live):
    async with frontend() as (made, url), LiveDynamo(OPTIONS, [url]) as source:
        decode = worker_id(source, Role.DECODE, "zone-a")
        prefill = worker_id(source, Role.PREFILL, "zone-a")
        made.loads = {decode: (7, 0), prefill: (0, 1_500)}
        made.queued = 4
        shown = await source.snapshot()
        assert (shown.header.queue, shown.header.frontends, shown.header.mode) == (4, (1, 1), "kv")
        rows = {row.worker_id: row for row in shown.workers}
        assert rows[decode].ranks[0].active_decode_blocks == 7
        assert rows[prefill].ranks[0].active_prefill_tokens == 1_500
        assert rows[prefill].busy, "1,500 > 1,000"
        assert shown.unknown("requests") is not None, "gauges do not count requests"
        assert shown.unknown("load") is None
        # Bookings of replica-sync events are in the gauges already.
        await following(live, source, "sequences")
        live.events.publish(
            channel(source, "sequences"),
            encode_sequences([SequenceAdded("r1", decode, 0, (1, 2, 3), 0, 5)]),
        )
        shown = await seen(source, lambda s: s.decisions)
        rows = {row.worker_id: row for row in shown.workers}
        assert rows[decode].ranks[0].active_decode_blocks == 7
        live.events.publish(
            channel(source, "sequences"), encode_sequences([SequenceFreed("r1", decode, 0, 5)])
        )
        made.away = True
        shown = await source.snapshot()
        assert shown.header.frontends == (0, 1)
        assert "503" in (shown.unknown("queue") or shown.parts["queue"]).unknown


async def test_the_header_has_the_rates_that_frontends_count(live: Live):
    clock = iter(float(second) for second in range(10_000, 20_000))
    async with (
        frontend() as (made, url),
        LiveDynamo(OPTIONS, [url], wall=lambda: next(clock)) as source,
    ):
        history = History()
        made.requests = {"": 700, "overload": 300}

        async def line() -> str:
            shown = await source.snapshot()
            history.add(shown)
            lines = header(shown, None, "", State(1.0), 140, shown.at, history)
            return "".join(text for text, _ in lines[1])

        assert "requests: counting" in await line()
        made.requests = {"": 715, "overload": 305}
        found = await line()
        for part in ("req/s", "refused 25 %", "TTFT p50 - ", "hits - "):
            assert part in found, found
        made.away = True
        assert f"requests/s unknown: {url}: /metrics answered 503" in await line()


async def test_thresholds_are_set_on_the_frontends(live: Live):
    name = "active_prefill_tokens_threshold"
    async with frontend() as (made, url), LiveDynamo(OPTIONS, [url]) as source:
        made.loads = {worker_id(source, Role.PREFILL, "zone-a"): (0, 1_500)}
        assert (await source.snapshot()).thresholds["tiny"][name] == 1_000
        judged = await source.judged("tiny", {name: 2_000})
        assert not any(row.busy for row in judged)
        assert (await source.set_thresholds("tiny", {name: 2_000}))[name] == 2_000
        assert made.thresholds[name] == 2_000
        shown = await source.snapshot()
        assert shown.thresholds["tiny"][name] == 2_000
        assert not any(row.busy for row in shown.workers)


async def test_without_frontends_thresholds_cannot_be_set(live: Live):
    async with LiveDynamo(OPTIONS) as source:
        with pytest.raises(UsageProblem, match="frontends have the busy thresholds"):
            await source.set_thresholds("tiny", {"active_prefill_tokens_threshold": 1})


async def test_caches_are_read_on_request(live: Live):
    async with LiveDynamo(OPTIONS) as source:
        shown = await source.snapshot()
        prefill = [row for row in shown.workers if row.role == "prefill"]
        assert await source.read_index(prefill[0]) == f"reading what {prefill[0].name} caches"
        shown = await seen(source, lambda s: any(r.ranks[0].cached_blocks for r in s.workers))
        assert live.requests.requested == [prefill[0].worker_id]
        assert shown.unknown("index") is None
        assert await source.read_index(None) == "reading the caches of 4 workers"
        await seen(source, lambda s: sum(bool(r.ranks[0].cached_blocks) for r in s.workers) == 2)
        gone = msgspec.structs.replace(prefill[0], worker_id=1)
        with pytest.raises(UsageProblem, match="not registered any more"):
            await source.read_index(gone)


async def test_a_worker_that_leaves_strands_its_domain(live: Live):
    async with LiveDynamo(OPTIONS) as source:
        decode = worker_id(source, Role.DECODE, "zone-a")
        await source.snapshot()
        live.discovery.delete(f"v1/mdc/dynamo/backend/generate/{decode:x}")
        shown = await seen(source, lambda s: len(s.workers) == 3)
        assert DomainBoard().view(shown).rows[0].capacity.state == "stranded"
        codes = {alert.code for alert in shown.alerts}
        assert "DYR0203" in codes, "its endpoint is left without a card"
        assert "DYR0210" not in codes, "DYT0901 says that for every source"


async def test_interrupted_discovery_is_the_problem(live: Live):
    async with LiveDynamo(OPTIONS) as source:
        await source.snapshot()
        observer, _ = source._open_planes_once()
        observer._registrations.interrupted = "connection refused"
        shown = await source.snapshot()
        assert shown.problem == "discovery: connection refused"
        assert len(shown.workers) == 4


async def test_its_view_answers_offline(live: Live):
    async with LiveDynamo(OPTIONS) as source:
        await source.snapshot()
        view = open_view_bytes(await source.save(), "x", "x")
        result = view.route(RouteQuery(token_ids=list(range(64))))
        assert result.ok
        assert not result.certain
        unread = [one for one in view.view.doubts if one.what.endswith("it was not read")]
        assert [one.code for one in unread] == ["DYR0705"], "a cache that nothing read is unknown"


async def test_one_frame_waits_a_moment_for_reports(live: Live):
    async with LiveDynamo(OPTIONS) as source:
        async with asyncio.timeout(patience(5)):
            await source.settle()


async def test_discovery_that_does_not_answer_is_an_error_at_the_start(
    live: Live, monkeypatch: pytest.MonkeyPatch
):
    async def refuse() -> Listed:
        raise Unreachable("etcd does not answer")

    monkeypatch.setattr(live.discovery, "list", refuse)
    before = asyncio.all_tasks()
    with pytest.raises(Unreachable, match="etcd does not answer"):
        async with LiveDynamo(OPTIONS):
            pass
    assert asyncio.all_tasks() == before

"""Predicted and reported reuse: counted by worker, shown by /v1/fleet, the metrics and `audit`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dynctl.documents.audit import AuditRow
from dynctl.serving.records import audit as audit_module
from dynctl.serving.records.audit import ReuseAudit
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.sources.client import FrontendClient
from router_core import (
    BlocksStored,
    Freed,
    IndexMarked,
    KvEvent,
    Router,
    RouterConfig,
    RoutingRequest,
    WorkerLost,
    WorkerUpserted,
    hash_prompt,
)
from tests.dynctl.serving.fleets import WORDS, Site, site
from tests.router_core.fleet import active, apply_all, prompt, request, router, stored, worker
from tests.waiting import until


async def rows(fleet: Site) -> dict[str, AuditRow]:
    client = FrontendClient(fleet.frontend.url)
    return {row.worker: row for row in (await asyncio.to_thread(client.fleet)).audit}


async def twice(fleet: Site, *, stream: bool) -> None:
    """The same prompt, first cold and then cached; the engine reports both."""
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    for _ in range(2):
        blocks = sum(row.cached_blocks for row in ranks(fleet))
        ask = fleet.stream if stream else fleet.chat
        status, _, _ = await ask(WORDS * 4, **more)
        assert status == 200
        if not blocks:
            await until(lambda: sum(row.cached_blocks for row in ranks(fleet)) > 0)


def ranks(fleet: Site) -> list[Any]:
    return [rank for row in fleet.frontend.fleet.rows() for rank in row.ranks]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_what_the_engine_reports_is_compared_with_the_prediction(stream: bool):
    async with site([{"name": "a0"}]) as fleet:
        await fleet.connected()
        await twice(fleet, stream=stream)
        await until(lambda: bool(fleet.frontend.core.audit.rows()))
        await until(lambda: fleet.frontend.core.audit.rows()[0].requests == 2)
        row = (await rows(fleet))["a0"]
        assert (row.requests, row.hits, row.causes) == (2, 2, {})
        assert row.predicted_tokens == row.reported_tokens > 0
        metrics = fleet.frontend.administration.metrics.render()
        hits = 'dynctl_worker_predictions_total{worker="a0",role="aggregated",result="hit"} 2'
        assert hits in metrics


async def test_a_stream_without_usage_is_not_counted():
    async with site([{"name": "a0"}]) as fleet:
        assert (await fleet.stream(WORDS))[0] == 200
        await fleet.idle()
        assert await rows(fleet) == {}


async def test_the_prefill_engine_is_judged_where_decode_receives_its_blocks():
    engines = [{"name": "p0", "role": "prefill"}, {"name": "d0", "role": "decode"}]
    async with site(engines) as fleet:
        await fleet.connected()
        await twice(fleet, stream=False)
        await fleet.idle()
        found = await rows(fleet)
        assert set(found) == {"p0"}
        assert (found["p0"].requests, found["p0"].hits) == (2, 2)
        assert found["p0"].reported_tokens > 0


# -- likely causes ---------------------------------------------------------------------------------


def finished(
    made: Any, wanted: RoutingRequest, cached: int | None, tokens: int | None = None, **more: Any
) -> RequestRecord:
    record = RequestRecord("d", "r", "chat", 0.0, 0.0, **more)
    record.plan = made.plan(wanted)
    record.cached_tokens, record.prompt_tokens = cached, tokens
    return record


@pytest.mark.parametrize(
    ("held", "reported", "tokens", "state", "running", "cause"),
    [
        (2, 32, 40, "current", False, None),
        (2, 40, 40, "current", False, None),
        (2, 0, 44, "current", False, "tokens"),
        # No prompt has so many tokens: the report counts as the whole prompt at most.
        (2, 999_999_998, 999_999_999, "current", False, "tokens"),
        (2, 0, 40, "gapped", False, "index"),
        (2, 0, None, "current", False, "not_reused"),
        (0, 32, 40, "current", False, "not_indexed"),
        (0, 32, 40, "current", True, "running"),
    ],
)
def test_a_miss_has_a_likely_cause(
    held: int, reported: int, tokens: int | None, state: Any, running: bool, cause: str | None
):
    made, wanted = router(worker(1)), request(40)
    if held:
        apply_all(made, stored(1, held))
    apply_all(made, IndexMarked(1, 0, state))
    if running:
        apply_all(made, replace(active(1, "same"), sequence_hashes=wanted.sequence_hashes))
    audit = ReuseAudit(made)
    audit.on_finished(finished(made, wanted, reported, tokens))
    [row] = audit.rows()
    assert (row.requests, row.hits) == (1, int(cause is None))
    assert row.causes == ({} if cause is None else {cause: 1})
    assert (row.predicted_tokens, row.reported_tokens) == (held * 16, min(reported, 40))


def test_an_engine_that_does_not_reuse_is_not_blamed_on_an_estimated_index():
    """An estimate is as current as it can be: the engine may not cache at all."""
    made, wanted = Router(RouterConfig(), learns=True), request(40)
    apply_all(made, WorkerUpserted(worker(1, kv_events=False)))
    before = request(40, "before")
    apply_all(made, made.booking(made.plan(before).final, before), Freed("before"))
    audit = ReuseAudit(made)
    audit.on_finished(finished(made, wanted, 0, 40))
    [row] = audit.rows()
    assert (row.predicted_tokens, row.causes) == (32, {"not_reused": 1})


@pytest.mark.parametrize("weight", [0.0, 0.75, 1.0])
def test_blocks_below_the_device_are_predicted_in_full(weight: float):
    made = router(worker(1), host_cache_hit_weight=weight, disk_cache_hit_weight=weight)
    hashes = hash_prompt(prompt(100), 16)
    names, locals_ = hashes.sequence, hashes.local
    for tier, start, end in (("device", 0, 2), ("host_pinned", 2, 4), ("disk", 4, 5)):
        parent = names[start - 1] if start else None
        event = BlocksStored(parent, names[start:end], locals_[start:end], tier=tier)
        apply_all(made, KvEvent(1, 0, event))
    wanted = replace(request(100), local_hashes=locals_)
    audit = ReuseAudit(made)
    audit.on_finished(finished(made, wanted, 80))
    audit.on_finished(finished(made, wanted, 32))
    [row] = audit.rows()
    assert (row.hits, row.causes) == (1, {"not_reused": 1})
    assert (row.predicted_tokens, row.reported_tokens) == (160, 112)


def test_what_cannot_be_compared_is_not_counted():
    made = router(worker(1))
    audit = ReuseAudit(made)
    audit.on_finished(finished(made, request(40), None))
    audit.on_finished(finished(made, request(40), 16, prompts=2))
    blind = replace(
        request(40), overlap_modelled=False, notes=("cache overlap not modelled: no tokenizer",)
    )
    audit.on_finished(finished(made, blind, 16))
    assert audit.skipped == {"cache overlap not modelled: no tokenizer": 1}
    audit.on_finished(finished(router(), request(40), 16))
    assert audit.rows() == []


def test_workers_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_module, "MAX_WORKERS", 1)
    made = router(worker(1))
    audit = ReuseAudit(made)
    audit.on_finished(finished(made, request(40), 0))
    two = router(worker(2))
    audit.on_finished(finished(two, request(40), 0))
    assert [row.worker_id for row in audit.rows()] == [1]
    apply_all(made, WorkerLost(1))
    assert audit.rows() == []

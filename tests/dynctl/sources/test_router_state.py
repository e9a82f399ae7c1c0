"""Settings and load of a live Dynamo: what is read, and what stays unknown."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dynctl.adapters.ports import ChannelMessage
from dynctl.cli.config_report import remote_report
from dynctl.documents.config import NOT_EXPORTED
from dynctl.documents.view import SavedView, decode_view
from dynctl.screens.canvas import Canvas
from dynctl.screens.config import config_report
from dynctl.serving.dynamo.load_mirror import known_as_sums
from dynctl.sources.dynamo.router_state import known_settings, take_load, take_settings
from dynctl.sources.view import ViewSource
from dynctl.wire.dynamo.active_sequences import SequenceAdded, SequencePrefillDone
from dynctl.wire.dynamo.events import KvMetrics, encode_kv_metrics
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, RankLoad
from router_core import SETTINGS, THRESHOLD_SETTINGS
from tests.dynctl.serving.test_observer import Rig, rig
from tests.waiting import until

__all__ = ["rig"]

NO_THRESHOLDS: dict[str, Any] = dict.fromkeys(THRESHOLD_SETTINGS)


def frontend(*loads: tuple[int, int, int], **facts: Any) -> FrontendMetrics:
    """A frontend that counts (worker id, decode blocks, prefill tokens)."""
    ranks = {(worker, 0): RankLoad(blocks, tokens) for worker, blocks, tokens in loads}
    return FrontendMetrics(rank_loads=ranks, **({"kv_routing": True, "kv_events": True} | facts))


def codes(doubts: Any) -> list[str]:
    return [one.code for one in doubts]


async def test_gauges_are_the_rest_beyond_the_requests_that_were_seen(rig: Rig) -> None:
    prefill, decode = rig.worker_id("prefill"), rig.worker_id("backend")
    observer, load = rig.observer, rig.router.load
    add = observer.load._sequence
    add(SequenceAdded("r1", decode, 0, (1, 2, 3), 0, router_id=5))
    add(SequenceAdded("r2", prefill, 0, None, 40, router_id=5))
    gauges = [frontend((decode, 5, 0), (prefill, 0, 100))]
    take_load(observer, gauges)
    source, doubts = take_load(observer, gauges)  # a second reading replaces the first
    assert load.decode_blocks[rig.slot(decode)] == 5
    assert load.prefill_tokens[rig.slot(prefill)] == 100
    assert source.startswith("the /metrics of a frontend and replica-sync events")
    assert [(one.anonymous_blocks, one.prefill_tokens) for one in known_as_sums(rig.router)] == [
        (2, 0),
        (0, 60),
    ]
    # Another frontend may have finished the 60 tokens: its gauge alone cannot show that.
    assert codes(doubts) == ["DYR0715", "DYR0741"]
    _, doubts = take_load(observer, [frontend((decode, 3, 0), (prefill, 0, 40))])
    assert (known_as_sums(rig.router), doubts) == ([], [])
    assert load.decode_blocks[rig.slot(decode)] == 3


async def test_tokens_that_another_frontend_has_finished_are_not_counted(rig: Rig) -> None:
    prefill, observer = rig.worker_id("prefill"), rig.observer
    slot = rig.slot(prefill)
    for event in (
        SequenceAdded("r1", prefill, 0, None, 40, router_id=5),
        SequenceAdded("r2", prefill, 0, None, 30, router_id=5),
        SequencePrefillDone("r1", prefill, 0, 5),
    ):
        observer.load._sequence(event)
    for gauge, tokens in ((70, 30), (30, 30), (40, 30), (95, 95)):
        _, doubts = take_load(observer, [frontend((prefill, 0, gauge))])
        assert rig.router.load.prefill_tokens[slot] == tokens, gauge
        assert ("DYR0741" in codes(doubts)) is (gauge == 95)


async def test_each_of_several_frontends_decides_on_its_own_load(rig: Rig) -> None:
    observer, decode = rig.observer, rig.worker_id("backend")
    first, second = frontend((decode, 5, 0)), frontend((decode, 0, 0))
    # A frontend publishes active requests: it is unknown whether it is one of these.
    assert codes(take_load(observer, [first, second])[1])[0] == "DYR0709"
    for key in [key for key in rig.values if "active_sequences_events" in key]:
        rig.discovery.delete(key)
    await until(lambda: not observer.deployment.sequences)
    assert codes(take_load(observer, [first, second])[1])[0] == "DYR0740"
    assert "DYR0740" not in codes(take_load(observer, [first, first])[1])


@pytest.fixture
def thresholds() -> dict[str, Any]:
    return {"tiny": {**NO_THRESHOLDS, "active_decode_blocks_threshold": 0.5}}


async def test_a_worker_whose_report_is_unknown_may_be_refused(
    rig: Rig, thresholds: dict[str, Any]
) -> None:
    observer = rig.observer
    assert "DYR0742" not in codes(take_settings(observer, {"tiny": NO_THRESHOLDS}, [])[1])
    assert "DYR0742" in codes(take_settings(observer, thresholds, [])[1])
    for item in observer.deployment.workers:
        report = KvMetrics(item.worker.worker_id, 0, None, None, 9)
        observer.load.reported.add((report.worker_id, 0))
    assert "DYR0742" not in codes(take_settings(observer, thresholds, [])[1])


async def test_a_raised_threshold_does_not_free_a_worker(
    rig: Rig, thresholds: dict[str, Any]
) -> None:
    observer, decode = rig.observer, rig.worker_id("backend")
    take_settings(observer, thresholds, [])
    worker = rig.router.registry.get(decode)
    assert worker is not None
    total = worker.runtime_config.total_kv_blocks
    assert total is not None

    def report(used: int) -> None:
        payload = encode_kv_metrics(KvMetrics(decode, 0, None, None, used))
        observer.load.take_metrics(ChannelMessage("kv_metrics", 1, 1, 0, payload))

    report(total - 1)
    assert "DYR0746" not in codes(take_settings(observer, thresholds, [])[1])
    higher = {"tiny": {**NO_THRESHOLDS, "active_decode_blocks_threshold": 1.0}}
    assert "DYR0746" in codes(take_settings(observer, higher, [])[1])
    report(1)
    assert "DYR0746" not in codes(take_settings(observer, higher, [])[1])


async def test_settings_that_no_frontend_exports_are_unknown(
    rig: Rig, thresholds: dict[str, Any]
) -> None:
    observer = rig.observer
    no_caches = frontend(uses_caches=False, kv_events=False)
    take_settings(observer, thresholds, [no_caches])
    known = known_settings(observer, thresholds, [no_caches])
    origins = {name: source for name, (_, source) in known.items()}
    view = ViewSource(SavedView(rig.router, 0.0, origins=origins), "etcd")
    for source in (view, ViewSource(decode_view(view.save()), "view")):
        rows = {row.name: row for row in source.config().settings}
        assert rows.keys() == SETTINGS.keys()
        assert (rows["overlap_score_credit"].value, rows["overlap_score_credit"].known) == (0, True)
        assert rows["router_mode"].value == "kv"
        assert rows["active_decode_blocks_threshold"].value == 0.5
        assert rows["active_decode_blocks_threshold"].source == "frontend /busy_threshold"
        temperature = rows["router_temperature"]
        assert (temperature.value, temperature.known, temperature.source) == (
            None,
            False,
            NOT_EXPORTED,
        )
    drawn = config_report(remote_report("etcd", view.config()), Canvas(100))
    assert f" of {len(SETTINGS)} settings are unknown" in drawn
    assert re.search(r"router_temperature +unknown +not exported", drawn)
    # A frontend that reads caches and no events is in approximate mode.
    approximate = frontend(uses_caches=True, kv_events=False)
    assert known_settings(observer, {}, [approximate])["use_kv_events"][0] is False
    assert "DYR0718" in codes(take_settings(observer, {}, [approximate])[1])
    assert "router_mode" not in known_settings(observer, {}, [frontend(kv_routing=False)])
    assert "overlap_score_credit" not in known_settings(observer, {}, [frontend()])


async def test_a_card_decides_every_setting(rig: Rig) -> None:
    key = next(key for key in rig.values if key.startswith("v1/mdc/") and "backend" in key)
    value = rig.values[key]
    value["card_json"]["router_config"] = {"router_mode": "round_robin", "kv_router_config": {}}
    rig.discovery.put(key, json.dumps(value).encode())
    await until(lambda: any(i.card.router_config for i in rig.observer.deployment.workers))
    _, doubts = take_settings(rig.observer, {}, [])
    assert "DYR0716" in codes(doubts)
    known = known_settings(rig.observer, {})
    assert known["router_temperature"] == (0.0, "the workers' cards")
    assert known["router_mode"] == ("round-robin", "the workers' cards")

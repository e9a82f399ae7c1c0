"""The metrics: names and labels as Dynamo's captured ones, and numbers that follow the requests."""

import asyncio
import gc
import re
from collections import defaultdict
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from dynctl.base.tasks import SLICE
from dynctl.documents.audit import AuditRow
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.records.domain_metrics import MAX_VALUES, OTHER, DomainCounters, domain_gauges
from dynctl.serving.records.metrics import Metrics, error_type
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.exposition import Counter, Family, Histogram, number
from dynctl.serving.telemetry.metric_families import families
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import (
    BlocksStored,
    Cleared,
    KvEvent,
    LoadReported,
    ModelRuntimeConfig,
    Role,
    Worker,
    WorkerWithDpRank,
    constraints,
    hash_prompt,
)
from tests.dynctl.serving.routed import request, worker

CAPTURES = Path(__file__).parents[2] / "captures"
#: In Dynamo 1.6.1, but without a sample in the captures (it appears with the first rejection).
NOT_CAPTURED = {"dynamo_frontend_model_rejection_total"}
POLICY = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "preferred",
          "kv_transfer_preferred_weight": 0.5}  # fmt: skip


def captured():
    """name -> (type, help, label names, le values), over both captures."""
    known: dict[str, list] = defaultdict(lambda: ["", "", set(), set()])
    for path in ("metrics-frontend-agg.txt", "metrics-frontend-disagg.txt"):
        for line in (CAPTURES / path).read_text().splitlines():
            if line.startswith("# HELP "):
                name, text = line.removeprefix("# HELP ").split(" ", 1)
                known[name][1] = text
            elif line.startswith("# TYPE "):
                name, kind = line.removeprefix("# TYPE ").split(" ", 1)
                known[name][0] = kind
            elif line and not line.startswith("#"):
                name = re.split(r"[{ ]", line)[0]
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                base = base if known.get(base, [""])[0] == "histogram" else name
                labels = re.findall(r'(\w+)="([^"]*)"', line)
                known[base][2] |= {key for key, _ in labels} - {"le"}
                known[base][3] |= {float(value) for key, value in labels if key == "le"}
    return known


KNOWN = captured()
OURS = families(router_id=2324035517153284901)


@pytest.mark.parametrize("name", [n for n in OURS if n.startswith("dynamo_")])
@pytest.mark.seed("smart-routing-guide-0.9: monitoring: metrics")
def test_a_dynamo_name_means_what_it_means_in_dynamo(name):
    family = OURS[name]
    if name in NOT_CAPTURED:
        assert name not in KNOWN
        return
    kind, text, labels, edges = KNOWN[name]
    assert family.kind == kind
    assert family.help == text
    assert set(family.label_names) == labels
    if kind == "histogram":
        assert {*family.bounds, float("inf")} == edges


def test_ids_are_written_as_dynamo_writes_them():
    """Decimal under dynamo_frontend_ and router_id, hex in the component labels."""
    family = OURS["dynamo_component_router_kv_hit_rate"]
    assert family.constant == {
        "dynamo_component": "backend",
        "dynamo_namespace": "dynamo",
        "worker_id": "2040a1fd55501325",
        "router_id": "2324035517153284901",
    }


def service(*workers, **settings):
    from router_core import RouterConfig

    made = RoutingService(
        RouterConfig().with_values(settings), clock=lambda: 100.0, wall=lambda: 1_000.0,
        sample=lambda: 0.0,
    )  # fmt: skip
    for one in workers:
        assert made.membership.upsert(one).ok
    return made


def disaggregated():
    return service(
        worker(1, "prefill", zone="a", policy=POLICY),
        worker(2, "prefill", zone="b", policy=POLICY),
        worker(3, "decode", zone="a"),
        worker(4, "decode", zone="b"),
    )


def scraped(metrics):
    """(sample name, labels without the process's own) -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in PROCESS}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


PROCESS = ("dynamo_component", "dynamo_namespace", "router_id")


def record(request_id="r1", **fields):
    made = RequestRecord(request_id, "q", "chat_completions", 90.0, 1_000.0, model="tiny")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def serve_one(made, metrics, one, *, end=99.0, **fields):
    """One request through plan, booking and end, as the frontend does it."""
    for observer in made.observers:
        made.observers.remove(observer)
    made.observers.append(metrics)
    wanted = request(request_id=one.decision_id, **fields)
    plan = made.plan(wanted)
    for hop in (plan.prefill, plan.decode):
        if hop is not None and hop.winner is not None and plan.ok:
            assert made.book(hop, wanted, one).ok
    one.isl_tokens, one.route_s = wanted.isl_tokens, 0.0004
    made.decided(plan, wanted, one)
    if plan.ok:
        one.first_token_at = 95.0
        for observer in made.observers:
            observer.on_first_token(one)
        one.output_events, one.outcome, one.status = 5, "success", 200
    else:
        one.outcome, one.status = "refused", 503
    one.finished_at = end
    for observer in made.observers:
        observer.on_finished(one)
    made.free(wanted.id)
    return plan


def labels(**pairs):
    return tuple(sorted(pairs.items()))


def test_a_served_request_is_counted_everywhere():
    made = disaggregated()
    metrics = Metrics(made, router_id=7)
    serve_one(made, metrics, record(stream=True))
    got = scraped(metrics)
    kind = {"endpoint": "chat_completions", "model": "tiny", "request_type": "stream"}
    tiny = labels(model="tiny")
    assert got["dynamo_frontend_requests_started_total", labels(**kind)] == 1
    done = labels(**kind, status="success", error_type="")
    assert got["dynamo_frontend_requests_total", done] == 1
    assert got["dynamo_frontend_request_duration_seconds_sum", tiny] == 9.0
    assert got["dynamo_frontend_time_to_first_token_seconds_sum", tiny] == 5.0
    assert got["dynamo_frontend_time_to_first_token_seconds_count", tiny] == 1
    assert got["dynamo_frontend_inter_token_latency_seconds_count", tiny] == 4
    assert got["dynamo_frontend_inter_token_latency_seconds_sum", tiny] == 4.0
    assert got["dynamo_frontend_input_sequence_tokens_sum", tiny] == 34
    assert got["dynamo_frontend_output_tokens_total", tiny] == 5
    assert got["dynamo_frontend_inflight_requests", tiny] == 0
    hex_id = {"worker_id": "7"}
    assert got["dynamo_component_router_requests_started_total", labels(**hex_id)] == 2
    assert got["dynamo_component_router_requests_total", labels(**hex_id)] == 1
    assert got["dynamo_router_overhead_total_ms_count", ()] == 1
    assert got["dynamo_router_overhead_total_ms_bucket", labels(le="0.81")] == 1
    assert got["dynamo_router_overhead_total_ms_bucket", labels(le="0.27")] == 0
    rank = labels(worker_id="1", dp_rank="0", worker_type="prefill")
    assert got["dynamo_frontend_worker_last_time_to_first_token_seconds", rank] == 5.0
    rank = labels(worker_id="3", dp_rank="0", worker_type="decode")
    assert got["dynamo_frontend_worker_last_inter_token_latency_seconds", rank] == 1.0
    assert got["dynctl_decisions_total", labels(stage="decode", outcome="selected")] == 1


@pytest.mark.seed("smart-routing-guide-0.9: monitoring: metrics")
def test_hit_rate_and_lost_overlap():
    made = service(worker(1), worker(2))
    metrics = Metrics(made, router_id=7)
    hashed = hash_prompt(range(34), 16)
    event = BlocksStored(None, hashed.sequence, hashed.local)
    assert made.apply(KvEvent(1, 0, event)).ok
    serve_one(made, metrics, record("a"))
    serve_one(made, metrics, record("b"), allowed_worker_ids=frozenset({2}))
    got = scraped(metrics)
    process = {"worker_id": "7"}
    # 2 of ceil(34 / 16) = 3 blocks, then none: the other worker was not allowed, so not lost.
    assert got["dynamo_component_router_kv_hit_rate_sum", labels(**process)] == pytest.approx(2 / 3)
    assert got["dynamo_component_router_kv_hit_rate_count", labels(**process)] == 2
    cached = "dynamo_component_router_kv_selected_cached_prefix_tokens_total"
    assert got[cached, labels(**process, model="tiny", phase="aggregated")] == 32
    applied = labels(**process, event_type="stored", status="ok")
    assert got["dynamo_component_kv_cache_events_applied_total", applied] == 1


def test_overlap_that_load_outweighs_is_lost():
    made = service(worker(1), worker(2))
    metrics = Metrics(made, router_id=7)
    hashed = hash_prompt(range(34), 16)
    made.apply(KvEvent(1, 0, BlocksStored(None, hashed.sequence, hashed.local)))
    busy = request(range(1000, 2000), "busy", allowed_worker_ids=frozenset({1}))
    made.book(made.plan(busy).final, busy, record("busy"))
    serve_one(made, metrics, record())
    got = scraped(metrics)
    where = labels(worker_id="7", worker_type="prefill")
    assert got["dynamo_component_router_non_max_overlap_selections_total", where] == 1
    assert got["dynamo_component_router_overlap_blocks_lost_sum", where] == 2


def test_gauges_follow_the_router_while_a_request_runs():
    made = disaggregated()
    metrics = Metrics(made, router_id=7)
    made.observers.append(metrics)
    running, wanted = record(), request()
    plan = made.plan(wanted)
    for hop in (plan.prefill, plan.decode):
        assert hop is not None
        made.book(hop, wanted, running)
    made.decided(plan, wanted, running)
    got = scraped(metrics)
    tiny = labels(model="tiny")
    assert got["dynamo_frontend_inflight_requests", tiny] == 1
    assert got["dynamo_frontend_queued_requests", tiny] == 1
    rank = labels(worker_id="1", dp_rank="0", worker_type="prefill")
    assert got["dynamo_frontend_worker_active_prefill_tokens", rank] == 34
    rank = labels(worker_id="3", dp_rank="0", worker_type="decode")
    assert got["dynamo_frontend_worker_active_decode_blocks", rank] == 2
    running.first_token_at = 95.0
    assert scraped(metrics)["dynamo_frontend_queued_requests", tiny] == 0


def test_domains_show_load_capacity_and_decisions():
    made = disaggregated()
    metrics = Metrics(made, router_id=7)
    made.apply(LoadReported(4, 0, kv_used_blocks=75_000))
    made.membership.set_available(2, "refused connection")
    serve_one(made, metrics, record("a"))
    # b's prefill worker is gone, so a decode pinned to b crosses from a.
    from router_core import Pin

    serve_one(made, metrics, record("b"), pin_decode=Pin(4))
    got = scraped(metrics)
    decode_a = labels(domain="zone", value="a", role="decode")
    prefill_b = labels(domain="zone", value="b", role="prefill")
    assert got["dynctl_domain_workers", decode_a] == 1
    assert got["dynctl_domain_total_kv_blocks", decode_a] == 75379
    assert got["dynctl_domain_workers_ready", prefill_b] == 0
    assert got["dynctl_domain_workers_ready", decode_a] == 1
    assert got["dynctl_domain_workers_busy", decode_a] == 0
    assert got["dynctl_domain_decisions_total", decode_a] == 1
    local = labels(domain="zone", value="a", transfer="local")
    crossing = labels(domain="zone", value="a", transfer="crossing")
    assert got["dynctl_domain_transfers_total", local] == 1
    assert got["dynctl_domain_transfers_total", crossing] == 1
    assert (
        got["dynctl_worker_ready", labels(worker="prefill-2", worker_id="2", role="prefill")] == 0
    )


def test_a_busy_domain_is_seen():
    made = service(worker(4, "decode", zone="b"), active_decode_blocks_threshold=0.5)
    made.apply(LoadReported(4, 0, kv_used_blocks=75_000))
    got = scraped(Metrics(made, router_id=7))
    assert got["dynctl_domain_workers_busy", labels(domain="zone", value="b", role="decode")] == 1


def test_refusals_by_kind():
    made = service(worker(1, total=100), active_decode_blocks_threshold=0.1)
    metrics = Metrics(made, router_id=7)
    made.apply(LoadReported(1, 0, active_decode_blocks=50))
    serve_one(made, metrics, record("busy"))
    made.apply(LoadReported(1, 0, active_decode_blocks=0))
    serve_one(made, metrics, record("taint"), constraints=constraints(["gpu=b200"]))
    got = scraped(metrics)
    where = labels(endpoint="chat_completions", model="tiny")
    assert got["dynamo_frontend_model_rejection_total", where] == 1
    kind = {"endpoint": "chat_completions", "model": "tiny", "request_type": "unary"}
    for error in ("overload", "unavailable"):
        key = labels(**kind, status="error", error_type=error)
        assert got["dynamo_frontend_requests_total", key] == 1


def test_a_client_cannot_make_series():
    made = service(worker(1))
    metrics = Metrics(made, router_id=7)
    for i in range(20):
        serve_one(made, metrics, record(f"r{i}", model=f"made-up-{i}"), model=f"made-up-{i}")
    text = metrics.render()
    assert "made-up" not in text
    assert 'model="unknown_model"' in text


@pytest.mark.parametrize(
    ("outcome", "status", "expected"),
    [
        ("success", 200, ""),
        ("cancelled", 499, "cancelled"),
        ("client_error", 404, "not_found"),
        ("client_error", 400, "validation"),
        ("upstream_error", 502, "internal"),
        ("internal", 500, "internal"),
        ("refused", 503, "unavailable"),
    ],
)
def test_error_types(outcome, status, expected):
    assert error_type(record(outcome=outcome, status=status)) == expected


def test_a_client_that_left_is_counted():
    made = service(worker(1))
    metrics = Metrics(made, router_id=7)
    metrics.on_finished(record(outcome="cancelled", finished_at=91.0))
    assert scraped(metrics)["dynamo_frontend_disconnected_clients", ()] == 1


def test_model_cards_and_readiness():
    card = ModelRuntimeConfig(total_kv_blocks=512, max_num_seqs=256, max_num_batched_tokens=8192)
    made = service(
        Worker(1, "d", "tiny", Role.DECODE, runtime_config=card, can_prefill=False),
        Worker(2, "p", "tiny", Role.PREFILL, runtime_config=card),
    )
    metrics, tiny = Metrics(made, router_id=7), labels(model="tiny")
    got = scraped(metrics)
    assert got["dynamo_frontend_model_ready", tiny] == 1
    assert got["dynamo_frontend_model_total_kv_blocks", tiny] == 512
    assert got["dynamo_frontend_model_kv_cache_block_size", tiny] == 16
    assert got["dynamo_frontend_model_max_num_seqs", tiny] == 256
    made.membership.set_available(2, "gone")
    assert scraped(metrics)["dynamo_frontend_model_ready", tiny] == 0


def test_refused_events_have_dynamos_words():
    made = service(worker(1))
    made.apply(KvEvent(1, 0, BlocksStored(99, [5], [6])))
    made.apply(KvEvent(1, 0, Cleared()))
    got = scraped(Metrics(made, router_id=7))
    # The parser of the client library appends the suffix that Dynamo leaves out.
    name = "dynamo_component_kv_cache_events_applied_total"
    process = {"worker_id": "7"}
    refused = labels(**process, event_type="stored", status="parent_block_not_found")
    assert got[name, refused] == 1
    assert got[name, labels(**process, event_type="cleared", status="ok")] == 1


def test_last_values_leave_with_their_worker():
    made = service(worker(1))
    metrics = Metrics(made, router_id=7)
    serve_one(made, metrics, record())
    assert "worker_last_input_sequence_tokens{" in metrics.render()
    made.membership.remove(1)
    assert "worker_last_input_sequence_tokens{" not in metrics.render()


def test_domain_values_are_bounded():
    family = Family("x_total", "counter", "x", ("domain", "value", "role"))
    other = Family("y_total", "counter", "y", ("domain", "value", "transfer"))
    counted = Counter(family)
    domains = DomainCounters(counted, Counter(other))
    for i in range(MAX_VALUES + 50):
        made = service(worker(1, zone=f"z{i}"))
        (chosen,) = made.router.registry
        domains.chosen(chosen)
    assert len(counted.rows) == MAX_VALUES + 1
    assert counted.rows["zone", OTHER, "aggregated"] == 50


def test_memory_is_shown():
    memory = DecisionMemory()
    made = service(worker(1))
    memory.record(made.plan(request()), 0.0)
    got = scraped(Metrics(made, router_id=7, memory=memory))
    assert got["dynctl_decision_memory_plans", ()] == 1
    assert got["dynctl_decision_memory_bytes", ()] == memory.size


def test_histogram_rows_are_cumulative_and_escaped():
    family = Family("h", "histogram", 'a "help"\nline', ("m",), None, (1, 2.5))
    histogram = Histogram(family)
    for value in (0.5, 1, 2, 9):
        histogram.observe(value, ('we"ird\n\\',))
    parsed = next(iter(text_string_to_metric_families(histogram.text())))
    assert [(s.name, s.labels.get("le"), s.value) for s in parsed.samples] == [
        ("h_bucket", "1", 2),
        ("h_bucket", "2.5", 3),
        ("h_bucket", "+Inf", 4),
        ("h_sum", None, 12.5),
        ("h_count", None, 4),
    ]
    assert {s.labels["m"] for s in parsed.samples} == {'we"ird\n\\'}


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (0.25, "0.25"), (float("inf"), "+Inf"), (float("-inf"), "-Inf"),
     (float("nan"), "NaN"), (1e-05, "1e-05"), (2**60, "1.152921504606847e+18")],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


async def test_over_http_in_slices(monkeypatch):
    monkeypatch.setattr("dynctl.serving.records.metrics.SLICE_S", 0.0)
    made = service(worker(1, zone="a"))
    metrics = Metrics(made, router_id=7)
    app = web.Application()
    app.router.add_get("/metrics", metrics.handle)
    async with TestClient(TestServer(app)) as client:
        answer = await client.get("/metrics")
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await answer.text() == metrics.render()


def test_the_samples_of_many_workers_come_in_pieces_of_one_moment():
    made = service(*(worker(number, name=f"w{number}") for number in range(1, 1001)))
    metrics = Metrics(made, router_id=7)
    whole, pieces, lost = metrics.render(), [], False
    for piece in metrics.parts():
        pieces.append(piece)
        if "dynamo_frontend_worker_active_decode_blocks{" in piece and not lost:
            lost = made.membership.remove(1000).ok
    assert lost
    assert "".join(pieces) == whole
    most = max(piece.count("\n") for piece in pieces if "worker_" in piece)
    assert most <= SLICE
    assert len(pieces) > 6 * (1000 // SLICE)


def test_what_requests_left_of_each_worker_comes_in_pieces():
    made = service(*(worker(number, name=f"w{number}") for number in range(1, 1001)))
    rows = [AuditRow(f"w{index}", index, "aggregated") for index in range(1, 1001)]
    metrics = Metrics(made, router_id=7, audit=lambda: rows)
    for index in range(1, 1001):
        made.engine_failures[f"w{index}", "reset"] += 1
        made.set_condition("EVENTS_LOST", f"w{index}", "1 batch is lost")
        metrics._last_ttft[WorkerWithDpRank(index, 0), "decode"] = 0.5
    pieces = list(metrics.parts())
    most = max(piece.count("\n") for piece in pieces)
    assert most <= SLICE
    whole = "".join(pieces)
    for name in (
        "dynctl_engine_failures_total",
        "dynctl_worker_reported_cached_tokens_total",
        "dynamo_frontend_worker_last_time_to_first_token_seconds",
    ):
        assert whole.count(f"\n{name}{{") == 1000, name
        assert whole.count(f"# TYPE {name} ") == 1


def test_no_step_of_a_scrape_makes_an_object_for_each_worker(no_collection: None) -> None:
    """A garbage collection comes with each hundred objects."""
    made = service(*(worker(number, name=f"w{number}") for number in range(1, 1001)))
    metrics, most = Metrics(made, router_id=7), 0
    for index in range(1, 1001):
        metrics._last_isl[WorkerWithDpRank(index, 0), "decode"] = 64.0
    made.health()
    before, _, _ = gc.get_count()
    for _ in metrics.parts():
        now, _, _ = gc.get_count()
        most, before = max(most, now - before), now
    assert most < 500


def test_domains_are_read_in_steps_without_a_worker_that_left_meanwhile(monkeypatch):
    workers = [worker(number, "decode", zone="a", total=10) for number in range(1, 101)]
    made = service(*workers)
    registry, read, steps = made.router.registry, 0, 0
    slots = registry.slots

    def counted(worker_id):
        nonlocal read
        read += 1
        return slots(worker_id)

    monkeypatch.setattr(registry, "slots", counted)

    def watched():
        tables = yield from domain_gauges(made.router)
        assert tables["dynctl_domain_workers"] == {key: 99}
        assert tables["dynctl_domain_total_kv_blocks"] == {key: 990}

    key = ("zone", "a", "decode")
    for text in watched():
        assert not text
        steps += 1
        assert 0 < read <= SLICE
        if steps == 1:
            assert made.membership.remove(100).ok
        read = 0
    assert 0 < read <= SLICE
    assert steps == 100 // SLICE


async def test_the_canary_counts():
    metrics = Metrics(service(), router_id=7)
    task = asyncio.create_task(metrics.watch_event_loop())
    try:
        for _ in range(500):
            await asyncio.sleep(0.01)
            if scraped(metrics)["dynamo_frontend_event_loop_delay_seconds_count", ()]:
                break
        else:
            pytest.fail("the canary did not count within 5 s")
    finally:
        task.cancel()

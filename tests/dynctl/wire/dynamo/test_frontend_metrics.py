"""Reading a Dynamo frontend's metrics: captured answers, adding up."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.frontend_metrics import (
    MAX_PROBLEMS,
    FrontendMetrics,
    ModelFacts,
    QueuePending,
    RankLoad,
    add_loads,
    read_frontend_metrics,
)

CAPTURES = Path(__file__).parents[3] / "captures"


def captured(name: str) -> FrontendMetrics:
    return read_frontend_metrics((CAPTURES / f"metrics-frontend-{name}.txt").read_bytes())


def test_an_aggregated_fleet():
    read = captured("agg")
    assert read.rank_loads == {(2324035517153284872, 0): RankLoad(0, 0, "decode")}
    # The idle worker has no load row yet; it is registered all the same.
    assert read.registered == {
        (2324035517153284872, 0): "decode",
        (2324035517153284879, 0): "decode",
    }
    assert read.models == {"tiny": ModelFacts(True, 16, 512, 8192, 256, None)}
    assert read.queues == (QueuePending("tiny", "default", "decode", 0, 0, 0),)
    assert (read.kv_routing, read.kv_events) == (True, True)
    assert read.event_source_mismatches == {"dynamo.backend.generate": 0}
    assert (read.rejections, read.problems) == ({}, ())


def test_a_disaggregated_fleet():
    read = captured("disagg")
    assert {rank: load.worker_type for rank, load in read.rank_loads.items()} == {
        (2324035517153284941, 0): "prefill",
        (2324035517153284948, 0): "decode",
        (2324035517153284967, 0): "prefill",
    }
    assert [queue.worker_type for queue in read.queues] == ["decode", "prefill"]
    assert read.models["tiny"].total_kv_blocks == 128


@pytest.mark.parametrize(
    ("name", "routing", "events"),
    [
        ("agg", True, True),
        ("no-kv-events", True, False),
        ("round-robin", False, False),
        ("model-gone", None, None),
    ],
)
def test_how_the_frontend_routes(name, routing, events):
    read = captured(name)
    assert (read.kv_routing, read.kv_events) == (routing, events)


def test_a_frontend_shows_whether_it_reads_caches_and_other_routers():
    assert (captured("agg").uses_caches, captured("agg").load_sources) == (True, 2)
    assert captured("no-kv-events").uses_caches is True
    read = captured("round-robin")
    assert (read.uses_caches, read.load_sources) == (None, None)
    # As with --router-kv-overlap-score-credit 0, seen with Dynamo 1.6.1.
    policy = "dynamo_component_router_approximate_cache_effective_policy"
    rows = f'{policy}{{policy="disabled"}} 1\n{policy}{{policy="ttl"}} 0\n'
    assert read_frontend_metrics(rows.encode()).uses_caches is False


def test_facts_outlive_the_model():
    assert captured("model-gone").models == {"tiny": ModelFacts(None, 16, 512, 8192, 256, None)}


def test_rows_under_load():
    read = read_frontend_metrics(
        b'dynamo_frontend_worker_active_decode_blocks{dp_rank="1",worker_id="18446744073709551615",'
        b'worker_type="decode"} 30\n'
        b'dynamo_frontend_worker_active_prefill_tokens{dp_rank="1",'
        b'worker_id="18446744073709551615",worker_type="decode"} 8.4e+01\n'
        b'dynamo_frontend_model_rejection_total{endpoint="completions",model="tiny"} 4\n'
        b'dynamo_frontend_model_rejection_total{endpoint="chat_completions",model="tiny"} 3\n'
        b'dynamo_frontend_router_queue_pending_requests{model="tiny",policy_class="default",'
        b'worker_type="decode"} 2\n'
        b'dynamo_frontend_router_queue_pending_isl_tokens{model="tiny",policy_class="default",'
        b'worker_type="decode"} 512\n'
    )
    assert read.rank_loads == {(2**64 - 1, 1): RankLoad(30, 84, "decode")}
    assert read.rejections == {"tiny": 7}
    assert read.queues == (QueuePending("tiny", "default", "decode", 2, 512, 0),)
    assert read.pending_requests == 2


def test_invalid_rows_are_named_and_hide_no_other():
    row = 'dynamo_frontend_worker_active_decode_blocks{{dp_rank="{}",worker_id="{}"}} {}\n'
    rows = [("0", "5", "7"), ("0", "5a", "7"), ("-1", "5", "7"), ("0", "6", "NaN")]
    rows += [("0", "6", "-1"), ("0", "6", "1.5"), ("0", str(2**64), "1"), ("0", "6", "+Inf")]
    text = "".join(row.format(*values) for values in rows)
    text += 'dynamo_frontend_worker_active_decode_blocks{worker_id="9"} 1\n'
    read = read_frontend_metrics(text.encode())
    assert read.rank_loads == {(5, 0): RankLoad(7, 0, "")}
    name = "dynamo_frontend_worker_active_decode_blocks: "
    assert read.problems == (
        f"{name}worker_id: expected an integer up to {2**64 - 1}, got '5a'",
        f"{name}dp_rank: expected an integer up to {2**32 - 1}, got '-1'",
        f"{name}expected a count, got NaN",
        f"{name}expected a count, got -1",
        f"{name}expected a count, got 1.5",
        f"{name}worker_id: expected an integer up to {2**64 - 1}, got '{2**64}'",
        f"{name}expected a count, got +Inf",
        f"{name}label dp_rank is missing",
    )


def test_many_invalid_rows_are_counted():
    read = read_frontend_metrics(b'dynamo_frontend_model_ready{x="y"} 1\n' * 100)
    assert len(read.problems) == MAX_PROBLEMS + 1
    assert read.problems[-1] == "and 80 more rows"


def test_an_answer_that_is_too_long(monkeypatch):
    monkeypatch.setattr("dynctl.wire.dynamo.frontend_metrics.MAX_BYTES", 3)
    with pytest.raises(WireError, match="4 bytes are over the limit of 3"):
        read_frontend_metrics(b"m 1\n")


# -- several frontends ----------------------------------------------------------------------------


def loads(*rows: tuple[int, int, int]) -> FrontendMetrics:
    return FrontendMetrics(
        rank_loads={(worker, 0): RankLoad(b, t, "decode") for worker, b, t in rows}
    )


def test_each_frontend_counts_its_own():
    one, two = loads((1, 72, 100), (2, 3, 0)), loads((1, 10, 5), (3, 1, 1))
    assert add_loads([one, two]) == {
        (1, 0): RankLoad(82, 105, "decode"),
        (2, 0): RankLoad(3, 0, "decode"),
        (3, 0): RankLoad(1, 1, "decode"),
    }
    assert one == loads((1, 72, 100), (2, 3, 0))
    assert add_loads([]) == {}


def test_replicas_that_mirror_each_other_are_not_added_up():
    # As seen with --router-replica-sync: eight requests through the first, all decoding.
    serving, peer = loads((1, 72, 0), (2, 72, 0)), loads((1, 72, 1160), (2, 72, 1176))
    assert add_loads([serving, peer], mirrored=True) == serving.rank_loads
    assert add_loads([peer, serving], mirrored=True) == serving.rank_loads

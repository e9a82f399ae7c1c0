"""Domains as rows: who counts where, whose policy holds, and what strands prefill."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dynctl.base.errors import UsageProblem
from dynctl.documents.topology import DomainCapacity, TopologyShow
from dynctl.documents.workers import UNREACHED, WorkerRow
from dynctl.planning.domain_capacity import topology_show
from dynctl.screens.topology import topology_notes
from router_core import Worker, WorkerAvailability
from tests.golden.fleets import load, settings, stranded_zones, two_zones, view, worker


def show(source, domain: str | None = None, **options) -> TopologyShow:
    return topology_show("test", source.workers(), settings(source), domain=domain, **options)


def row(shown: TopologyShow, value: str | None) -> DomainCapacity:
    return next(row for row in shown.rows if row.value == value)


def pair(enforcement: str | None, decode_zone: str | None) -> list[Worker]:
    return [
        worker("p", "prefill", 1, zone="zone-a", enforcement=enforcement),
        worker("d", "decode", 2, zone=decode_zone),
    ]


def test_counts_by_role_and_state():
    shown = show(two_zones())
    assert (shown.domain, shown.domains) == ("zone", ["zone"])
    found = row(shown, "zone-b")
    assert (found.prefill.workers, found.prefill.ready, found.prefill.busy) == (2, 1, 1)
    assert found.prefill.active_prefill_tokens == 10_240
    assert (found.decode.kv_used_blocks, found.decode.kv_total_blocks) == (9, 2 * 4096)
    assert (found.decode_per_prefill, found.state) == (1.0, "ok")
    assert found.workers == ["decode-b0", "decode-b1", "prefill-b0", "prefill-b1"]
    [policy] = found.policies
    assert (policy.enforcement, policy.domain, policy.origin) == ("required", "zone", "card")


def test_ranks_multiply_the_blocks_and_missing_reports_are_counted():
    one = worker("agg", "aggregated", 1, zone="zone-a", ranks=2)
    role = row(show(view([one], load(one, decode=3, rank=1))), "zone-a").aggregated
    assert (role.kv_used_blocks, role.kv_total_blocks) == (3, 2 * 4096)
    assert (role.kv_reporting, role.ranks) == (1, 2)


@pytest.mark.parametrize(
    ("value", "state", "reason"),
    [
        ("zone-a", "ok", None),
        ("zone-b", "stranded", "no decode worker of tiny has it and takes work (1 busy)"),
        ("zone-c", "stranded", "no decode worker of tiny has it"),
        ("zone-d", "stranded", "no decode worker of tiny has it"),
        (None, "ok", None),
    ],
)
def test_a_required_domain_without_eligible_decode_is_stranded(value, state, reason):
    found = row(show(stranded_zones()), value)
    assert found.state == state
    assert [one.reason for one in found.stranded] == ([reason] if reason else [])


def test_only_workers_with_a_required_policy_are_stranded():
    [stranded] = row(show(stranded_zones()), "zone-d").stranded
    assert stranded.workers == ["prefill-d0"], "prefill-d1 only prefers its zone"
    assert stranded.requires == "dynamo.topology/zone=zone-d"


def in_sets(one: Worker, *names: str) -> Worker:
    return replace(one, worker_sets=names)


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (("ns-1/backend",), None),
        (("ns-2/backend",), "no decode worker of tiny in worker set ns-2/backend has it"),
        # No decode worker of its namespace is registered.
        ((), "no decode worker of tiny in its Dynamo namespace has it"),
    ],
)
def test_prefill_hands_over_to_the_decode_workers_of_its_own_sets(sets, reason):
    prefill = in_sets(worker("p", "prefill", 1, zone="zone-a", enforcement="required"), *sets)
    here = in_sets(worker("d1", "decode", 2, zone="zone-a"), "ns-1/backend")
    elsewhere = in_sets(worker("d2", "decode", 3, zone="zone-b"), "ns-2/backend")
    found = row(show(view([prefill, here, elsewhere])), "zone-a")
    assert [one.reason for one in found.stranded] == ([reason] if reason else [])


def test_what_happens_to_requests_depends_on_the_guard():
    guarded = row(show(stranded_zones()), "zone-c").stranded[0].outcome
    assert guarded.startswith("the decode-capacity guard prefills elsewhere")
    unguarded = row(show(stranded_zones(decode_capacity_guard=False)), "zone-c").stranded[0].outcome
    assert "the router does not avoid it" in unguarded
    nowhere = row(show(view(pair("required", "zone-b"))), "zone-a").stranded[0].outcome
    assert nowhere == "every request that needs a decode worker is refused"


@pytest.mark.parametrize(
    ("enforcement", "decode_zone", "config", "state"),
    [
        ("required", "zone-a", {}, "ok"),
        ("required", None, {}, "stranded"),
        (None, "zone-b", {}, "ok"),
        (None, "zone-b", {"kv_transfer_enforcement": "required"}, "stranded"),
        (None, "zone-b", {"kv_transfer_enforcement": "fallback"}, "crosses"),
        (None, "zone-a", {"kv_transfer_enforcement": "fallback"}, "ok"),
    ],
)
def test_the_router_policy_applies_to_cards_without_one(enforcement, decode_zone, config, state):
    if config:
        config = {"kv_transfer_domain": "zone", **config}
    found = row(show(view(pair(enforcement, decode_zone), (), config)), "zone-a")
    assert found.state == state
    assert found.policies[0].origin == ("router" if config else "card" if enforcement else None)


@pytest.mark.parametrize("enforcement", ["fallback", "preferred"])
def test_a_domain_whose_decode_workers_are_gone_crosses_and_says_what_the_policy_does(enforcement):
    config = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": enforcement}
    if enforcement == "preferred":
        config["kv_transfer_preferred_weight"] = 0.85
    workers = [*pair(None, "zone-a"), worker("far", "decode", 3, zone="zone-b")]
    gone = WorkerAvailability(workers[1].worker_id, "does not answer")
    shown = show(view(workers, [gone], config))
    assert row(shown, "zone-a").state == "crosses"
    [note] = topology_notes(shown)
    assert note.startswith("zone-a CROSSES: no decode worker of it is available")
    assert f"as {enforcement}" in note


def test_a_worker_that_was_never_reached_is_not_said_to_publish_nothing():
    reached = show(view(pair("required", "zone-a")))
    assert row(reached, "zone-a").unreached == []
    unknown = WorkerRow("late", 9, "tiny", "", endpoint="http://late", status=UNREACHED)
    shown = topology_show("test", [*view(pair("required", "zone-a")).workers(), unknown], {})
    assert row(shown, None).unreached == ["late"]
    notes = "\n".join(topology_notes(shown))
    assert "late was not reached: its zone is unknown" in notes
    assert "publishes no" not in notes
    placed = msgspec.structs.replace(unknown, domains={"zone": "zone-b"})
    shown = topology_show("test", [*view(pair("required", "zone-a")).workers(), placed], {})
    assert [(one.value, one.state) for one in shown.rows] == [("zone-a", "ok"), ("zone-b", "down")]


def test_unavailable_decode_workers_do_not_count():
    gone = WorkerAvailability(pair("required", "zone-a")[1].worker_id, "does not answer")
    found = row(show(view(pair("required", "zone-a"), [gone])), "zone-a")
    assert (found.decode.unavailable, found.decode_per_prefill) == (1, None)
    assert found.stranded[0].reason == (
        "no decode worker of tiny has it and takes work (1 unavailable)"
    )


def test_a_domain_whose_workers_are_all_unavailable_is_down():
    workers = [
        worker("a", "aggregated", 1, zone="zone-a"),
        worker("b", "aggregated", 2, zone="zone-a"),
        worker("c", "aggregated", 3, zone="zone-b"),
        worker("d", "aggregated", 4, zone="zone-b"),
    ]
    gone = [WorkerAvailability(one.worker_id, "refused") for one in workers[:3]]
    shown = show(view(workers, gone))
    states = [("zone-a", "down"), ("zone-b", "degraded")]
    assert [(one.value, one.state) for one in shown.rows] == states
    assert [one.aggregated.unavailable for one in shown.rows] == [2, 1]


@pytest.mark.parametrize(
    ("gone", "state", "note"),
    [
        ({1}, "ok", ""),
        ({1, 2}, "degraded", "zone-a is DEGRADED: 2 of 4 decode workers are unavailable"),
        ({0}, "degraded", "zone-a is DEGRADED: its prefill worker is unavailable"),
    ],
)
def test_a_domain_with_half_of_the_workers_of_a_role_is_degraded(gone, state, note):
    decode = [worker(f"d{number}", "decode", number, zone="zone-a") for number in range(2, 6)]
    workers = [worker("p", "prefill", 1, zone="zone-a"), *decode]
    ids = [worker.worker_id for worker in workers]
    shown = show(view(workers, [WorkerAvailability(ids[place], "cordoned") for place in gone]))
    assert row(shown, "zone-a").state == state
    assert "".join(topology_notes(shown)) == note


def test_a_worker_without_a_role_counts_as_aggregated():
    unknown = WorkerRow("a", 1, "", "", endpoint="http://a", status="unknown")
    [found] = topology_show("test", [unknown], {}).rows
    assert (found.aggregated.workers, found.aggregated.unavailable, found.state) == (1, 1, "down")


def test_prefill_without_decode_is_stranded_under_every_policy():
    [stranded] = row(show(view([worker("p", "prefill", 1, zone="zone-a")])), "zone-a").stranded
    assert (stranded.requires, stranded.reason) == (None, "no decode worker of tiny is there")


def test_an_inapplicable_policy_is_reported():
    source = view(pair("required", "zone-a"))
    rows = source.workers()
    del rows[0].runtime_config["topology_domains"]
    found = row(topology_show("test", rows, settings(source)), "zone-a")
    assert "topology_domains do not contain that domain" in (found.policies[0].problem or "")
    assert found.stranded[0].reason == found.policies[0].problem


def test_the_default_domain_is_the_transfer_domain():
    rack = {"rack": "r1"}
    workers = [
        worker("p", "prefill", 1, zone="zone-a", enforcement="required", extra=rack),
        worker("d", "decode", 2, zone="zone-a", extra={"rack": "r2"}),
    ]
    assert show(view(workers)).domain == "zone"
    by_rack = show(view(workers), "rack")
    assert [row.value for row in by_rack.rows] == ["r1", "r2"]
    assert row(by_rack, "r1").state == "ok", "it may hand over within its zone"
    assert show(view([worker("d", "decode", 1, extra=rack)])).domain == "rack"
    with pytest.raises(UsageProblem, match="--domain city: no worker publishes it"):
        show(view(workers), "city")


def test_workers_without_domains_are_one_row():
    shown = show(view([worker("a", "aggregated", 1), worker("b", "aggregated", 2)]))
    assert (shown.domain, [row.value for row in shown.rows]) == (None, [None])


def test_hidden_workers_do_not_strand_others():
    shown = show(two_zones(), counted=lambda row: row.role == "prefill")
    assert row(shown, "zone-a").decode.workers == 0
    assert row(shown, "zone-a").state == "ok"

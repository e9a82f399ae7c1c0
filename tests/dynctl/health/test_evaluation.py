"""The evaluation of a fleet beyond the table of situations."""

import msgspec
import pytest

from dynctl.documents.workers import RankRow, WorkerRow
from dynctl.health.conditions import INDEX_OR_LOAD, MAX_CONDITIONS, NOT_MODELLED
from dynctl.health.evaluation import DERIVED_CODES, MOST_OF_A_CODE, FleetState, evaluate
from dynctl.serving.routing.service import RoutingService
from router_core import Worker


def disconnected(number: int) -> WorkerRow:
    return WorkerRow(
        name=f"w{number:04}",
        worker_id=number,
        model="demo",
        role="aggregated",
        ranks=[RankRow(index="disconnected")],
    )


def test_a_large_fleet_with_one_fault_has_a_bounded_number_of_conditions():
    rows = [disconnected(number) for number in range(2000)]
    derived = evaluate(FleetState(workers=rows)).derived
    assert len(derived) == MOST_OF_A_CODE + 1
    assert derived[-1].subject == "fleet"
    assert derived[-1].message == f"{2000 - MOST_OF_A_CODE:,} more have this condition"
    # All codes together leave room for what parts of the frontend report.
    assert len(DERIVED_CODES) * (MOST_OF_A_CODE + 1) <= MAX_CONDITIONS // 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", ["ready", "ejected"])
def test_a_pool_of_one_role_is_served_where_the_other_hop_is_decided_elsewhere(role, status):
    rows = [WorkerRow(name="w", worker_id=1, model="demo", role=role, status=status)]
    rows[0] = msgspec.structs.replace(rows[0], can_prefill=False, ranks=[RankRow()])
    alone = evaluate(FleetState(workers=rows, pools=True))
    assert alone.models[0].missing == (() if status == "ready" else (role,))
    assert alone.serves is (status == "ready")
    assert not any(one.code.startswith("DYT") for one in alone.derived)
    whole = evaluate(FleetState(workers=rows))
    assert not whole.serves
    assert {"prefill", "decode"} - {role} <= set(whole.models[0].missing)


def test_an_evaluation_that_finds_the_same_reports_nothing_new():
    service = RoutingService()
    service.started_at -= 60
    service.read_fleet(lambda: [disconnected(number) for number in range(2000)])
    service.health()
    before = {(one.code, one.subject, one.since) for one in service.conditions}
    service.health()
    assert {(one.code, one.subject, one.since) for one in service.conditions} == before


def test_what_the_index_does_not_model_is_another_doubt_than_what_is_out_of_date():
    assert NOT_MODELLED < INDEX_OR_LOAD
    service = RoutingService()
    service.membership.upsert(Worker(1, "a", "m"))
    service.set_condition("GROUP_IGNORED", "a", "the cache group of kind mamba is not modelled")
    service.set_condition("EVENTS_LOST", "a", "3 batches are lost")
    found = {one.code: one.what for one in service.doubts("m")}
    assert set(found) == {"DYR0705", "DYR0760"}
    assert "kind mamba" in found["DYR0760"]

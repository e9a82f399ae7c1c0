"""The evaluation of a fleet beyond the table of situations."""

from dynctl.documents.workers import RankRow, WorkerRow
from dynctl.health.conditions import MAX_CONDITIONS
from dynctl.health.evaluation import DERIVED_CODES, MOST_OF_A_CODE, FleetState, evaluate
from dynctl.serving.service import RoutingService


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


def test_an_evaluation_that_finds_the_same_reports_nothing_new():
    service = RoutingService()
    service.started_at -= 60
    service.rows = lambda: [disconnected(number) for number in range(2000)]
    service.health()
    before = {(one.code, one.subject, one.since) for one in service.conditions}
    service.health()
    assert {(one.code, one.subject, one.since) for one in service.conditions} == before

"""Terms of the cost: what each declares fits together, and a new one needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router_core import (
    AddedColumn,
    CostInputs,
    CostParameters,
    Router,
    RouterConfig,
    RoutingRequest,
    RoutingView,
    SelectionContext,
    Term,
    Worker,
    WorkerUpserted,
    flips,
)
from router_core import counterfactual as counterfactual_module
from router_core import terms as terms_module
from router_core.config import SETTINGS, WEIGHT_SETTINGS
from router_core.load_order import LazyColumn
from router_core.terms import TERM_BY_NAME, TERMS


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_term_is_computed_or_read_and_its_parameters_exist(term: Term) -> None:
    parameters = CostParameters.for_stage(RouterConfig(), "aggregated")
    assert (term.values is None) != (term.read is None)
    assert (term.values is None) == (term.switch is None)
    for name in {*term.flips, *filter(None, (term.weight, term.switch))}:
        assert parameters.weight(name) >= 0
        assert parameters.with_weight(name, 3.0).weight(name) == 3.0
    if term.load is not None:
        assert term.load[1] in CostInputs.__dataclass_fields__
    if term.needs is not None:
        assert term.needs in RoutingView.__dataclass_fields__
    # The order of load reads no column of a term.
    assert not (term.ordered and term.read is not None)


def test_a_setting_that_weighs_a_term_is_the_weight_of_that_term() -> None:
    assert WEIGHT_SETTINGS
    for parameter, setting in WEIGHT_SETTINGS.items():
        assert TERM_BY_NAME[SETTINGS[setting].weighs or ""].weight == parameter


def _wear(
    view: RoutingView, context: SelectionContext, slots: Sequence[int], mask: int
) -> AddedColumn | None:
    return AddedColumn("wear", [25_000.0 if slot == slots[0] else 0.0 for slot in slots])


WEAR = Term("wear", "blocks", heading="wear", phrase="wear", read=_wear)


@pytest.mark.parametrize("count", [2, 63, 64, 200])
def test_a_new_term_counts_on_every_way_to_decide(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router()
    for number in range(1, count + 1):
        assert router.apply(WorkerUpserted(Worker(number, f"w{number}", "m")), 0.0).ok
    request = RoutingRequest("r", "m", 64, 16)
    plain = router.plan(request).decode
    assert plain is not None
    assert plain.winner == 0
    for module in (terms_module, counterfactual_module):
        monkeypatch.setattr(module, "TERMS", (*TERMS, WEAR))
    for _ in range(3):  # an order is made when it is wanted a second time
        decision = router.plan(request).decode
        assert decision is not None
        assert decision.winner == 1
        assert not isinstance(decision.costs, LazyColumn)
        assert [row.terms["wear"] for row in decision.rows()][:2] == [25_000.0, 0.0]
        # The load that the winner would need, not one by which it loses at once.
        assert all(abs(change.by) > 1 for change in flips(decision) if count == 2)
        settled = decision.settled()
        assert settled.winner is not None
        assert settled.replay().costs[settled.winner] == decision.costs[1]

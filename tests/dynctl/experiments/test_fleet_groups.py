"""Groups of `dynctl test` that know the workers of a fleet: topology, load, change."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from dynctl.experiments.shares import at_most_by_chance, share_interval
from dynctl.findings.report import State
from router_core import RouterConfig
from tests.dynctl.experiments.faulty_proxy import Body, Fault, faulty_proxy
from tests.dynctl.experiments.test_trial import result_of, states, wrong
from tests.dynctl.serving.fleets import Site, site


def worker(name: str, role: str, zone: str, **policy: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "topology_domains": {"zone": zone}, **policy}


def transfer(enforcement: str, weight: float | None = None) -> dict[str, Any]:
    policy: dict[str, Any] = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": enforcement}
    return policy if weight is None else policy | {"kv_transfer_preferred_weight": weight}


def two_zones(**policy: Any) -> list[dict[str, Any]]:
    return [
        worker("p-a", "prefill", "a", **policy),
        worker("p-b", "prefill", "b", **policy),
        worker("d-a", "decode", "a"),
        worker("d-b", "decode", "b"),
    ]


class NamesDecode(Fault):
    """Each reply names a decode worker of the other zone, as if it had been chosen.

    ``every``: only of every so many replies.
    """

    def __init__(self, fleet: Site, every: int = 1) -> None:
        super().__init__()
        rows = {row.name: row.worker_id for row in fleet.service.router.registry}
        self._other = {rows["p-a"]: rows["d-b"], rows["p-b"]: rows["d-a"]}
        self._turns = cycle([*[False] * (every - 1), True])

    def answer(self, document: Body) -> None:
        workers = document.get("nvext", {}).get("worker_id", {})
        if workers.get("prefill_worker_id") in self._other and next(self._turns):
            workers["decode_worker_id"] = self._other[workers["prefill_worker_id"]]


def messages(report: Any) -> dict[str, str]:
    return {check.code: check.message for check in report.checks}


# -- topology --------------------------------------------------------------------------------------


async def test_required_hand_offs_stay_and_their_pairs_are_counted():
    async with site(two_zones(**transfer("required"))) as fleet:
        report = await result_of(fleet.frontend.url, only=("topology",))
    assert states(report) == {"DYE0701": State.PASS, "DYE0702": State.SKIP}
    assert "a to a" in messages(report)["DYE0701"]
    assert "b to b" in messages(report)["DYE0701"]


@pytest.mark.parametrize("every", [1, 6])
async def test_a_hand_off_out_of_the_required_domain_is_found(every: int):
    async with site(two_zones(**transfer("required"))) as fleet:
        fault = NamesDecode(fleet, every)
        async with faulty_proxy(fleet.frontend.url, fault) as url:
            report = await result_of(url, only=("topology",))
    assert wrong(report) == {"DYE0701"}
    finding = next(check for check in report.checks if check.code == "DYE0701").findings[0]
    assert finding.subject in ("p-a", "p-b")
    assert "zone" in finding.value


async def test_preferred_hand_offs_follow_the_weight():
    async with site(two_zones(**transfer("preferred", 0.9))) as fleet:
        report = await result_of(fleet.frontend.url, only=("topology",))
    assert states(report) == {"DYE0701": State.SKIP, "DYE0702": State.PASS}
    assert "95 % interval" in messages(report)["DYE0702"]


async def test_hand_offs_that_avoid_the_preferred_domain_are_found():
    async with (
        site(two_zones(**transfer("preferred", 0.9))) as fleet,
        faulty_proxy(fleet.frontend.url, NamesDecode(fleet)) as url,
    ):
        report = await result_of(url, only=("topology",))
    assert wrong(report) == {"DYE0702"}


async def test_a_preference_that_load_outweighs_is_not_a_fault():
    """Half of the hand-offs stay, as many as without a preference."""
    async with (
        site(two_zones(**transfer("preferred", 0.9))) as fleet,
        faulty_proxy(fleet.frontend.url, NamesDecode(fleet, 2)) as url,
    ):
        report = await result_of(url, only=("topology",))
    assert wrong(report) == set()
    assert "not decided" in messages(report)["DYE0702"]


async def test_the_routers_own_policy_counts():
    router = RouterConfig(kv_transfer_domain="zone", kv_transfer_enforcement="required")
    async with site(two_zones(), router=router) as fleet:
        report = await result_of(fleet.frontend.url, only=("topology",))
    assert states(report)["DYE0701"] is State.PASS


async def test_without_hand_offs_or_domains_the_reason_is_named():
    async with site([{"name": "e0"}]) as fleet:
        report = await result_of(fleet.frontend.url, only=("topology",))
        engine = await result_of(fleet.engines["e0"].url, only=("topology",))
    assert "no prefill worker serves this model" in messages(report)["DYE0701"]
    assert "do not name workers" in messages(engine)["DYE0701"]


def test_an_interval_holds_the_share_and_chance_adds_up():
    low, high = share_interval(5, 10)
    assert 0.23 < low < 0.24
    assert 0.76 < high < 0.77
    assert share_interval(0, 0) == (0.0, 1.0)
    assert at_most_by_chance(0, 4, 0.5) == 0.0625
    assert at_most_by_chance(4, 4, 0.5) == 1.0

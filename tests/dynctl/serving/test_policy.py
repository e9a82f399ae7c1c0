"""The router's own KV-transfer policy in front of plain engines: the proposal's table, run."""

from pathlib import Path
from typing import Any

import pytest

from router_core import RouterConfig
from tests.dynctl.serving.fleets import WORDS, site, zone

IDS = {"extra_fields": ["worker_id"]}


def fleet_of(*names: str) -> dict[str, Any]:
    """Engines named role-zone (``prefill-a``, ``decode-b``; ``decode-none`` lacks the level)."""
    engines, specs = [], {}
    for name in names:
        role, place = name.split("-")
        engines.append({"name": name, "role": role})
        if place != "none":
            specs[name] = f",zone=zone-{place}"
    return {"engines": engines, "specs": specs}


def policy(enforcement: str = "required", **more: Any) -> RouterConfig:
    return RouterConfig(kv_transfer_domain="zone", kv_transfer_enforcement=enforcement, **more)


async def chosen(fleet, times: int = 4) -> set[tuple[str, str]]:
    found = set()
    registry = fleet.service.router.registry
    for i in range(times):
        status, body, _ = await fleet.chat(f"{i} {WORDS}", max_tokens=2, nvext=IDS)
        assert status == 200, body
        ids = body["nvext"]["worker_id"]
        found.add(
            (
                registry.get(ids["prefill_worker_id"]).name,
                registry.get(ids["decode_worker_id"]).name,
            )
        )
    return found


@pytest.mark.seed("router-topology: enforcement: required")
@pytest.mark.seed("router-topology: backend support: vLLM and SGLang")
async def test_same_domain_pairs_only():
    shape = fleet_of("prefill-a", "prefill-b", "decode-a", "decode-b")
    async with site(**shape, router=policy()) as fleet:
        assert await chosen(fleet, 8) <= {("prefill-a", "decode-a"), ("prefill-b", "decode-b")}


@pytest.mark.seed("dep-topology: routing failures: no same-domain decode workers: fail")
async def test_no_same_domain_decode_fails_with_the_reason_before_any_dispatch():
    async with site(**fleet_of("prefill-a", "decode-b"), router=policy()) as fleet:
        status, body, _ = await fleet.chat(WORDS)
        assert status == 503
        details = body["error"]["dynctl"]
        assert details["filter"] == "decode_capacity"
        assert "zone=zone-a has no eligible decode worker" in body["error"]["message"]
        assert "decode worker in zone zone-a" in details["what_would_admit"]
        assert fleet.engines["prefill-a"].engine.ranks[0].scheduler.cache.cached_blocks == 0


@pytest.mark.seed("dep-topology: routing failures: no same-domain decode workers: fallback")
async def test_no_same_domain_decode_falls_back_with_a_warning():
    async with site(**fleet_of("prefill-a", "decode-b"), router=policy("fallback")) as fleet:
        assert await chosen(fleet) == {("prefill-a", "decode-b")}
        details = fleet.service.conditions.get("TRANSFER_CROSSED", "demo")
        assert "dynamo.topology/zone=zone-a" in details.message


@pytest.mark.seed("dep-topology: routing failures: worker without the level: fail")
async def test_workers_that_lack_the_level_are_excluded():
    shape = fleet_of("prefill-a", "decode-a", "decode-none", "prefill-none")
    async with site(**shape, router=policy()) as fleet:
        assert await chosen(fleet, 6) == {("prefill-a", "decode-a")}


@pytest.mark.seed("dep-topology: routing failures: worker without the level: fallback")
async def test_workers_that_lack_the_level_are_a_fallback_when_no_other_is_there():
    shape = fleet_of("prefill-a", "decode-a", "decode-none")
    async with site(**shape, router=policy("fallback")) as fleet:
        assert await chosen(fleet) == {("prefill-a", "decode-a")}
        await fleet.frontend.fleet.remove("decode-a")
        assert await chosen(fleet) == {("prefill-a", "decode-none")}


@pytest.mark.seed("dep-topology: routing failures: level unset")
async def test_an_unset_level_filters_nothing():
    async with site(**fleet_of("prefill-a", "decode-b", "decode-none")) as fleet:
        assert {decode for _, decode in await chosen(fleet, 12)} == {"decode-b", "decode-none"}


@pytest.mark.seed("dep-topology: routing failures: prefill without decode: fail")
@pytest.mark.parametrize("enforcement", ["required", "fallback"])
async def test_prefill_workers_whose_domain_can_decode_come_first(enforcement):
    shape = fleet_of("prefill-a", "prefill-b", "decode-b")
    async with site(**shape, router=policy(enforcement)) as fleet:
        assert await chosen(fleet, 6) == {("prefill-b", "decode-b")}


@pytest.mark.seed("router-topology: enforcement: preferred")
async def test_preferred_keeps_to_the_domain_while_it_is_worth_it():
    config = policy("preferred", kv_transfer_preferred_weight=0.85)
    shape = fleet_of("prefill-a", "decode-a", "decode-b")
    async with site(**shape, router=config) as fleet:
        assert await chosen(fleet, 4) == {("prefill-a", "decode-a")}
        await fleet.frontend.fleet.remove("decode-a")
        assert await chosen(fleet, 2) == {("prefill-a", "decode-b")}


LINKS = """\
levels:
  - {level: rack, latency: 20us, bandwidth: 400Gbit/s}
  - {level: zone, latency: 500us, bandwidth: 25Gbit/s}
beyond: {latency: 10ms, bandwidth: 5Gbit/s}
bytes_per_token: 10000000
"""


def links(folder: Path, **more: Any) -> RouterConfig:
    path = folder / "links.yaml"
    path.write_text(LINKS)
    return RouterConfig(router_kv_transfer_weight=50.0, router_kv_transfer_qos=str(path), **more)


@pytest.mark.seed("dep-topology: future work: KV transfer cost scoring")
async def test_requests_stay_near_while_that_costs_less(tmp_path: Path):
    shape = fleet_of("prefill-a", "decode-a", "decode-b")
    async with site(**shape, router=links(tmp_path)) as fleet:
        assert await chosen(fleet, 6) == {("prefill-a", "decode-a")}
        found = fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", "rack")
        assert "no worker publishes the domain rack" in found.message
        assert fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", "zone") is None
        await fleet.frontend.fleet.remove("decode-a")
        assert await chosen(fleet) == {("prefill-a", "decode-b")}


@pytest.mark.parametrize(
    ("domain", "enforcement", "effect"),
    [
        ("zne", "required", "every request with a prefill hop is refused; published: zone"),
        ("zne", "fallback", "the policy has no effect; published: zone"),
        ("zone", "required", None),
    ],
)
async def test_a_policy_whose_level_no_worker_publishes_is_a_condition(
    domain: str, enforcement: str, effect: str | None
):
    router = RouterConfig(kv_transfer_domain=domain, kv_transfer_enforcement=enforcement)
    async with site(**fleet_of("prefill-a", "decode-a"), router=router) as fleet:
        found = fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", domain)
        option = "--router-kv-transfer-topology-level"
        expected = f"no worker publishes the domain {domain}, that of {option}: {effect}"
        assert (found.message if found else None) == (expected if effect else None)


@pytest.mark.parametrize(
    ("enforcement", "effect"),
    [
        ("required", "they get no request with a prefill hop"),
        ("fallback", "they are in none of its domains"),
    ],
)
async def test_workers_without_the_level_of_the_policy_are_a_condition(
    enforcement: str, effect: str
):
    shape = fleet_of("prefill-a", "prefill-none", "decode-a", "decode-none")
    async with site(**shape, router=policy(enforcement)) as fleet:
        found = fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", "zone")
        assert found.message == (
            "2 of 4 prefill and decode workers (decode-none, prefill-none) do not publish the "
            f"domain zone, that of --router-kv-transfer-topology-level: {effect}"
        )
        await fleet.frontend.fleet.remove("prefill-none")
        found = fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", "zone")
        assert found.message.startswith("1 of 3 prefill and decode workers (decode-none)")
        await fleet.frontend.fleet.remove("decode-none")
        assert fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", "zone") is None


async def test_workers_without_a_level_of_the_links_are_a_condition(tmp_path: Path):
    shape = fleet_of("prefill-a", "decode-a", "decode-none")
    async with site(**shape, router=links(tmp_path)) as fleet:
        found = fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", "zone")
        assert found.message == (
            "1 of 3 prefill and decode workers (decode-none) do not publish the domain zone, a "
            "level of --router-kv-transfer-qos: their KV transfers count as those of a wider level"
        )


async def test_workers_without_the_level_of_one_of_two_policies_are_not_named():
    """Whether a decode worker gets requests depends on the prefill worker: that is not known."""
    shape = fleet_of("prefill-a", "prefill-b", "decode-a", "decode-none")
    shape["engines"][1] |= zone("zone-b")
    async with site(**shape, router=policy()) as fleet:
        assert fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", "zone") is None


async def test_workers_without_a_hop_need_no_level():
    """Their requests have no KV transfer; prefill and decode workers have the level."""
    shape = fleet_of("prefill-a", "decode-a")
    shape["engines"].append({"name": "whole"})
    async with site(**shape, router=policy()) as fleet:
        assert fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", "zone") is None


async def test_a_policy_has_no_level_to_miss_where_each_worker_computes_prompts():
    router = RouterConfig(kv_transfer_domain="zne")
    shape: dict[str, Any] = {"engines": [{"name": "a"}], "specs": {"a": ",zone=zone-a"}}
    async with site(**shape, router=router) as fleet:
        assert fleet.service.conditions.get("LEVEL_NOT_PUBLISHED", "zne") is None


@pytest.mark.parametrize("selection", ["greedy", "best"])
async def test_a_pair_near_each_other_beats_the_cheapest_prefill_worker(
    tmp_path: Path, selection: str
):
    # The frontend is in zone-a, but the only decode worker is in zone-b.
    shape = fleet_of("prefill-a", "prefill-b", "decode-b")
    config = links(tmp_path, router_pair_selection=selection, router_own_domains="zone=zone-a")
    async with site(**shape, router=config) as fleet:
        status, _, headers = await fleet.chat(WORDS, max_tokens=2)
        assert status == 200
        _, past = await fleet.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        winner = past["winner"]["prefill"]["worker"]
        assert [row["transfer_level"] for row in past["decode"]["candidates"]] == [
            "zone" if winner == "prefill-b" else "beyond"
        ]
        if selection == "greedy":
            assert winner == "prefill-a"
            assert "pairs" not in past
            return
        levels = {row["worker"]: row["transfer_level"] for row in past["prefill"]["candidates"]}
        assert levels == {"prefill-a": "zone", "prefill-b": "beyond"}
        best, greedy = past["pairs"]["best"], past["pairs"]["greedy"]
        assert best["prefill"]["worker"] == winner
        assert greedy["prefill"]["worker"] == "prefill-a"
        assert best["cost"] <= greedy["cost"]

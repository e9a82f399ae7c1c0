"""Workers that a frontend does not use: rejected cards, and namespaces that are not ready."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest

from dynctl.documents.models import ModelReadiness, NamespaceReadiness, WorkerTypeReadiness
from dynctl.sources.dynamo.accepted_cards import contested_models, take_versions
from dynctl.sources.dynamo.router_state import registration_doubts
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, ModelFacts, RankLoad
from tests.dynctl.serving.test_observer import Rig
from tests.waiting import patience


class Contested:
    """The captured fleet with a third decode worker, whose card has another version."""

    def __init__(self, **change: Any) -> None:
        self.rig = Rig()
        values = self.rig.values
        key = next(key for key in values if key.startswith("v1/mdc/dynamo/backend/"))
        old = f"{values[key]['instance_id']:x}"
        self.other = values[key]["instance_id"] ^ 0x1000
        for prefix in ("v1/mdc/", "v1/instances/"):
            of = prefix + key.removeprefix("v1/mdc/")
            added = copy.deepcopy(values[of]) | {"instance_id": self.other}
            if prefix == "v1/mdc/":
                added["card_json"] |= change
            self.rig.discovery.put(of.replace(old, f"{self.other:x}"), json.dumps(added).encode())
        self.rig.observer._namespace = None

    async def __aenter__(self) -> Contested:
        await self.rig.observer.start()
        sets = {one.name: one for one in self.rig.observer.deployment.worker_sets}
        versions = sets["dynamo/backend"].versions.values()
        self.members = sorted(versions, key=len, reverse=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rig.observer.close()
        await self.rig.events.close()

    def unavailable(self) -> dict[int, str]:
        registry = self.rig.router.registry
        found = {w.worker_id: registry.unavailable_reason(w.worker_id) for w in registry}
        return {worker_id: why for worker_id, why in found.items() if why}


def ready(decode: int) -> dict[str, ModelReadiness]:
    kinds = {"decode": WorkerTypeReadiness(decode), "prefill": WorkerTypeReadiness(2)}
    return {"tiny": ModelReadiness("tiny", True, {"dynamo": NamespaceReadiness(True, kinds)})}


def loads(*worker_ids: int) -> FrontendMetrics:
    return FrontendMetrics(rank_loads={(one, 0): RankLoad() for one in worker_ids})


async def test_the_count_of_a_frontend_shows_which_card_it_accepted() -> None:
    async with Contested(kv_cache_block_size=32) as fleet:
        observer = fleet.rig.observer
        assert contested_models(observer) == ["tiny"]
        assert take_versions(observer, [FrontendMetrics()], [ready(2)]) == []
        [(rejected, why)] = fleet.unavailable().items()
        assert rejected == fleet.other
        assert why == "the frontend rejected its card: block size 32 instead of 16"
        # The frontend has accepted the other one instead.
        assert take_versions(observer, [FrontendMetrics()], [ready(1)]) == []
        assert set(fleet.unavailable()) == set(fleet.members[0])


async def test_load_rows_show_it_too() -> None:
    async with Contested(aliases=["other"]) as fleet:
        observer = fleet.rig.observer
        assert take_versions(observer, [loads(fleet.members[0][0])], [{}]) == []
        assert fleet.unavailable() == {fleet.other: "the frontend rejected its card: other aliases"}


@pytest.mark.parametrize(
    ("frontends", "readiness"),
    [
        ([], []),
        ([FrontendMetrics()], [{}]),
        ([FrontendMetrics()], [ready(7)]),
        # Two frontends accepted different versions.
        ([FrontendMetrics()] * 2, [ready(1), ready(2)]),
    ],
)
async def test_where_nothing_shows_it_the_answer_is_doubted(
    frontends: list[FrontendMetrics], readiness: list[dict[str, ModelReadiness]]
) -> None:
    async with Contested(kv_cache_block_size=32) as fleet:
        [found] = take_versions(fleet.rig.observer, frontends, readiness)
        assert found.code == "DYR0723"
        assert found.what.startswith("the workers of dynamo/backend have 2 versions of their card")
        assert fleet.unavailable() == {}


async def test_facts_of_the_model_show_it_where_it_has_one_set() -> None:
    async with Contested(kv_cache_block_size=32) as fleet:
        facts = FrontendMetrics(models={"tiny": ModelFacts(True, kv_cache_block_size=32)})
        # The prefill workers are a set of the model too: their block size is exported as well.
        [found] = take_versions(fleet.rig.observer, [facts], [{}])
        assert found.code == "DYR0723"


async def test_workers_of_a_namespace_that_is_not_ready_are_excluded() -> None:
    rig = Rig()
    keys = [key for key in rig.values if "/prefill/" in key]
    async with asyncio.timeout(patience(30)):
        async with rig.observer as observer:
            registry = rig.router.registry
            assert registry.unavailable == 0
            for key in keys:
                rig.discovery.delete(key)
            while len(observer.deployment.workers) != 2:  # noqa: ASYNC110  a change wakes it
                await asyncio.sleep(0.005)
            reasons = {registry.unavailable_reason(w.worker_id) for w in registry}
            assert reasons == {"namespace dynamo is not ready: no prefill worker"}
            for key in keys:
                rig.discovery.put(key, json.dumps(rig.values[key]).encode())
            while registry.unavailable:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            assert len(registry) == 4
    await rig.events.close()


async def test_two_components_of_one_role_are_doubted() -> None:
    rig = Rig()
    for key, value in rig.values.items():
        if "/backend/" in key and key.startswith(("v1/mdc/", "v1/instances/")):
            # Workers of their own: two components of one instance are refused.
            other = value["instance_id"] + 4096
            text = json.dumps({**value, "instance_id": other}).replace('"backend"', '"more"')
            place = key.replace("/backend/", "/more/").rpartition("/")[0]
            rig.discovery.put(f"{place}/{other:x}", text.encode())
    async with asyncio.timeout(patience(30)):
        async with rig.observer as observer:
            found = registration_doubts(observer)
            assert [one.code for one in found] == ["DYR0726"]
            assert found[0].what == "namespace dynamo has several sets of decode workers"
            assert rig.router.registry.unavailable
    await rig.events.close()


async def test_unknown_fields_of_cards_are_doubted() -> None:
    async with Contested(cost_bias=3) as fleet:
        [found] = registration_doubts(fleet.rig.observer)
        assert found.code == "DYR0724"
        assert found.what.endswith("cost_bias")
        assert found.matters

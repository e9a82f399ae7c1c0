"""Discovery entries joined into workers: the captured deployment, and what can go wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dynctl.adapters.ports import Deleted, DiscoveryEntry, Interrupted, Listed, Put
from dynctl.base.errors import UsageProblem
from dynctl.health.deployment import (
    ProblemCode,
    Registrations,
    one_endpoint_each,
    topology_gaps,
)
from dynctl.sources.dynamo.equal_ids import refuse_equal_ids
from dynctl.wire.dynamo.discovery import JetStreamTransport
from router_core import Role

CAPTURE = Path(__file__).parents[2] / "captures" / "etcd-disagg-required.json"


@pytest.fixture
def captured() -> dict[str, Any]:
    """key -> value of a two-zone disaggregated deployment under ``required``."""
    return {key: row["value"] for key, row in json.loads(CAPTURE.read_text()).items()}


def joined(values: dict[str, Any], namespace: str | None = None):
    registrations = Registrations()
    registrations.apply(Listed(tuple(entry(key, value) for key, value in values.items())))
    return registrations.deployment(namespace)


def entry(key: str, value: Any) -> DiscoveryEntry:
    return DiscoveryEntry(key, json.dumps(value).encode())


def cards(values: dict[str, Any], component: str) -> list[str]:
    return sorted(key for key in values if key.startswith(f"v1/mdc/dynamo/{component}/"))


def test_the_captured_deployment(captured):
    found = joined(captured)
    assert found.problems == ()
    assert found.models == ("tiny",)
    assert found.namespaces == ("dynamo",)
    roles = [(item.worker.role, item.worker.domains["zone"]) for item in found.workers]
    assert sorted(roles) == [
        (Role.DECODE, "zone-a"),
        (Role.DECODE, "zone-b"),
        (Role.PREFILL, "zone-a"),
        (Role.PREFILL, "zone-b"),
    ]
    for item in found.workers:
        config = item.worker.runtime_config
        assert (config.kv_transfer_domain, config.kv_transfer_enforcement) == ("zone", "required")
        assert item.worker.block_size == 16
        assert item.worker.device == "cuda"
        assert not item.worker.can_prefill or item.worker.role is Role.PREFILL
        assert set(item.sources) == set(item.kv_events)
        assert bool(item.sources) is (item.worker.role is Role.PREFILL)
        assert item.worker.endpoint is not None
        assert item.worker.endpoint.startswith("127.0.0.1:")
    assert {item.worker.name.partition("/")[0] for item in found.workers} == {"prefill", "backend"}
    assert len({item.worker.name for item in found.workers}) == 4
    assert len(found.loads) == 4
    assert len(found.sequences) == 2


def before_1_4(values: dict[str, Any]) -> dict[str, Any]:
    """The same deployment as Dynamo 1.3 registers it: no sources, channels of a component."""
    older = {}
    for key, value in values.items():
        if key.startswith("v1/event_channels/"):
            scope = value["scope"]["endpoint"]
            value = {name: one for name, one in value.items() if name != "scope"}
            value |= {"namespace": scope["namespace"], "component": scope["component"]}
            key = f"v1/event_channels/{scope['namespace']}/{scope['component']}/{key[-9:]}"
        elif key.startswith("v1/event_sources/"):
            target = value["metadata"]["recovery_target"]
            worker = value["metadata"]["worker"]
            name = f"worker_kv_indexer_query_dp{worker['dp_rank']}"
            value = {"type": "Endpoint", **target, "endpoint": name}
            key = f"v1/instances/dynamo/{target['component']}/{name}/{target['instance_id']:x}"
        older[key] = value
    return older


def test_before_1_4_the_channels_of_a_component_are_those_of_its_workers(captured):
    found = joined(before_1_4(captured))
    assert found.problems == ()
    for item in found.workers:
        prefills = item.worker.role is Role.PREFILL
        assert item.worker.kv_events is prefills
        assert item.kv_events == {}
        assert [(one.worker_id, one.dp_rank) for one in item.sources.values()] == (
            [(item.worker.worker_id, 0)] if prefills else []
        )
        assert len(item.shared_events) == (2 if prefills else 0)
        for source in item.sources.values():
            assert source.recovery is not None
            assert source.recovery.endpoint.name == "worker_kv_indexer_query_dp0"


def test_a_worker_without_local_indexer_may_have_its_events_in_a_stream(captured):
    key = cards(captured, "prefill")[0]
    runtime = captured[key]["card_json"]["runtime_config"]
    runtime["enable_local_indexer"] = False
    values = {k: v for k, v in captured.items() if not k.startswith("v1/event_")}

    def stream() -> Any:
        worker_id = captured[key]["instance_id"]
        found = joined(values)
        [item] = [one for one in found.workers if one.worker.worker_id == worker_id]
        # Whether it publishes there is known only when its events are read.
        silent = [p.subject for p in found.problems if p.code is ProblemCode.EVENTS_MISSING]
        assert item.worker.name in silent
        assert item.worker.kv_events is (item.durable_events is not None)
        return item.durable_events and item.durable_events.transport

    assert stream() is None, "a card of Dynamo 1.4 and later"
    del runtime["kv_event_publishing_enabled"]
    expected = JetStreamTransport("namespace-dynamo-component-prefill-kv-events")
    assert stream() == expected
    captured[key]["namespace"] = "My_Ns"
    values[key.replace("mdc", "instances")]["namespace"] = "My_Ns"
    assert stream() == JetStreamTransport("namespace-my-ns-component-prefill-kv-events")


def test_before_1_3_the_others_decode_beside_prefill_workers(captured):
    def untyped(value: Any) -> Any:
        card = {
            n: one for n, one in value["card_json"].items() if n not in ("worker_type", "needs")
        }
        kind = card["model_type"] or "Prefill"
        return {**value, "card_json": {**card, "model_type": kind}}

    older = {k: untyped(v) if k.startswith("v1/mdc/") else v for k, v in captured.items()}
    roles = {item.worker.worker_id: item.worker.role for item in joined(captured).workers}
    assert {i.worker.worker_id: i.worker.role for i in joined(older).workers} == roles
    alone = {k: v for k, v in older.items() if "/prefill/" not in k}
    assert {item.worker.role for item in joined(alone).workers} == {Role.AGGREGATED}


def test_incomplete_registrations_are_problems(captured):
    card = cards(captured, "prefill")[0]
    instance = card.replace("v1/mdc/", "v1/instances/")
    without_instance = {k: v for k, v in captured.items() if k != instance}
    found = joined(without_instance)
    assert [problem.code for problem in found.problems] == [ProblemCode.CARD_WITHOUT_INSTANCE]
    assert len(found.workers) == 3
    without_card = {k: v for k, v in captured.items() if k != card}
    assert [problem.code for problem in joined(without_card).problems] == [
        ProblemCode.INSTANCE_WITHOUT_CARD
    ]


def test_a_malformed_entry_does_not_hide_the_others(captured):
    captured["v1/mdc/dynamo/backend/generate/1"] = {"type": "Model"}
    captured["v1/novelty/x"] = 1
    found = joined(captured)
    assert [problem.code for problem in found.problems] == [ProblemCode.MALFORMED_ENTRY] * 2
    assert len(found.workers) == 4
    assert {problem.subject for problem in found.problems} == {
        "v1/mdc/dynamo/backend/generate/1",
        "v1/novelty/x",
    }


def test_a_rejected_card_is_kept_and_reported(captured):
    key = cards(captured, "prefill")[0]
    del captured[key]["card_json"]["runtime_config"]["topology_domains"]["zone"]
    found = joined(captured)
    codes = [problem.code for problem in found.problems]
    assert ProblemCode.CARD_REJECTED in codes
    assert len(found.workers) == 4, "Dynamo routes to it, and fails when it derives the domain"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"worker_type": "encode"}, ProblemCode.UNKNOWN_ROLE),
        ({"kv_cache_block_size": 32}, ProblemCode.BLOCK_SIZES_DIFFER),
        ({"router_config": {"router_mode": "k_v"}}, ProblemCode.ROUTER_CONFIGS_DIFFER),
        ({"kv_cache_block_size": 0}, ProblemCode.CARD_REJECTED),
    ],
)
def test_contradictions_are_problems(captured, change, code):
    captured[cards(captured, "backend")[0]]["card_json"].update(change)
    assert code in [problem.code for problem in joined(captured).problems]


def test_a_worker_without_topology_among_others(captured):
    config = captured[cards(captured, "backend")[0]]["card_json"]["runtime_config"]
    for name in ("topology_domains", "kv_transfer_domain", "kv_transfer_enforcement", "taints"):
        del config[name]
    [problem] = joined(captured).problems
    assert problem.code is ProblemCode.TOPOLOGY_MISSING
    assert "3 of 4 workers of tiny do" in problem.message


def test_a_worker_without_a_domain_of_others(captured):
    config = captured[cards(captured, "backend")[0]]["card_json"]["runtime_config"]
    del config["topology_domains"]["rack"]
    [problem] = joined(captured).problems
    assert problem.code is ProblemCode.TOPOLOGY_MISSING
    assert problem.message == "publishes no rack, 3 of 4 workers of tiny do"
    for component in ("backend", "prefill"):
        for key in cards(captured, component):
            captured[key]["card_json"]["runtime_config"]["topology_domains"].pop("rack", None)
    assert joined(captured).problems == ()


@pytest.mark.parametrize(
    ("published", "compared", "gaps"),
    [
        ([], None, []),
        ([(), ()], None, ["", ""]),
        ([("zone",), ("zone",)], None, ["", ""]),
        (
            [("zone", "rack"), ("rack",), ("room",), ()],
            None,
            [
                "publishes no room, 1 of 4 workers of m do",
                "publishes no room, 1 of 4 workers of m do; "
                "publishes no zone, 1 of 4 workers of m do",
                "publishes no rack, 2 of 4 workers of m do; "
                "publishes no zone, 1 of 4 workers of m do",
                "publishes no topology, 3 of 4 workers of m do",
            ],
        ),
        (
            [("zone", "rack"), ("rack",), ()],
            {"zone", "room"},
            [
                "",
                "publishes no zone, 1 of 3 workers of m do",
                "publishes no topology, 2 of 3 workers of m do",
            ],
        ),
    ],
)
def test_topology_gaps_are_the_domains_of_others(published, compared, gaps):
    assert topology_gaps("m", published, compared) == gaps


def test_a_prefill_worker_without_events(captured):
    source = next(key for key in captured if key.startswith("v1/event_sources/"))
    del captured[source]
    [problem] = joined(captured).problems
    assert (problem.code, "its cache is unknown" in problem.message) == (
        ProblemCode.EVENTS_MISSING,
        True,
    )


def test_changes_in_order(captured):
    registrations = Registrations()
    registrations.apply(Listed(tuple(entry(key, value) for key, value in captured.items())))
    key = cards(captured, "backend")[0]
    changed = copy.deepcopy(captured[key])
    changed["card_json"]["runtime_config"]["taints"].append("gpu=h100")
    registrations.apply(Put(entry(key, changed)))
    taints = [item.worker.runtime_config.taints for item in registrations.deployment().workers]
    assert sum("gpu=h100" in one for one in taints) == 1
    registrations.apply(Interrupted("gone"))
    assert registrations.interrupted == "gone"
    assert len(registrations.deployment().workers) == 4, "what is known stays"
    registrations.apply(Listed(()))
    assert registrations.deployment().workers == ()
    assert (registrations.interrupted or "heard") == "heard"
    registrations.apply(Deleted("v1/unknown"))


def test_one_namespace_of_several(captured):
    other = {
        key.replace("/dynamo/", "/other/"): json.loads(
            json.dumps(value).replace('"dynamo"', '"other"').replace("/dynamo/", "/other/")
        )
        for key, value in captured.items()
    }
    both = joined(captured | other)
    assert both.namespaces == ("dynamo", "other")
    assert joined(captured | other, "other").namespaces == ("dynamo", "other")
    assert len(joined(captured | other, "other").workers) == 4
    assert joined(captured | other, "nope").workers == ()


def test_names_are_the_shortest_unique_ones(captured):
    key = cards(captured, "backend")[0]
    value = json.dumps(captured[key])
    instance_key = key.replace("v1/mdc/", "v1/instances/")
    near = captured[key]["instance_id"] ^ (1 << 40)
    for where, text in ((key, value), (instance_key, json.dumps(captured[instance_key]))):
        new = json.loads(text)
        new["instance_id"] = near
        captured[where.rpartition("/")[0] + f"/{near:x}"] = new
    names = [item.worker.name for item in joined(captured).workers]
    assert len(set(names)) == 5
    assert {len(name) for name in names if name.startswith("prefill/")} == {len("prefill/") + 4}
    assert {len(name) for name in names if name.startswith("backend/")} == {len("backend/") + 11}


# -- names and sets --------------------------------------------------------------------------------


def renamed(values: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """A copy of the entries with another namespace or component."""
    text = json.dumps(values)
    text = text.replace(f'"{old}"', f'"{new}"').replace(f"/{old}/", f"/{new}/")
    made: dict[str, Any] = json.loads(text)
    return made


def backend_only(values: dict[str, Any]) -> dict[str, Any]:
    """The decode workers of the capture, as aggregated ones."""
    kept = {key: copy.deepcopy(value) for key, value in values.items() if "/backend/" in key}
    for key in cards(kept, "backend"):
        kept[key]["card_json"] |= {"worker_type": "aggregated", "needs": []}
    return kept


def sets(values: dict[str, Any]) -> dict[str, tuple[str, int, str | None]]:
    return {
        one.name: (one.role.value, len(one.worker_ids), one.not_ready)
        for one in joined(values).worker_sets
    }


def test_aliases_and_adapters_are_names_of_the_same_worker(captured):
    key = cards(captured, "backend")[0]
    captured[key]["card_json"]["aliases"] = ["other"]
    adapter = copy.deepcopy(captured[key]) | {"model_suffix": "law"}
    adapter["card_json"] |= {"display_name": "law", "lora": {"name": "law"}, "aliases": []}
    found = joined(captured | {f"{key}/law": adapter})
    assert found.models == ("tiny",)
    assert found.served_names == ("law", "other", "tiny")
    assert len(found.workers) == 4
    [worker] = [item.worker for item in found.workers if item.worker.adapters]
    assert (worker.model, worker.aliases, worker.adapters) == ("tiny", ("other",), ("law",))
    del captured[key]
    alone = joined(captured | {f"{key}/law": adapter})
    assert alone.served_names == ("tiny",), "as in Dynamo, without the base model it is not served"
    [problem] = [one for one in alone.problems if "adapter law" in one.message]
    assert problem.code is ProblemCode.CARD_REJECTED


def test_one_endpoint_of_an_instance_is_routed_to(captured):
    whole = joined(captured | renamed(captured, "dynamo", "second"))
    found = one_endpoint_each(whole)
    assert (len(whole.workers), len(found.workers)) == (8, 4)
    assert {item.card.endpoint.namespace for item in found.workers} == {"dynamo"}
    assert {one.namespace for one in found.worker_sets} == {"dynamo"}
    code = ProblemCode.ENDPOINT_NOT_ROUTED
    messages = [one.message for one in found.problems if one.code is code]
    assert len(messages) == 4
    assert all("second." in one and "tiny at dynamo." in one for one in messages)
    assert one_endpoint_each(found) is found


def test_workers_of_two_processes_with_one_id_are_not_one_worker(captured):
    """As pods of one name in two namespaces of Kubernetes."""
    moved = json.loads(json.dumps(renamed(captured, "dynamo", "second")).replace("127.0", "10.0"))
    found = one_endpoint_each(joined(captured | moved))
    code = ProblemCode.ID_NOT_UNIQUE
    assert sum(one.code is code for one in found.problems) == 4
    with pytest.raises(
        UsageProblem, match="4 workers have the id of a worker in another"
    ) as caught:
        refuse_equal_ids(found)
    assert caught.value.hint.endswith("with one of dynamo, second")
    refuse_equal_ids(one_endpoint_each(joined(captured)))


def test_prefill_workers_belong_to_the_sets_that_decode(captured):
    assert sets(captured) == {
        "dynamo/backend": ("decode", 2, None),
        "dynamo/prefill": ("prefill", 2, None),
    }
    assert {item.worker.worker_sets for item in joined(captured).workers} == {("dynamo/backend",)}


def test_components_namespaces_and_roles_are_sets_of_their_own(captured):
    agg = backend_only(captured)
    other = renamed(agg, "backend", "other")
    assert sets(agg | other) == {
        "dynamo/backend": ("aggregated", 2, None),
        "dynamo/other": ("aggregated", 2, None),
    }
    elsewhere = renamed(captured, "dynamo", "ns-2")
    assert set(sets(agg | elsewhere)) == {"dynamo/backend", "ns-2/backend", "ns-2/prefill"}
    # The same component with both roles.
    both = copy.deepcopy(captured)
    both[cards(both, "backend")[0]]["card_json"] |= {"worker_type": "aggregated", "needs": []}
    assert set(sets(both)) == {
        "dynamo/backend aggregated",
        "dynamo/backend decode",
        "dynamo/prefill",
    }


def test_a_namespace_without_what_its_workers_need_is_not_ready(captured):
    lonely = {key: value for key, value in captured.items() if "/prefill/" not in key}
    assert sets(lonely) == {
        "dynamo/backend": ("decode", 2, "namespace dynamo is not ready: no prefill worker")
    }
    second = renamed({k: v for k, v in captured.items() if "/backend/" in k}, "backend", "more")
    why = sets(captured | second)["dynamo/more"][2]
    assert why == "namespace dynamo is not ready: several sets of decode workers"
    for key in cards(lonely, "backend"):
        del lonely[key]["card_json"]["worker_type"]
    assert [one[2] for one in sets(lonely).values()] == [None], "older cards declare no needs"


@pytest.mark.parametrize(
    ("change", "versions"),
    [
        ({"kv_cache_block_size": 32}, 2),
        ({"aliases": ["other"]}, 2),
        ({"architectural_max_context_length": 4096}, 2),
        ({"router_config": {"router_mode": "k_v"}}, 2),
        ({"runtime_config": {"context_length": 4096}}, 2),
        ({"runtime_config": {"context_length": 8192, "enable_eagle": True}}, 1),
        ({"migration_limit": 3}, 1),
    ],
)
def test_cards_that_a_frontend_does_not_accept_together_have_two_versions(
    captured, change, versions
):
    card = captured[cards(captured, "backend")[0]]["card_json"]
    for name, value in change.items():
        card[name] = {**card[name], **value} if name == "runtime_config" else value
    [found] = [one for one in joined(captured).worker_sets if one.role is Role.DECODE]
    assert len(found.versions) == versions
    assert len(found.worker_ids) == 2


def test_fields_of_a_card_that_are_not_known_are_listed(captured):
    card = captured[cards(captured, "backend")[0]]["card_json"]
    assert [item.card.unknown_fields for item in joined(captured).workers] == [()] * 4
    card |= {"routing_hint": 3, "empty_hint": None}
    card["runtime_config"]["cost_bias"] = 0.5
    unknown = [item.card.unknown_fields for item in joined(captured).workers]
    assert [one for one in unknown if one] == [("routing_hint", "runtime_config.cost_bias")]


def test_a_prefix_reads_several_namespaces(captured):
    both = captured | renamed(captured, "dynamo", "dynamo-2")
    assert len(joined(both, "dynamo*").workers) == 8
    assert len(joined(both, "dynamo-*").workers) == 4
    assert len(joined(both, "dynamo").workers) == 4

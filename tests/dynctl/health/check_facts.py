"""A healthy deployment as facts, and ways to break it: each leads to one code."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynctl.adapters.ports import DiscoveryEntry, Listed
from dynctl.documents.fleet_load import Condition
from dynctl.documents.models import ModelReadiness, NamespaceReadiness, WorkerTypeReadiness
from dynctl.documents.workers import StreamState
from dynctl.health.deployment import Registrations
from dynctl.health.facts import (
    NATS,
    CheckFacts,
    FrontendFacts,
    PlaneFacts,
    RankFacts,
    Unread,
)
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, ModelFacts
from router_core import THRESHOLD_SETTINGS

CAPTURE = Path(__file__).parents[2] / "captures" / "etcd-disagg-required.json"
FIRST, SECOND = "http://frontend-0:8000", "http://frontend-1:8000"
DECODE_BLOCKS, PREFILL_TOKENS, PREFILL_FRACTION = THRESHOLD_SETTINGS

Entries = dict[str, Any]


def captured() -> Entries:
    """key -> value of two prefill and two decode workers in two zones, policy required."""
    return {key: row["value"] for key, row in json.loads(CAPTURE.read_text()).items()}


def cards(entries: Entries, component: str = "") -> list[str]:
    """The keys of the model cards of a component (or of all)."""
    return sorted(key for key in entries if key.startswith(f"v1/mdc/dynamo/{component}"))


def card(entries: Entries, component: str, place: int = 0) -> Entries:
    found: Entries = entries[cards(entries, component)[place]]["card_json"]
    return found


def synced(entries: Entries) -> None:
    """Every card advertises a router configuration with replica sync."""
    for key in cards(entries):
        config = {"router_mode": "k_v", "kv_router_config": {"router_replica_sync": True}}
        entries[key]["card_json"]["router_config"] = config


def deployment_of(entries: Entries) -> Any:
    registrations = Registrations()
    registrations.apply(
        Listed(tuple(DiscoveryEntry(k, json.dumps(v).encode()) for k, v in entries.items()))
    )
    return registrations.deployment("dynamo")


def rank(worker: str, port: int, **changed: Any) -> RankFacts:
    """A rank whose 7 events were recovered and 2 of which came live."""
    state = StreamState(connected=True, last_seq=7, batches=2)
    whole = RankFacts(
        worker,
        0,
        f"tcp://10.0.0.{port}:5557",
        f"10.0.0.{port}:9000",
        state,
        newest=7,
        called_back=True,
    )
    return replace(whole, **changed)


def readiness(**workers: int) -> ModelReadiness:
    types = {kind: WorkerTypeReadiness(count) for kind, count in workers.items()}
    return ModelReadiness("tiny", True, {"dynamo": NamespaceReadiness(True, types)})


def frontend(url: str, **changed: Any) -> FrontendFacts:
    metrics = FrontendMetrics(
        models={"tiny": ModelFacts(True, 16, 4096, 8192)},
        kv_routing=True,
        kv_events=True,
        event_source_mismatches={"dynamo.prefill.generate": 0},
    )
    ready = readiness(prefill=2, decode=2)
    whole = FrontendFacts(
        url,
        "dynamo",
        version="1.6.1",
        models=("tiny",),
        metrics=metrics,
        ready={"tiny": ready},
        thresholds={"tiny": {DECODE_BLOCKS: 0.85, PREFILL_TOKENS: None, PREFILL_FRACTION: None}},
    )
    return replace(whole, **changed)


def ours(*reported: Condition, url: str = FIRST) -> FrontendFacts:
    """A dynctl frontend with these conditions in force."""
    return FrontendFacts(
        url, "dynctl", mode="kv", models=("tiny",), thresholds={"tiny": {}}, conditions=reported
    )


def planes(entries: Entries | None = None, **changed: Any) -> PlaneFacts:
    if entries is None:
        entries = captured()
        synced(entries)
    deployment = deployment_of(entries)
    names = [item.worker.name for item in deployment.workers if item.sources]
    ranks = tuple(rank(name, 7 + place) for place, name in enumerate(sorted(names)))
    whole = PlaneFacts(
        "etcd 10.0.0.1:2379",
        "dynamo",
        deployment=deployment,
        ranks=ranks,
        waited_s=5.0,
        listened_s=1.3,
        query_timeout_s=2.0,
        comparable=True,
    )
    return replace(whole, **changed)


def healthy() -> CheckFacts:
    """Everything is well, and everything could be read."""
    return CheckFacts(planes(), (frontend(FIRST), frontend(SECOND)))


# -- what can be broken ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """``change`` breaks the healthy facts so that ``code`` is found for ``subject``."""

    code: str
    change: Callable[[CheckFacts], CheckFacts]
    subject: str
    name: str = ""


def _registered(change: Callable[[Entries], None]) -> Callable[[CheckFacts], CheckFacts]:
    def changed(facts: CheckFacts) -> CheckFacts:
        entries = copy.deepcopy(captured())
        synced(entries)
        change(entries)
        return replace(facts, planes=planes(entries))

    return changed


def _planes(**changed: Any) -> Callable[[CheckFacts], CheckFacts]:
    return lambda facts: replace(facts, planes=replace(planes(), **changed))


def _rank(**changed: Any) -> Callable[[CheckFacts], CheckFacts]:
    """The first rank, changed."""

    def change(facts: CheckFacts) -> CheckFacts:
        whole = planes()
        ranks = (replace(whole.ranks[0], **changed), *whole.ranks[1:])
        return replace(facts, planes=replace(whole, ranks=ranks))

    return change


def _ranks(**changed: Any) -> Callable[[CheckFacts], CheckFacts]:
    """Every rank, changed."""

    def change(facts: CheckFacts) -> CheckFacts:
        whole = planes()
        ranks = tuple(replace(one, **changed) for one in whole.ranks)
        return replace(facts, planes=replace(whole, ranks=ranks))

    return change


def _state(**changed: Any) -> StreamState:
    return StreamState(**{"connected": True, "last_seq": 7, "batches": 2, **changed})


def _second(**changed: Any) -> Callable[[CheckFacts], CheckFacts]:
    """The second frontend, changed."""
    return lambda facts: replace(facts, frontends=(frontend(FIRST), frontend(SECOND, **changed)))


def _measures(**changed: Any) -> Callable[[CheckFacts], CheckFacts]:
    metrics = frontend(SECOND).metrics
    assert isinstance(metrics, FrontendMetrics)
    return _second(metrics=replace(metrics, **changed))


def _drop(entries: Entries, *starts: str) -> None:
    for key in [key for key in entries if key.startswith(starts)]:
        del entries[key]


def _set_card(component: str, name: str, value: Any) -> Callable[[Entries], None]:
    def change(entries: Entries) -> None:
        card(entries, component)[name] = value

    return change


def _no_decode_in_a(entries: Entries) -> None:
    for key in cards(entries, "backend"):
        domains = entries[key]["card_json"]["runtime_config"]["topology_domains"]
        domains["zone"] = "zone-b"


def _no_topology(entries: Entries) -> None:
    config = card(entries, "backend")["runtime_config"]
    for name in list(config):
        if name.startswith("kv_transfer"):
            config[name] = None
    config["topology_domains"] = {}
    config["taints"] = []


def _no_rack(entries: Entries) -> None:
    del card(entries, "backend")["runtime_config"]["topology_domains"]["rack"]


def _bad_policy(entries: Entries) -> None:
    card(entries, "prefill")["runtime_config"]["kv_transfer_domain"] = "room"


def _other_model(entries: Entries) -> None:
    key = cards(entries, "backend")[0]
    other, instance = key.replace("/dynamo/", "/dynamo/", 1), entries[key]
    endpoint = other.replace("v1/mdc", "v1/instances")
    new = copy.deepcopy(instance)
    new["instance_id"] += 1
    new["card_json"] |= {"display_name": "small", "worker_type": "aggregated", "needs": []}
    head, _, _ = other.rpartition("/")
    entries[f"{head}/{new['instance_id']:x}"] = new
    served = copy.deepcopy(entries[endpoint])
    served["instance_id"] = new["instance_id"]
    head, _, _ = endpoint.rpartition("/")
    entries[f"{head}/{new['instance_id']:x}"] = served


def _no_prefill(entries: Entries) -> None:
    _drop(entries, "v1/mdc/dynamo/prefill", "v1/instances/dynamo/prefill")


def _unknown_bucket(entries: Entries) -> None:
    entries["v1/novelties/dynamo/x"] = {"type": "Novelty"}


def _cut_short(entries: Entries) -> None:
    entries["v1/mdc/dynamo/backend/generate/ff"] = {"type": "Model"}


def _no_card(entries: Entries) -> None:
    del entries[cards(entries, "backend")[0]]


def _no_instance(entries: Entries) -> None:
    del entries[cards(entries, "backend")[0].replace("v1/mdc", "v1/instances")]


def _no_sources(entries: Entries) -> None:
    _drop(entries, "v1/event_sources/")


def _no_total(entries: Entries) -> None:
    card(entries, "backend")["runtime_config"]["total_kv_blocks"] = None


def _unsynced(entries: Entries) -> None:
    for key in cards(entries):
        config = entries[key]["card_json"]["router_config"]["kv_router_config"]
        config["router_replica_sync"] = False


_FRACTION = {"tiny": {DECODE_BLOCKS: 0.85, PREFILL_TOKENS: 5000, PREFILL_FRACTION: None}}
_NOT_READY = ModelReadiness(
    "tiny",
    False,
    {
        "dynamo": NamespaceReadiness(
            False, {"prefill": WorkerTypeReadiness(2)}, missing_worker_types=["decode"]
        )
    },
    "no namespace has all required worker types live",
)
_FEWER = readiness(prefill=2, decode=1)
_REFUSED = Unread("connection refused", "does it run?")

BROKEN = (
    Broken("DYR0101", _planes(unreachable=Unread("refused", "start it")), "etcd 10.0.0.1:2379"),
    Broken("DYR0102", _planes(deployment=deployment_of({})), "dynamo"),
    Broken("DYR0103", _ranks(state=StreamState()), "ZMQ"),
    Broken("DYR0103", _ranks(state=StreamState(), channel=NATS), "NATS", "without NATS"),
    Broken("DYR0103", _rank(state=StreamState(), channel=NATS), "NATS", "one plane of two"),
    Broken(
        "DYR0104",
        _ranks(newest=None, called_back=False, refusal="did not connect back to 10.1.1.1:4000"),
        "prefill/",
    ),
    Broken("DYR0201", _registered(_cut_short), "v1/mdc/dynamo/backend/generate/ff"),
    Broken("DYR0202", _registered(_unknown_bucket), "v1/novelties/dynamo/x"),
    Broken("DYR0203", _registered(_no_card), "backend/"),
    Broken("DYR0204", _registered(_no_instance), "backend/"),
    Broken("DYR0205", _registered(_bad_policy), "prefill/"),
    Broken("DYR0206", _registered(_set_card("backend", "worker_type", "encode")), "backend/"),
    Broken("DYR0207", _registered(_set_card("backend", "kv_cache_block_size", 32)), "tiny"),
    Broken("DYR0208", _registered(_set_card("backend", "router_config", None)), "tiny"),
    Broken("DYR0209", _registered(_no_topology), "backend/"),
    Broken("DYR0209", _registered(_no_rack), "backend/", "without a domain"),
    Broken("DYR0210", _registered(_no_decode_in_a), "tiny"),
    Broken("DYR0211", _registered(_no_prefill), "dynamo"),
    Broken("DYR0212", _registered(_other_model), "dynamo"),
    Broken("DYR0301", _registered(_no_sources), "prefill/"),
    Broken("DYR0302", _rank(state=StreamState()), "prefill/"),
    Broken("DYR0303", _rank(newest=None, refusal="cannot be connected to"), "prefill/"),
    Broken("DYR0304", _rank(indexer=None, newest=None), "prefill/"),
    Broken(
        "DYR0305",
        _rank(state=_state(missing=3, lost=3), current=False, incomplete="a hole stays"),
        "prefill/",
    ),
    Broken("DYR0306", _rank(newest=9), "prefill/"),
    Broken("DYR0307", _rank(foreign="messages of publisher ab"), "prefill/"),
    Broken("DYR0308", _rank(state=_state(malformed=1)), "prefill/"),
    Broken("DYR0308", _rank(state=_state(unknown_events=1)), "prefill/", "unknown kind"),
    Broken("DYR0309", _rank(own_names=5), "prefill/"),
    Broken("DYR0401", _second(kind=_REFUSED), SECOND),
    Broken("DYR0402", _second(kind="other"), SECOND),
    Broken("DYR0403", _measures(kv_routing=False, kv_events=False), SECOND),
    Broken("DYR0403", _second(kind="dynctl", mode="random"), SECOND, "dynctl"),
    Broken("DYR0404", _measures(kv_events=False), SECOND),
    Broken("DYR0405", _measures(event_source_mismatches={"dynamo.prefill.generate": 1}), SECOND),
    Broken("DYR0406", _second(ready={"tiny": _NOT_READY}), SECOND),
    Broken("DYR0407", _second(ready={"tiny": _FEWER}), SECOND),
    Broken("DYR0408", _second(thresholds=_FRACTION), "tiny"),
    Broken("DYR0409", _registered(_unsynced), "frontends"),
    Broken("DYR0410", _registered(_no_total), FIRST),
    Broken("DYR0411", _measures(models={"tiny": ModelFacts(True, 32)}), SECOND),
    Broken("DYR0412", _second(models=("tiny", "small")), FIRST),
    Broken("DYR0501", _second(version="2.0.0"), SECOND),
    Broken("DYR0502", _second(version=None), SECOND),
    Broken("DYR0503", _second(version="1.6.2"), FIRST),
)

"""The objects of discovery: EndpointSlices, and the metadata that a worker registers.

The metadata has the shape that Dynamo 1.6.1 wrote through a real API (a test compares the two).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dynctl.wire.kubernetes.names import (
    COMPONENT_LABEL,
    DISCOVERY_BACKEND_LABEL,
    DISCOVERY_ENABLED_LABEL,
    DYNAMO_NAMESPACE_LABEL,
    GRAPH_LABEL,
    WORKER_HASH_LABEL,
)
from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.kube.objects.meta import Json, metadata, owner

MODEL = "Qwen/Qwen3-0.6B"
REQUEST_PORT = 41389


def endpoint_slice(
    namespace: str,
    graph: str,
    component: str,
    pods: Iterable[Mapping[str, Any]],
    *,
    number: int = 0,
    created: float | None = None,
) -> Json:
    """A slice of one component's Service: pods (JSON, with uid and IP), ready as they say."""
    service = f"{graph}-{component.lower()}"
    name = f"{service}-{number}"
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata(
            "EndpointSlice",
            namespace,
            name,
            labels={
                "kubernetes.io/service-name": service,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                DISCOVERY_BACKEND_LABEL: "kubernetes",
                DISCOVERY_ENABLED_LABEL: "true",
                GRAPH_LABEL: graph,
                COMPONENT_LABEL: component,
            },
            created=created,
        ),
        "addressType": "IPv4",
        "endpoints": [endpoint(one) for one in pods],
        "ports": [{"name": "system", "port": 9090, "protocol": "TCP"}],
    }


def endpoint(pod: Mapping[str, Any]) -> Json:
    """One pod in a slice; it must have an IP."""
    about, status = pod["metadata"], pod["status"]
    ready = any(
        one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ())
    )
    return {
        "addresses": [status["podIP"]],
        "conditions": {"ready": ready, "serving": ready, "terminating": False},
        "nodeName": pod["spec"].get("nodeName", ""),
        "targetRef": {
            "kind": "Pod",
            "namespace": about["namespace"],
            "name": about["name"],
            "uid": about["uid"],
        },
    }


def worker_metadata(
    pod: Mapping[str, Any],
    role: str,
    *,
    domains: Mapping[str, str] | None,
    transfer_domain: str | None = None,
    enforcement: str = "required",
    weight: float | None = None,
    taints: Iterable[str] | None = None,
    worker_id: int | None = None,
    model: str = MODEL,
    created: float | None = None,
) -> Json:
    """DynamoWorkerMetadata of a pod (with uid and IP). ``role``: prefill, decode or aggregated.

    ``domains`` None: a runtime without topology support. ``taints`` None: derived from the domains.
    ``worker_id`` None: by the hash of the name, as the runtime does it.
    """
    about = pod["metadata"]
    labels = about["labels"]
    name = about["name"]
    number = instance_id(name) if worker_id is None else worker_id
    # Workers of a generation have a runtime namespace of their own.
    suffix = labels.get(WORKER_HASH_LABEL)
    space = labels.get(DYNAMO_NAMESPACE_LABEL, about["namespace"]) + (
        f"-{suffix}" if suffix else ""
    )
    component = "prefill" if role == "prefill" else "backend"
    key = f"{space}/{component}/generate/{number:x}"
    shared = {
        "namespace": space,
        "component": component,
        "endpoint": "generate",
        "instance_id": number,
    }
    host = pod["status"]["podIP"]
    address = f"{host}:{REQUEST_PORT}"
    config = _runtime_config(role)
    if domains is not None:
        derived = [f"dynamo.topology/{domain}={value}" for domain, value in domains.items()]
        config["taints"] = derived if taints is None else list(taints)
        config["topology_domains"] = dict(domains)
        config["kv_transfer_domain"] = transfer_domain
        config["kv_transfer_enforcement"] = enforcement
        if weight is not None:
            config["kv_transfer_preferred_weight"] = weight
    body: Json = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadata",
        "metadata": metadata("DynamoWorkerMetadata", about["namespace"], name, created=created),
        "spec": {
            "data": {
                "endpoints": {
                    key: {
                        "type": "Endpoint",
                        **shared,
                        "transport": {"tcp": f"{address}/{number:x}/{space}/{component}/generate"},
                        "device_type": "cuda",
                        "request_plane_codec": "msgpack",
                    }
                },
                "model_cards": {
                    key: {"type": "Model", **shared, "card_json": _card(role, model, config)}
                },
                "event_channels": dict(_channels(shared, name, role, host)),
                "event_sources": dict(_sources(shared, name, host) if role != "decode" else ()),
            }
        },
    }
    body["metadata"]["ownerReferences"] = [owner(pod, blocks=False)]
    return body


def _topic_key(shared: Mapping[str, Any], topic: str, publisher: int) -> str:
    where = "/".join(f"{part}/{shared[part]}" for part in ("namespace", "component", "endpoint"))
    return f"{where}/topic/{topic}/{publisher:x}"


def _scope(shared: Mapping[str, Any]) -> Json:
    return {
        "namespace": shared["namespace"],
        "component": shared["component"],
        "name": shared["endpoint"],
    }


def _channels(
    shared: Mapping[str, Any], name: str, role: str, host: str
) -> Iterator[tuple[str, Json]]:
    """Where its load is heard and, but for decode workers, its KV events."""
    topics = ("kv_metrics",) if role == "decode" else ("kv_metrics", "kv-events")
    for place, topic in enumerate(topics):
        publisher = instance_id(f"{name}/{topic}")
        yield (
            _topic_key(shared, topic, publisher),
            {
                "type": "EventChannel",
                "scope": {"kind": "endpoint", "endpoint": _scope(shared)},
                "topic": topic,
                "instance_id": publisher,
                "transport": {
                    "kind": "Zmq",
                    "config": {"endpoint": f"tcp://{host}:{45000 + place}"},
                },
                "namespace": shared["namespace"],
                "component": shared["component"],
            },
        )


def _sources(shared: Mapping[str, Any], name: str, host: str) -> Iterator[tuple[str, Json]]:
    """Whom to ask for KV events that were missed."""
    topic, worker = "kv-events", shared["instance_id"]
    publisher = instance_id(f"{name}/{topic}")
    served = f"worker_kv_query_source_{publisher:x}"
    path = f"{worker:x}/{shared['namespace']}/{shared['component']}/{served}"
    yield (
        _topic_key(shared, topic, publisher),
        {
            "type": "EventSource",
            "scope": {"kind": "endpoint", "endpoint": _scope(shared)},
            "topic": topic,
            "publisher_id": publisher,
            "metadata": {
                "kv_state_endpoint": _scope(shared),
                "worker": {"worker_id": worker, "dp_rank": 0},
                "publisher_id": publisher,
                "recovery_target": {
                    "component": shared["component"],
                    "endpoint": served,
                    "namespace": shared["namespace"],
                    "instance_id": worker,
                    "transport": {"tcp": f"{host}:{REQUEST_PORT}/{path}"},
                    "device_type": "cuda",
                    "request_plane_codec": "msgpack",
                },
            },
        },
    )


def _card(role: str, model: str, config: Json) -> Json:
    slug = model.lower().replace("/", "_")
    return {
        "display_name": model,
        "slug": slug,
        "source_path": model,
        "model_info": None,
        "tokenizer": None,
        "prompt_formatter": None,
        "gen_config": None,
        "architectural_max_context_length": 8192,
        "context_length": 0,
        "kv_cache_block_size": 16,
        "migration_limit": 0,
        "model_type": "" if role == "prefill" else "Chat | Completions",
        "model_input": "Tokens",
        "worker_type": role,
        "needs": {"prefill": [["decode"]], "decode": [["prefill"]]}.get(role, []),
        "runtime_config": config,
        "media_decoder": None,
        "media_fetcher": None,
    }


def _runtime_config(role: str) -> Json:
    publishes = role != "decode"
    return {
        "context_length": 0,
        "total_kv_blocks": 8192,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "tool_call_parser": None,
        "reasoning_parser": None,
        "tool_call_arguments_format": "json_string",
        "structural_tag_mode": "off",
        "structural_tag_scope": "auto",
        "structural_tag_schema": "auto",
        "exclude_tools_when_tool_choice_none": True,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "enable_local_indexer": publishes,
        "kv_event_publishing_enabled": publishes,
        "runtime_data": {"output_replay_consumer": True},
        "enable_eagle": False,
    }

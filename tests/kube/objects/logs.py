"""The start log of a worker, with the lines of Dynamo 1.6.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynctl.wire.kubernetes.names import MOUNT_PATH
from tests.kube.objects.meta import stamp

_TOPOLOGY: Final = "topology.read_topology_config"


def log_line(at: float, target: str, text: str, level: str = "INFO") -> str:
    """One line, with its newline."""
    return f"{stamp(at)[:-1]}.{int(at % 1 * 1e6):06d}Z {level:>5} {target}: {text}\n"


def head(at: float) -> str:
    """What comes before topology is read."""
    return (
        log_line(at, "main.worker", "Created canonical engine config from CLI arguments")
        + log_line(at, "dynamo_runtime::worker", "dynamo runtime configuration: system_port=9090")
        + log_line(at, "dynamo_runtime::distributed", "Initializing Kubernetes discovery backend")
    )


def waiting(at: float, domain: str, mount: str, left: int) -> str:
    return log_line(
        at, _TOPOLOGY, f"Waiting for topology domain {domain} in {mount} ({left}s remaining)..."
    )


def timed_out(at: float, domain: str, mount: str) -> str:
    """The last words of a worker that found no topology."""
    text = (
        f"DYN_TOPOLOGY_ENABLED is set but topology file {mount}/{domain} was not populated within "
        "30s. This indicates the configured topology source did not publish the selected transfer "
        "domain. Exiting."
    )
    return log_line(at, _TOPOLOGY, text, "ERROR")


def no_domain(at: float) -> str:
    """Of a worker whose environment names no transfer domain."""
    text = (
        "DYN_TOPOLOGY_ENABLED is set but DYN_KV_TRANSFER_DOMAIN is not set. Set it to the name of "
        "the topology domain file to use for KV transfer. Exiting."
    )
    return log_line(at, _TOPOLOGY, text, "ERROR")


def configured(at: float, config: Mapping[str, Any], mount: str = MOUNT_PATH) -> str:
    """The log line with a worker's topology; ``config``: a card's runtime_config."""
    text = (
        "Topology config: TopologyConfig("
        f"topology_domains={dict(config['topology_domains'])!r}, "
        f"kv_transfer_domain={config['kv_transfer_domain']!r}, "
        f"kv_transfer_enforcement={config['kv_transfer_enforcement']!r}, "
        f"kv_transfer_preferred_weight={config.get('kv_transfer_preferred_weight')!r}) "
        f"(from {mount})"
    )
    return log_line(at, _TOPOLOGY, text)


def registered(at: float) -> str:
    return log_line(at, "main.worker", "Registered model, serving endpoint generate")


def not_persisted(at: float, pod: tuple[str, str], refusal: str) -> str:
    """Of a worker (namespace, name) that may not write its metadata; it stays running."""
    text = (
        "Failed to persist metadata to CR, rolling back local state: Failed to apply "
        f"DynamoWorkerMetadata {'/'.join(pod)}: ApiError: {refusal}"
    )
    return log_line(at, "dynamo_runtime::discovery::kube", text, "WARN")

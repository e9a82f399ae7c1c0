"""InferencePools of the Gateway API Inference Extension: pods that serve models, their ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynctl.base.json_fields import count, mapping, mappings, text, texts

GROUP: Final = "inference.networking.k8s.io"
VERSION: Final = "v1"
PLURAL: Final = "inferencepools"
MOST_PORTS: Final = 8


@dataclass(frozen=True, slots=True)
class InferencePool:
    """A pool. ``selector``: labels of its pods; ``ports``: where each of them serves, one for each
    data-parallel rank. ``failure_mode`` is what a gateway does without its picker: FailClose or
    FailOpen. ``picker``: the name of the picker's Service."""

    namespace: str
    name: str
    selector: Mapping[str, str]
    ports: tuple[int, ...]
    failure_mode: str = "FailClose"
    picker: str = ""

    @property
    def label_selector(self) -> str:
        """The selector as a parameter of the API."""
        return ",".join(f"{key}={value}" for key, value in sorted(self.selector.items()))

    @property
    def problem(self) -> str:
        """Why no pod can be followed; empty if they can."""
        if not self.selector:
            return "spec.selector.matchLabels is empty"
        if not self.ports or len(self.ports) > MOST_PORTS:
            return f"spec.targetPorts has {len(self.ports)} ports; expected 1 to {MOST_PORTS}"
        return ""


def inference_pool(body: Mapping[str, Any]) -> InferencePool:
    """Read an InferencePool."""
    metadata, spec = mapping(body.get("metadata")), mapping(body.get("spec"))
    picker = mapping(spec.get("endpointPickerRef"))
    ports = (count(port.get("number")) for port in mappings(spec.get("targetPorts")))
    return InferencePool(
        text(metadata.get("namespace")),
        text(metadata.get("name")),
        texts(mapping(spec.get("selector")).get("matchLabels")),
        tuple(port for port in ports if 1 <= port <= 65535),
        text(picker.get("failureMode")) or "FailClose",
        text(picker.get("name")),
    )

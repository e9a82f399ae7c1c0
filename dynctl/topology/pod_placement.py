"""Where a pod template may land: node selectors and required node affinity, for one label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynctl.wire.kubernetes.fields import mapping, sequence, text


def allowed_values(pod: Mapping[str, Any], label_key: str) -> frozenset[str] | None:
    """The values of the node label that the pod may be scheduled on; None: any.

    The node selector and the affinity must both hold. Selector terms are alternatives, the
    expressions of one term must all hold; a term that does not name the label allows any value.
    """
    selected = text(mapping(pod.get("nodeSelector")).get(label_key))
    by_selector = frozenset({selected}) if selected else None
    return _both(by_selector, _by_affinity(pod, label_key))


def _by_affinity(pod: Mapping[str, Any], label_key: str) -> frozenset[str] | None:
    affinity = mapping(mapping(pod.get("affinity")).get("nodeAffinity"))
    required = mapping(affinity.get("requiredDuringSchedulingIgnoredDuringExecution"))
    terms = sequence(required.get("nodeSelectorTerms"))
    allowed: frozenset[str] = frozenset()
    for term in terms:
        values = _by_term(mapping(term), label_key)
        if values is None:
            return None
        allowed |= values
    return allowed if terms else None


def _by_term(term: Mapping[str, Any], label_key: str) -> frozenset[str] | None:
    allowed: frozenset[str] | None = None
    for entry in sequence(term.get("matchExpressions")):
        one = mapping(entry)
        if one.get("key") == label_key and one.get("operator") == "In":
            values = frozenset(text(value) for value in sequence(one.get("values")))
            allowed = _both(allowed, values)
    return allowed


def _both(a: frozenset[str] | None, b: frozenset[str] | None) -> frozenset[str] | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b

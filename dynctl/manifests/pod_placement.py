"""On which nodes a pod template can run: node selector, required node affinity, tolerations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from dynctl.base.json_fields import mapping, sequence, text


def allowed_values(pod: Mapping[str, Any], label_key: str) -> frozenset[str] | None:
    """The values of a node label that the pod template allows; None: any.

    The node selector and the affinity must both match. Terms are alternatives; all expressions of
    a term must match; a term without the label allows any value.
    """
    selected = text(mapping(pod.get("nodeSelector")).get(label_key))
    by_selector = frozenset({selected}) if selected else None
    return _both(by_selector, _by_affinity(pod, label_key))


def may_run(pod: Mapping[str, Any], node_labels: Mapping[str, str]) -> bool:
    """Whether the pod template allows a node with these labels.

    Node selector and required affinity are compared as in the scheduler. matchFields (names of
    nodes) are ignored: they count as a match.
    """
    selector = mapping(pod.get("nodeSelector"))
    if any(node_labels.get(key) != value for key, value in selector.items()):
        return False
    terms = [mapping(term) for term in _terms(pod)]
    return not terms or any(_matches(term, node_labels) for term in terms)


def tolerates(pod: Mapping[str, Any], taints: Iterable[str]) -> bool:
    """Whether the pod has a toleration for each of these taint keys.

    Only keys are compared: a toleration of another value counts too.
    """
    keys = set()
    for entry in sequence(pod.get("tolerations")):
        toleration = mapping(entry)
        if not toleration.get("key") and toleration.get("operator") == "Exists":
            return True
        keys.add(text(toleration.get("key")))
    return keys.issuperset(taints)


def _matches(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether all expressions of a term match; a term without expressions matches no node."""
    expressions = [mapping(expression) for expression in sequence(term.get("matchExpressions"))]
    if not expressions:
        return bool(sequence(term.get("matchFields")))
    return all(_holds(expression, labels) for expression in expressions)


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(text(expression.get("key")))
    wanted = sequence(expression.get("values"))
    operator = _OPERATORS.get(text(expression.get("operator")))
    return operator is not None and operator(value, [text(value_text) for value_text in wanted])


def _greater(value: str | None, than: list[str]) -> bool:
    both = _whole(value, than)
    return both is not None and both[0] > both[1]


def _less(value: str | None, than: list[str]) -> bool:
    both = _whole(value, than)
    return both is not None and both[0] < both[1]


def _whole(value: str | None, than: list[str]) -> tuple[int, int] | None:
    try:
        [other] = than
        return int(value or ""), int(other)
    except ValueError:
        return None


_OPERATORS: Final[Mapping[str, Callable[[str | None, list[str]], bool]]] = {
    "In": lambda value, wanted: value in wanted,
    "NotIn": lambda value, wanted: value not in wanted,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": _greater,
    "Lt": _less,
}


def _terms(pod: Mapping[str, Any]) -> Sequence[Any]:
    affinity = mapping(mapping(pod.get("affinity")).get("nodeAffinity"))
    required = mapping(affinity.get("requiredDuringSchedulingIgnoredDuringExecution"))
    return sequence(required.get("nodeSelectorTerms"))


def _by_affinity(pod: Mapping[str, Any], label_key: str) -> frozenset[str] | None:
    terms = _terms(pod)
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
        expression = mapping(entry)
        if expression.get("key") == label_key and expression.get("operator") == "In":
            values = frozenset(text(value) for value in sequence(expression.get("values")))
            allowed = _both(allowed, values)
    return allowed


def _both(a: frozenset[str] | None, b: frozenset[str] | None) -> frozenset[str] | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b

"""The filters and scorers, and the profile of every router mode.

To add a mode: write its scorer, and add a line to PROFILES and its name to config.ROUTER_MODES. To
add a filter: write the class with its code, and put it in FILTERS where it belongs in the funnel.
"""

from __future__ import annotations

from collections.abc import Callable

from router_core.cost import CostInputs, CostParameters, TermColumn
from router_core.reasons import Reason
from router_core.registry import CandidateSet
from router_core.routing_view import Filter, Profile, RoutingRequest, RoutingView, SelectionContext
from router_core.taints import topology_of
from router_core.terms import TURNS, kv_terms
from router_core.workers import Worker


class ModelFilter:
    """Pass workers of the request's model."""

    name = "model"

    def mask(self, view: RoutingView, context: SelectionContext) -> int:
        return view.registry.model(context.request.model)

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        model, name = view.registry.worker(slot).model, context.request.model
        if model == view.registry.model_of(name):
            return _does_not_serve(model, name)
        return Reason("model", model, name, f"serves {model}")


class WorkerSetFilter:
    """Pass workers of the set that was chosen before the worker, if one was."""

    name = "worker_set"

    def mask(self, view: RoutingView, context: SelectionContext) -> int | None:
        chosen = context.request.worker_set
        return None if chosen is None else view.registry.worker_set(chosen)

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        own = ", ".join(view.registry.worker(slot).worker_sets) or None
        message = f"belongs to the worker set {own}" if own else "belongs to no worker set"
        return Reason("worker_set", own, context.request.worker_set, message)


class ServedNameFilter:
    """Pass workers that serve the name in the request, where it is another name of the model."""

    name = "served_name"

    def mask(self, view: RoutingView, context: SelectionContext) -> int | None:
        name = context.request.served_name
        return None if name is None else view.registry.model(name)

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        name = context.request.served_name or ""
        return _does_not_serve(view.registry.worker(slot).model, name)


class RoleFilter:
    """Pass workers whose role can serve the hop."""

    name = "role"

    def mask(self, view: RoutingView, context: SelectionContext) -> int:
        return context.role_mask

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        worker = view.registry.worker(slot)
        message = f"is a {worker.role.value} worker"
        if context.stage == "aggregated" and not worker.can_prefill:
            message += " that cannot prefill by itself"
        return Reason("role", worker.role.value, context.stage, message)


class DirectFilter:
    """In mode direct, pass no worker for a request that does not name one."""

    name = "direct"

    def mask(self, view: RoutingView, context: SelectionContext) -> int | None:
        return 0 if context.pin is None else None

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        return Reason("not_pinned", None, None, "is not named by the request")


class AllowedFilter:
    """Pass the worker ids that the request allows, and only the pinned worker if there is one."""

    name = "allowed"

    def mask(self, view: RoutingView, context: SelectionContext) -> int | None:
        registry, allowed, pin = view.registry, context.request.allowed_worker_ids, context.pin
        if allowed is None and pin is None:
            return None
        mask = registry.alive if allowed is None else registry.mask_of(allowed)
        if pin is not None:
            if pin.dp_rank is None:
                mask &= registry.mask_of((pin.worker_id,))
            else:
                slot = registry.slot(pin.worker_id, pin.dp_rank)
                mask &= 0 if slot is None else 1 << slot
        return mask

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        ref, pin = view.registry.ref(slot), context.pin
        for worker_id, why in context.request.excluded:
            if worker_id == ref.worker_id:
                return Reason("excluded", str(worker_id), None, why)
        if pin is None:
            return Reason("not_allowed", str(ref.worker_id), None, "is not in the allowed set")
        pinned = view.registry.get(pin.worker_id)
        name = pinned.name if pinned is not None else str(pin.worker_id)
        rank = "" if pin.dp_rank is None else f" rank {pin.dp_rank}"
        return Reason(
            "not_allowed", str(ref.worker_id), name, f"the request is pinned to {name}{rank}"
        )


class AvailableFilter:
    """Pass workers that respond to health probes and are not ejected."""

    name = "available"

    def mask(self, view: RoutingView, context: SelectionContext) -> int:
        return ~view.registry.unavailable

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        why = view.registry.unavailable_reason(view.registry.ref(slot).worker_id) or "unavailable"
        return Reason("unavailable", why, None, why)


class DomainFilter:
    """Pass workers that publish the router policy's transfer domain, if that policy is required.

    As in Dynamo's design proposal: a worker without the domain is excluded from selection.
    """

    name = "domain"

    def mask(self, view: RoutingView, context: SelectionContext) -> int | None:
        if context.domain is None:
            return None
        return view.registry.with_domain(context.domain) | view.registry.own_policy

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        return Reason(
            "missing_domain",
            None,
            context.domain,
            f"publishes no topology domain {context.domain!r}, which the router policy requires",
        )


class TaintFilter:
    """Pass workers that have every required taint."""

    name = "taints"

    def mask(self, view: RoutingView, context: SelectionContext) -> int:
        mask = -1
        for item in context.constraints.required:
            mask &= view.registry.taint(item.taint)
        return mask

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        worker = view.registry.worker(slot)
        for item in context.constraints.required:
            if item.taint not in worker.runtime_config.taints:
                has = _has_instead(worker, item.taint)
                tail = f" (has {has})" if has else ""
                return Reason("missing_taint", has, item.taint, f"lacks {item.taint}{tail}")
        raise AssertionError(f"slot {slot} satisfies the required taints")


class CapacityFilter:
    """On prefill, pass workers whose transfer domain has an eligible decode worker."""

    name = "decode_capacity"

    def mask(self, view: RoutingView, context: SelectionContext) -> int | None:
        return context.capacity_mask

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        worker = view.registry.worker(slot)
        domain = worker.runtime_config.kv_transfer_domain or view.config.kv_transfer_domain or ""
        value = worker.domains.get(domain)
        if value is None:
            return Reason(
                "policy_underivable", None, domain, "its KV-transfer policy cannot be applied"
            )
        return Reason(
            "no_decode_capacity", value, domain, f"{domain}={value} has no eligible decode worker"
        )


class BusyFilter:
    """Pass workers that are not over a busy threshold."""

    name = "busy"

    def mask(self, view: RoutingView, context: SelectionContext) -> int:
        return ~view.busy.mask

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        reasons = view.busy.reasons(slot)
        if not reasons:
            return Reason("busy", None, None, "was over a threshold at the last check")
        first = reasons[0]
        return Reason("busy", first.value, first.limit, first.message)


class WorkerFilter:
    """A filter from a function ``passes(worker, request)``, called for each worker and hop.

    ``name`` is the filter's name in the funnel and its rejection code.
    """

    def __init__(
        self, name: str, passes: Callable[[Worker, RoutingRequest], bool], message: str = ""
    ) -> None:
        self.name = name
        self._passes = passes
        self._message = message or f"does not pass the filter {name}"

    def mask(self, view: RoutingView, context: SelectionContext) -> int:
        request = context.request
        workers = (w for w in view.registry if request.model in w.served_names)
        return view.registry.mask_of(
            worker.worker_id for worker in workers if self._passes(worker, request)
        )

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        return Reason(self.name, None, None, self._message)


#: The filters of every built-in mode, in the order of the funnel.
FILTERS: tuple[Filter, ...] = (
    ModelFilter(),
    WorkerSetFilter(),
    ServedNameFilter(),
    RoleFilter(),
    AllowedFilter(),
    AvailableFilter(),
    DomainFilter(),
    TaintFilter(),
    CapacityFilter(),
    BusyFilter(),
)


def kv_scorer(
    inputs: CostInputs, parameters: CostParameters, candidates: CandidateSet, turn: int
) -> tuple[TermColumn, ...]:
    """KV-cache-aware: cached prefixes against load (see :mod:`router_core.terms`)."""
    return kv_terms(inputs, parameters)


def rotation_scorer(
    inputs: CostInputs, parameters: CostParameters, candidates: CandidateSet, turn: int
) -> tuple[TermColumn, ...]:
    """Round-robin: turns until a rank is due, in ascending id order."""
    count = len(candidates.slots)
    values = [0] * count
    for place, position in enumerate(candidates.cycle):
        values[position] = (place - turn) % count
    return (TermColumn(TURNS.name, TURNS.unit, 1.0, values),)


def random_scorer(
    inputs: CostInputs, parameters: CostParameters, candidates: CandidateSet, turn: int
) -> tuple[TermColumn, ...]:
    """Random: no terms, so all candidates tie and the sample decides."""
    return ()


def active_requests_scorer(
    inputs: CostInputs, parameters: CostParameters, candidates: CandidateSet, turn: int
) -> tuple[TermColumn, ...]:
    """Active requests booked by this router: all modes that count running requests."""
    return (TermColumn("active_requests", "requests", 1.0, inputs.active_requests),)


#: Router mode -> its profile.
PROFILES: dict[str, Profile] = {
    "kv": Profile("kv", FILTERS, kv_scorer, sampled=True),
    "round-robin": Profile("round-robin", FILTERS, rotation_scorer),
    "random": Profile("random", FILTERS, random_scorer),
    "power-of-two": Profile("power-of-two", FILTERS, active_requests_scorer, among="two"),
    "least-loaded": Profile("least-loaded", FILTERS, active_requests_scorer),
    "device-aware-weighted": Profile(
        "device-aware-weighted", FILTERS, active_requests_scorer, among="device"
    ),
    # Of the ranks of the named worker the one with the fewest requests.
    "direct": Profile(
        "direct", (*FILTERS[:4], DirectFilter(), *FILTERS[4:]), active_requests_scorer
    ),
}


def _does_not_serve(model: str, name: str) -> Reason:
    return Reason("served_name", model, name, f"does not serve the name {name}")


def _has_instead(worker: Worker, taint: str) -> str | None:
    """The worker's value in the taint's topology domain, None without one."""
    wanted = topology_of(taint)
    return worker.domains.get(wanted[0]) if wanted is not None else None

"""Selections in the manner of Dynamo's selection service: its workers, its choices, its bookings.

Clients register workers by number, with the address of their KV events, and ask for a worker for
each request. The workers are the clients' own: this router does not probe them and sends them no
requests. Caches count as in Dynamo, and so do loads, so that the answers are those of Dynamo 1.6.1.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dynctl.adapters.ports import StreamCondition
from dynctl.base.tasks import Supervisor
from dynctl.serving.routing.index_runtime import IndexRuntime
from dynctl.serving.routing.standalone_index import Key, written
from dynctl.serving.services.select_workers import SelectionError, SelectWorkers
from dynctl.wire.dynamo.events import RouterEvent
from router_core import (
    Applied,
    BlocksStored,
    Booked,
    Change,
    ConfigError,
    ConstraintError,
    Decision,
    Expired,
    Freed,
    KvEvent,
    OutputBlock,
    Pin,
    PrefillDone,
    Router,
    RouterConfig,
    RoutingRequest,
    RoutingView,
    constraints,
    hash_prompt,
    sequence_hashes,
    slots_of,
    to_signed,
    to_unsigned,
)

MOST_PENDING: Final = 65_536
MOST_RESERVED: Final = 65_536
#: Hashes of all reservations, whose blocks count by their number above that; and of all selections
#: that wait for theirs, of which the oldest end above that.
MOST_HASHES: Final = 8 * 1024 * 1024
#: Characters of the id of a selection.
MOST_ID: Final = 1024
#: Seconds that a selection waits for its reservation.
PENDING_S: Final = 60.0
_STAGE: Final = "aggregated"

#: Field of Dynamo's override of a request -> the router setting.
_OVERRIDES: Final = {
    "overlap_score_credit": "overlap_score_credit",
    "overlap_score_credit_decay": "overlap_score_credit_decay",
    "prefill_load_scale": "prefill_load_scale",
    "decode_active_request_weight": "decode_active_request_weight",
    "router_temperature": "router_temperature",
    "assume_kv_reuse": "router_assume_kv_reuse",
    "track_prefill_tokens": "router_track_prefill_tokens",
}


@dataclass(frozen=True, slots=True)
class _Pending:
    """A selection that may be reserved."""

    booking: Booked
    endpoint: str
    at: float


class SelectService:
    """The workers of clients, and what they ask. ``config``: settings of the router; its queue is
    not used, requests never wait. ``clock``: monotonic seconds; ``sample``: numbers in [0, 1)."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Callable[[], float],
        tasks: Supervisor,
        sample: Callable[[], float] = random.random,
    ) -> None:
        self.router = Router(config, learns=True)
        self.runtime = IndexRuntime(self._apply, self._sweep, self._report, clock, tasks)
        self._clock = clock
        self._sample = sample
        self._pending: dict[tuple[Key, str], _Pending] = {}
        self._pending_hashes = 0
        self._reserved: set[str] = set()
        self.workers = SelectWorkers(self.router, self.runtime, clock, self._forget)

    # -- selections ------------------------------------------------------------------------

    def select(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Choose a worker; with a ``selection_id`` the choice can be reserved."""
        request, decision, shown = self._chosen(body, body["selection_id"])
        selection_id = body["selection_id"]
        if selection_id is not None:
            booking = replace(self._booking(decision, request, body), request_id=selection_id)
            self._keep((self._key(body), selection_id), booking, shown["endpoint"])
            shown = {"selection_id": selection_id, **shown}
        if body["advisory"]:
            shown["worker_load"] = self._worker_load(decision)
        return shown

    def select_and_reserve(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Choose a worker and count the request as its load."""
        self._partition(self._key(body))
        selection_id = body["selection_id"] or str(uuid.uuid4())
        self._free_for_use(selection_id)
        request, decision, shown = self._chosen(body, selection_id)
        booking = self._booking(decision, request, body)
        self._reserve(replace(booking, request_id=selection_id))
        return {
            "selection_id": selection_id,
            "sequence_hashes": [
                to_signed(sequence_hash) for sequence_hash in request.sequence_hashes
            ],
            "isl_tokens": request.isl_tokens,
            "track_prefill_tokens": decision.parameters.track_prefill_tokens,
            **shown,
        }

    def reserve(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Count an earlier selection as load, or a request on a worker of the client's choice."""
        key, selection_id = self._key(body), body["selection_id"]
        if body["worker_id"] is not None:
            self._end_pending((key, selection_id))
            booking, endpoint = self._explicit(key, body)
        else:
            pending = self._pending.get((key, selection_id))
            if pending is None or self._clock() - pending.at > PENDING_S:
                raise SelectionError(
                    404,
                    f"no pending selection {selection_id} for {written(key)} (expired, already "
                    "used, or never selected)",
                )
            booking, endpoint = pending.booking, pending.endpoint
            if self.router.registry.slot(booking.worker_id, booking.dp_rank) is None:
                where = f"{booking.worker_id} (dp_rank {booking.dp_rank})"
                raise SelectionError(
                    404, f"schedulable worker {where} not found for {written(key)}"
                )
        self._free_for_use(selection_id)
        self._reserve(booking)
        self._end_pending((key, selection_id))
        return {
            "selection_id": selection_id,
            "model_name": key[0],
            "routing_group": key[1],
            "worker_id": booking.worker_id,
            "dp_rank": booking.dp_rank,
            "endpoint": endpoint,
        }

    def prefill_complete(self, selection_id: str) -> None:
        """The first output token of a reservation arrived."""
        self._known(selection_id)
        self.router.apply(PrefillDone(selection_id), self._clock())

    def output_block(self, selection_id: str, fraction: float | None) -> None:
        """A reservation generated one more block."""
        if fraction is not None and not 0 <= fraction <= 1:
            raise SelectionError(400, "decay_fraction must be between 0.0 and 1.0")
        self._known(selection_id)
        self.router.apply(OutputBlock(selection_id, fraction), self._clock())

    def free(self, selection_id: str) -> None:
        """A reservation ended."""
        self._known(selection_id)
        self._reserved.discard(selection_id)
        self.router.apply(Freed(selection_id), self._clock())

    def expire(self) -> None:
        """End reservations without reports for ``active_request_expiry_secs``, and selections that
        were not reserved."""
        now = self._clock()
        self.router.apply(Expired(), now)
        self._reserved &= {booking.request_id for booking in self.router.load}
        for key in [key for key, pending in self._pending.items() if now - pending.at > PENDING_S]:
            self._end_pending(key)

    # -- questions -------------------------------------------------------------------------

    def potential_loads(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The load of each rank with the request."""
        request, view = self._request(body, "potential")
        self.router.advance(self._clock())
        slots = slots_of(self.router.registry.model(request.model))
        shared = dict(
            self.router.load.shared_blocks(
                request.sequence_hashes, self.router.registry.model(request.model)
            ).items()
        )
        effective = self._effective(request, view)
        track = view.parameters[_STAGE].track_prefill_tokens
        load = self.router.load
        return [
            {
                **self._ref(slot),
                "potential_prefill_tokens": load.prefill_tokens[slot]
                + (effective[slot] if track else 0),
                "potential_decode_blocks": load.decode_blocks[slot]
                + len(request.sequence_hashes)
                - shared.get(slot, 0),
                "active_requests": load.requests[slot],
            }
            for slot in slots
        ]

    def overlap_scores(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The cached blocks of each rank by tier."""
        request, _ = self._request(body, "overlap")
        slots = slots_of(self.router.registry.model(request.model))
        return {
            "block_size": request.block_size,
            "num_blocks": len(request.sequence_hashes),
            "workers": [
                overlap_row(self._ref(slot), *held)
                for slot, held in zip(slots, self._held(request, slots), strict=True)
            ],
            "shared_cache": {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None},
        }

    def loads(self, model: str | None = None, group: str | None = None) -> list[dict[str, Any]]:
        """The load of each rank by model and routing group."""
        self.router.advance(self._clock())
        load = self.router.load
        return [
            {
                "model_name": key[0],
                "routing_group": key[1],
                "loads": [
                    {
                        **self._ref(slot),
                        "potential_prefill_tokens": load.prefill_tokens[slot],
                        "potential_decode_blocks": load.decode_blocks[slot],
                        "active_requests": load.requests[slot],
                    }
                    for slot in slots_of(self.router.registry.model("\x00".join(key)))
                ],
                "pending_count": 0,
                "pending_isl_tokens": 0,
            }
            for key in self.workers.partitions
            if model in (None, key[0]) and group in (None, key[1])
        ]

    def events(self, key: Key) -> Iterator[RouterEvent]:
        """The events that make a partition's index of an empty one."""
        number = 0
        for slot in slots_of(self.router.registry.model("\x00".join(key))):
            ref = self.router.registry.ref(slot)
            lower = [row for row in self.router.tiers.dump() if row["slot"] == slot]
            stored = [
                BlocksStored(parent, (name,), (local,), tier=row["tier"])
                for row in lower
                for parent, local, name in row["blocks"]
            ]
            for event in (*self.router.index.stored_events(slot), *stored):
                yield RouterEvent(ref.worker_id, ref.dp_rank, number, event, event.tier)
                number += 1

    # -- inside ----------------------------------------------------------------------------

    @staticmethod
    def _key(body: Mapping[str, Any]) -> Key:
        return body["model_name"], body["routing_group"]

    def _partition(self, key: Key) -> str:
        """The router's name of a model with a schedulable worker."""
        if not any(not record.reasons for record in self.workers.records.values()):
            raise SelectionError(503, "no schedulable workers are available")
        name = "\x00".join(key)
        if not self.router.registry.model(name):
            raise SelectionError(503, f"no schedulable workers for {written(key)}")
        return name

    def _request(
        self, body: Mapping[str, Any], request_id: str | None
    ) -> tuple[RoutingRequest, RoutingView]:
        key = self._key(body)
        name, size = self._partition(key), self.workers.partitions[key]
        local, hashes, isl_tokens = self._prompt(body, name, size)
        pinned, limits = body.get("pinned_worker"), body.get("routing_constraints") or {}
        try:
            wanted = constraints(
                limits.get("required_taints") or (), limits.get("preferred_taints") or {}
            )
        except ConstraintError as error:
            raise SelectionError(400, str(error)) from None
        allowed = body.get("allowed_worker_ids")
        pin = None if pinned is None else Pin(pinned["worker_id"], pinned["dp_rank"])
        request = RoutingRequest(
            request_id or "selection",
            name,
            isl_tokens,
            size,
            hashes,
            constraints=wanted,
            pin_decode=pin,
            allowed_worker_ids=None if allowed is None else frozenset(allowed),
            local_hashes=local,
            lora_name=body["lora_name"] or None,
        )
        return request, self._view(body.get("router_config_override"))

    def _prompt(
        self, body: Mapping[str, Any], model: str, size: int
    ) -> tuple[Sequence[int], Sequence[int], int]:
        """Local hashes, sequence hashes and length of the prompt."""
        tokens, routed = body["token_ids"], body["mm_routing_info"]
        if routed and routed["routing_token_ids"]:
            tokens = routed["routing_token_ids"]
        if tokens is not None:
            slot = next(iter(slots_of(self.router.registry.model(model))))
            eagle = body["is_eagle"]
            if eagle is None:
                eagle = self.router.registry.worker(slot).runtime_config.enable_eagle
            found = hash_prompt(
                tokens,
                size,
                lora_name=body["lora_name"] or None,
                cache_namespace=body["cache_salt"] or None,
                is_eagle=eagle,
            )
            return tuple(found.local), tuple(found.sequence), len(tokens)
        local, hashes, isl = body["block_hashes"], body["sequence_hashes"], body["isl_tokens"]
        for name, value in (
            ("block_hashes", local),
            ("sequence_hashes", hashes),
            ("isl_tokens", isl),
        ):
            if value is None:
                raise SelectionError(400, f"{name} is required without token_ids")
        if isl == 0:
            raise SelectionError(400, "isl_tokens must be greater than 0")
        if len(local) != len(hashes):
            raise SelectionError(
                400,
                f"block_hashes length {len(local)} must match sequence_hashes length {len(hashes)}",
            )
        unsigned = tuple(to_unsigned(local_hash) for local_hash in local)
        return unsigned, tuple(to_unsigned(sequence_hash) for sequence_hash in hashes), isl

    def _view(self, override: Mapping[str, Any] | None) -> RoutingView:
        values = {
            _OVERRIDES[name]: value
            for name, value in (override or {}).items()
            if name in _OVERRIDES and value is not None
        }
        if not values:
            return self.router.view()
        try:
            return self.router.view(self.router.config.with_values(values))
        except ConfigError as error:
            raise SelectionError(422, f"router_config_override: {error}") from None

    def _chosen(
        self, body: Mapping[str, Any], request_id: str | None
    ) -> tuple[RoutingRequest, Decision, dict[str, Any]]:
        request, view = self._request(body, request_id)
        self.router.advance(self._clock())
        # The index is asked by the names that follow from the local hashes; a client may count
        # load under others.
        asked = replace(request, sequence_hashes=tuple(sequence_hashes(request.local_hashes)))
        samples = (self._sample(), self._sample())
        decision = self.router.plan(asked, samples=samples, view=view).final
        if decision.winner is None:
            raise SelectionError(503, "no endpoints available to route work")
        ref = decision.refs[decision.winner]
        record = self.workers.records[ref.worker_id]
        slots = self.router.registry.slots(ref.worker_id)
        slot = self.router.registry.slot(*ref)
        assert slot is not None
        assert decision.inputs is not None
        cached = decision.inputs.cached_tokens(decision.winner, decision.parameters)
        mask = self.router.registry.model(request.model)
        shared = dict(self.router.load.shared_blocks(request.sequence_hashes, mask).items())
        # The block that is not complete counts too.
        blocks = len(request.sequence_hashes)
        blocks += blocks * request.block_size < request.isl_tokens
        return (
            request,
            decision,
            {
                "model_name": record.key[0],
                "routing_group": record.key[1],
                "worker_id": ref.worker_id,
                "dp_rank": ref.dp_rank,
                "endpoint": record.fields["endpoint"],
                "block_size": request.block_size,
                "overlap": overlap_summary(
                    request.block_size,
                    dict(
                        zip(
                            self.router.registry.worker(slot).ranks,
                            self._held(asked, slots),
                            strict=True,
                        )
                    ),
                ),
                "effective_prefill_tokens": max(0, request.isl_tokens - int(cached)),
                "potential_decode_blocks": self.router.load.decode_blocks[slot]
                + blocks
                - shared.get(slot, 0),
            },
        )

    def _booking(
        self, decision: Decision, request: RoutingRequest, body: Mapping[str, Any]
    ) -> Booked:
        booking = self.router.booking(decision, request)
        return replace(booking, request_id=body["selection_id"] or "selection")

    def _explicit(self, key: Key, body: Mapping[str, Any]) -> tuple[Booked, str]:
        name, size = self._partition(key), self.workers.partitions[key]
        worker_id, rank = body["worker_id"], body["dp_rank"] or 0
        local: Sequence[int] = ()
        if body["token_ids"] is not None or body["mm_routing_info"]:
            local, hashes, isl_tokens = self._prompt(body, name, size)
        else:
            for field_name in ("sequence_hashes", "isl_tokens"):
                if body[field_name] is None:
                    raise SelectionError(400, f"{field_name} is required without token_ids")
            hashes = tuple(to_unsigned(sequence_hash) for sequence_hash in body["sequence_hashes"])
            isl_tokens = body["isl_tokens"]
        tokens = body["effective_prefill_tokens"] or 0
        if tokens > isl_tokens:
            raise SelectionError(
                400,
                f"effective_prefill_tokens {tokens} must be less than or equal to isl_tokens "
                f"{isl_tokens}",
            )
        record = self.workers.records.get(worker_id)
        if record is None or record.reasons or record.key != key:
            raise SelectionError(
                404, f"schedulable worker {worker_id} not found for {written(key)}"
            )
        if self.router.registry.slot(worker_id, rank) is None:
            raise SelectionError(404, f"Worker {written_rank(worker_id, rank)} not found")
        booking = Booked(
            body["selection_id"],
            _STAGE,
            worker_id,
            rank,
            prefill_tokens=0 if body["track_prefill_tokens"] is False else tokens,
            sequence_hashes=hashes,
            prompt_hashes=tuple(sequence_hashes(local)),
        )
        return booking, record.fields["endpoint"]

    def _free_for_use(self, selection_id: str) -> None:
        self._check_id(selection_id)
        if selection_id in self._reserved:
            raise SelectionError(
                409, f"selection {selection_id} is already reserved or being reserved"
            )
        if len(self._reserved) >= MOST_RESERVED:
            raise SelectionError(429, f"{MOST_RESERVED:,} reservations are active, the maximum")

    def _reserve(self, booking: Booked) -> None:
        blocks = len(booking.sequence_hashes)
        if self.router.load.hashes + blocks > MOST_HASHES:
            blocks += booking.anonymous_blocks
            booking = replace(booking, sequence_hashes=(), anonymous_blocks=blocks)
        applied = self.router.apply(booking, self._clock())
        if not applied.ok:
            raise SelectionError(409, applied.message)
        self._reserved.add(booking.request_id)

    def _keep(self, place: tuple[Key, str], booking: Booked, endpoint: str) -> None:
        self._check_id(place[1])
        self._end_pending(place)
        self._pending_hashes += _hashes(booking)
        while self._pending and (
            len(self._pending) >= MOST_PENDING or self._pending_hashes > MOST_HASHES
        ):
            self._end_pending(next(iter(self._pending)))
        self._pending[place] = _Pending(booking, endpoint, self._clock())

    def _end_pending(self, place: tuple[Key, str]) -> None:
        pending = self._pending.pop(place, None)
        if pending is not None:
            self._pending_hashes -= _hashes(pending.booking)

    @staticmethod
    def _check_id(selection_id: str) -> None:
        if len(selection_id) > MOST_ID:
            raise SelectionError(400, f"selection_id is longer than {MOST_ID:,} characters")

    def _forget(self, selection_ids: Iterable[str]) -> None:
        self._reserved.difference_update(selection_ids)

    def _known(self, selection_id: str) -> None:
        if selection_id not in self._reserved:
            raise SelectionError(404, f"reservation {selection_id} not found")

    def _held(self, request: RoutingRequest, slots: Sequence[int]) -> list[tuple[int, int, int]]:
        """Cached blocks of each slot: on the device, in host memory and on disk behind these."""
        router = self.router
        scores = router.overlap_scores(request)
        found = []
        for slot in slots:
            device = scores.get(router.registry.ref(slot), 0)
            host = disk = 0
            if router.tiers.mask >> slot & 1:
                held = min(device, len(request.local_hashes))
                leading = request.sequence_hashes[:held]
                name = router.index.name_of(slot, leading) if held else None
                host, disk = router.tiers.extend(slot, name, request.local_hashes, held)
            found.append((device, host, disk))
        return found

    def _effective(self, request: RoutingRequest, view: RoutingView) -> dict[int, int]:
        """Prompt tokens that each rank would compute, by slot."""
        decision = self.router.plan(
            replace(request, constraints=constraints(), pin_decode=None, allowed_worker_ids=None),
            view=view,
        ).final
        found = {}
        for at, ref in enumerate(decision.refs):
            slot = self.router.registry.slot(*ref)
            if slot is not None and decision.inputs is not None:
                cached = decision.inputs.cached_tokens(at, decision.parameters)
                found[slot] = max(0, request.isl_tokens - int(cached))
        for slot in slots_of(self.router.registry.model(request.model)):
            found.setdefault(slot, request.isl_tokens)
        return found

    def _worker_load(self, decision: Decision) -> dict[str, Any]:
        ref = decision.require()
        slot = self.router.registry.slot(*ref)
        assert slot is not None
        card = self.router.registry.worker(slot).runtime_config
        shown: dict[str, Any] = {
            "active_prefill_tokens": self.router.load.prefill_tokens[slot],
            "prefill_token_capacity": card.max_num_batched_tokens or 10_000_000,
        }
        if card.total_kv_blocks is not None:
            shown["total_kv_blocks"] = card.total_kv_blocks
        return shown

    def _ref(self, slot: int) -> dict[str, int]:
        ref = self.router.registry.ref(slot)
        return {"worker_id": ref.worker_id, "dp_rank": ref.dp_rank}

    def _apply(self, change: Change) -> Applied:
        if isinstance(change, KvEvent) and isinstance(change.event, BlocksStored):
            # Dynamo does not count the copies of a block.
            change = replace(change, event=replace(change.event, counted=False))
        return self.router.apply(change, self._clock())

    def _sweep(self, max_blocks: int) -> bool:
        return self.router.sweep(max_blocks, self._clock())

    def _report(self, condition: StreamCondition) -> None:
        """Conditions of the clients' workers are in the log of their streams."""


def overlap_row(ref: Mapping[str, int], device: int, host: int, disk: int) -> dict[str, Any]:
    """A row of ``overlap_scores``; lower tiers are added to what is above them."""
    return {
        **ref,
        "device_blocks": device,
        "host_pinned_blocks": device + host,
        "disk_blocks": device + host + disk,
        "host_pinned_extension_blocks": host,
        "disk_extension_blocks": disk,
        "shared_beyond_device_blocks": None,
    }


def overlap_summary(size: int, ranks: Mapping[int, tuple[int, int, int]]) -> dict[str, Any]:
    """What a worker has cached of a prompt, in tokens: the best of its ranks in each tier."""
    gpu = {str(rank): size * held[0] for rank, held in ranks.items()}
    cpu = max((size * sum(held[:2]) for held in ranks.values()), default=0)
    disk = max((size * sum(held) for held in ranks.values()), default=0)
    return {
        "longest_matched": max(disk, cpu, *gpu.values(), 0),
        "gpu": max(gpu.values(), default=0),
        "dp": gpu,
        "cpu": cpu,
        "disk": disk,
    }


def written_rank(worker_id: int, dp_rank: int) -> str:
    """A rank as in Dynamo's errors."""
    return f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {dp_rank} }}"


def _hashes(booking: Booked) -> int:
    return len(booking.sequence_hashes) + len(booking.prompt_hashes)

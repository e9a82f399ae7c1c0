"""Dynamo's selection service and slot tracker over HTTP, for clients that use them.

Both answer on ports of their own (``serve router --select-service-port``, ``--slot-tracker-port``),
because their paths are not those of the router's own interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from dynctl.serving.routing.standalone_index import DEFAULT_GROUP
from dynctl.serving.services.dynamo_service import DynamoService, ServiceError
from dynctl.serving.services.select_service import SelectService
from dynctl.serving.services.select_workers import SelectionError
from dynctl.serving.services.slot_tracker import SlotTracker, TrackerError
from dynctl.wire.dynamo.events import router_event_map
from dynctl.wire.dynamo.service_bodies import (
    F32,
    F64,
    FLAG,
    I64,
    REQUIRED,
    TEXT,
    U32,
    U64,
    USIZE,
    Field,
    Shape,
    many,
    object_of,
    one_of,
    optional,
    table,
)

_TEXT: Final = Field(optional(TEXT))
_COUNT: Final = Field(optional(U32))
_PLACE: Final = {
    "model_name": Field(TEXT, "default"),
    "routing_group": Field(TEXT, DEFAULT_GROUP),
}


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) >= 2**32:
        raise ValueError(text)
    return int(text)


_CARD: Final = {
    "endpoint": _TEXT,
    "kv_events_endpoint": _TEXT,
    "kv_events_endpoints": Field(table(TEXT, _rank), {}),
    "replay_endpoint": _TEXT,
    "block_size": _COUNT,
    "data_parallel_start_rank": _COUNT,
    "data_parallel_size": _COUNT,
    "max_num_batched_tokens": Field(optional(U64)),
    "total_kv_blocks": Field(optional(U64)),
    "stable_routing_id": _TEXT,
    "is_eagle": Field(optional(FLAG)),
    "taints": Field(many(TEXT), ()),
    "topology_domains": Field(table(TEXT), {}),
    "kv_transfer_domain": _TEXT,
    "kv_transfer_enforcement": Field(optional(one_of("required", "preferred"))),
    "kv_transfer_preferred_weight": Field(optional(F32)),
}
WORKER: Final = Shape("WorkerRequest", {"worker_id": Field(U64, REQUIRED), **_PLACE, **_CARD})
PATCH: Final = Shape(
    "WorkerPatchRequest",
    {name: Field(optional(field.kind)) for name, field in _CARD.items()},
)
_ROUTED: Final = Shape(
    "MmRoutingInfoRequest",
    {"routing_token_ids": Field(many(U32), REQUIRED)},
)
_PROMPT: Final = {
    "token_ids": Field(optional(many(U32))),
    "mm_routing_info": Field(optional(object_of(_ROUTED))),
    "block_hashes": Field(optional(many(I64))),
    "sequence_hashes": Field(optional(many(I64))),
    "isl_tokens": Field(optional(USIZE)),
    "lora_name": _TEXT,
    "cache_salt": _TEXT,
    "is_eagle": Field(optional(FLAG)),
}
_FLAT: Final = frozenset(_PROMPT)
_OVERRIDE: Final = Shape(
    "RouterConfigOverrideSerde",
    {
        "overlap_score_credit": Field(optional(F64)),
        "overlap_score_credit_decay": Field(optional(F64)),
        "prefill_load_scale": Field(optional(F64)),
        "decode_active_request_weight": Field(optional(F64)),
        "router_temperature": Field(optional(F64)),
        "assume_kv_reuse": Field(optional(FLAG)),
        "track_prefill_tokens": Field(optional(FLAG)),
    },
)
_ASKED: Final = {
    **_PLACE,
    "selection_id": _TEXT,
    **_PROMPT,
    "router_config_override": Field(optional(object_of(_OVERRIDE))),
    "expected_output_tokens": _COUNT,
    "priority_jump": Field(optional(F64)),
    "strict_priority": _COUNT,
    "session_id": _TEXT,
    "pinned_worker": Field(
        optional(
            object_of(
                Shape(
                    "WorkerWithDpRank",
                    {"worker_id": Field(U64, REQUIRED), "dp_rank": Field(U32, REQUIRED)},
                )
            )
        )
    ),
    "allowed_worker_ids": Field(optional(many(U64))),
    "routing_constraints": Field(
        object_of(
            Shape(
                "RoutingConstraints",
                {
                    "required_taints": Field(many(TEXT), ()),
                    "preferred_taints": Field(table(F32), {}),
                },
            )
        )
    ),
}
SELECT: Final = Shape("SelectRequest", {**_ASKED, "advisory": Field(FLAG, False)}, _FLAT)
SELECT_AND_RESERVE: Final = Shape("SelectAndReserveRequest", _ASKED, _FLAT)
RESERVE: Final = Shape(
    "ReservationRequest",
    {
        **_PLACE,
        "selection_id": Field(TEXT, REQUIRED),
        "worker_id": Field(optional(U64)),
        "dp_rank": _COUNT,
        **_PROMPT,
        "router_config_override": Field(optional(object_of(_OVERRIDE))),
        "expected_output_tokens": _COUNT,
        "effective_prefill_tokens": Field(optional(USIZE)),
        "track_prefill_tokens": Field(optional(FLAG)),
    },
    _FLAT,
)
ASKED: Final = Shape(
    "PotentialLoadsRequest",
    {**_PLACE, **_PROMPT, "router_config_override": Field(optional(object_of(_OVERRIDE)))},
    _FLAT,
)
OUTPUT_BLOCK: Final = Shape("OutputBlockRequest", {"decay_fraction": Field(optional(F64))})
PEER: Final = Shape("PeerRequest", {"endpoint": Field(TEXT, REQUIRED)})


class SelectApi:
    """The paths of Dynamo's selection service. ``token``: the operators'; without one changes and
    reservations are for programs on this host."""

    def __init__(self, service: SelectService, token: str | None) -> None:
        self._service = service
        self._http = DynamoService(token)

    def application(self, limits: Any) -> web.Application:
        """The service, for one listener."""
        http, service = self._http, self._service
        routes = [
            http.get("/health", lambda _: {"status": "ok"}),
            http.get("/ready", lambda _: service.workers.ready()),
            http.get("/loads", lambda one: service.loads(*_filters(one))),
            http.get("/workers", lambda one: service.workers.documents(*_filters(one))),
            web.get("/dump", self._dump),
            *peers(http),
            http.post("/workers", WORKER, self._asks(service.workers.upsert, 201), writes=True),
            http.patch("/workers/{worker_id}", PATCH, self._patch),
            http.change("DELETE", "/workers/{worker_id}", self._delete),
            http.post("/select", SELECT, self._asks(service.select), writes=True),
            http.post(
                "/select_and_reserve",
                SELECT_AND_RESERVE,
                self._asks(service.select_and_reserve),
                writes=True,
            ),
            http.post("/reservations", RESERVE, self._asks(service.reserve, 201), writes=True),
            http.change("POST", "/reservations/{id}/prefill_complete", self._prefill_complete),
            http.post(
                "/reservations/{id}/output_block", OUTPUT_BLOCK, self._output_block, writes=True
            ),
            http.change("DELETE", "/reservations/{id}", self._free),
            http.post("/potential_loads", ASKED, self._asks(service.potential_loads)),
            http.post("/overlap_scores", ASKED, self._asks(service.overlap_scores)),
        ]
        return http.application(routes, limits)

    @staticmethod
    def _asks(
        work: Callable[[Mapping[str, Any]], Any], status: int = 200
    ) -> Callable[[web.Request, dict[str, Any]], tuple[int, Any]]:
        def handle(_: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
            return status, _answered(lambda: work(body))

        return handle

    def _patch(self, http: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, _answered(lambda: self._service.workers.patch(_worker_id(http), body))

    def _delete(self, http: web.Request) -> tuple[int, Any]:
        return 200, _answered(lambda: self._service.workers.delete(_worker_id(http)))

    def _prefill_complete(self, http: web.Request) -> tuple[int, Any]:
        return _done(lambda: self._service.prefill_complete(http.match_info["id"]))

    def _output_block(self, http: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
        fraction = body["decay_fraction"]
        return _done(lambda: self._service.output_block(http.match_info["id"], fraction))

    def _free(self, http: web.Request) -> tuple[int, Any]:
        return _done(lambda: self._service.free(http.match_info["id"]))

    async def _dump(self, _: web.Request) -> web.Response:
        service = self._service
        found = {
            f"{key[0]}:{key[1]}": {
                "block_size": size,
                "events": [router_event_map(event) for event in service.events(key)],
            }
            for key, size in service.workers.partitions.items()
        }
        body = await asyncio.to_thread(msgspec.json.encode, found)
        return web.Response(body=body, headers={"content-type": "application/json"})


_WORKER: Final = Field(U64, REQUIRED)
_MODEL: Final = {"model_name": Field(TEXT, REQUIRED), "routing_group": Field(TEXT, DEFAULT_GROUP)}
_HASHES: Final = Field(many(I64, "an array of signed 64-bit sequence hashes"), REQUIRED)
_REQUEST: Final = Shape("LifecycleRequest", {**_MODEL, "request_id": Field(TEXT, REQUIRED)})
TRACKED: Final = Shape(
    "RegisterRequest",
    {
        "worker_id": _WORKER,
        **_MODEL,
        "block_size": Field(U32, REQUIRED),
        "dp_start": Field(U32, REQUIRED),
        "dp_size": Field(U32, REQUIRED),
    },
)
UNTRACKED: Final = Shape("UnregisterRequest", {"worker_id": _WORKER, **_MODEL})
ADDED: Final = Shape(
    "AddRequest",
    {
        **_MODEL,
        "request_id": Field(TEXT, REQUIRED),
        "worker_id": _WORKER,
        "dp_rank": Field(U32, REQUIRED),
        "sequence_hashes": _HASHES,
        "new_isl_tokens": Field(USIZE, 0),
    },
)
PROJECTED: Final = Shape(
    "PotentialLoadsRequest",
    {**_MODEL, "sequence_hashes": _HASHES, "new_isl_tokens": Field(USIZE, 0)},
)


class SlotTrackerApi:
    """The paths of Dynamo's slot tracker."""

    def __init__(self, tracker: SlotTracker, token: str | None) -> None:
        self._tracker = tracker
        self._http = DynamoService(token)

    def application(self, limits: Any) -> web.Application:
        """The service, for one listener."""
        http, tracker = self._http, self._tracker
        routes = [
            web.get("/health", _empty),
            http.get("/workers", lambda one: tracker.workers(*_filters(one))),
            http.get("/loads", lambda one: tracker.loads(*_filters(one))),
            *peers(http),
            http.post("/register", TRACKED, self._does(tracker.register, 201), writes=True),
            http.post("/unregister", UNTRACKED, self._does(tracker.unregister), writes=True),
            http.post("/add", ADDED, self._does(tracker.add, 201), writes=True),
            http.post(
                "/prefill_complete", _REQUEST, self._does(tracker.prefill_complete), writes=True
            ),
            http.post("/free", _REQUEST, self._does(tracker.free), writes=True),
            http.post(
                "/potential_loads",
                PROJECTED,
                lambda _, body: (200, _answered(lambda: tracker.potential_loads(body))),
            ),
        ]
        return http.application(routes, limits)

    @staticmethod
    def _does(
        work: Callable[[Mapping[str, Any]], None], status: int = 200
    ) -> Callable[[web.Request, dict[str, Any]], tuple[int, Any]]:
        def handle(_: web.Request, body: dict[str, Any]) -> tuple[int, Any]:
            _answered(lambda: work(body))
            return status, {"status": "ok"}

        return handle


def peers(http: DynamoService) -> Iterable[web.RouteDef]:
    """Dynamo's paths of replica sync, which has other options here."""

    def disabled(_: web.Request, __: dict[str, Any]) -> tuple[int, Any]:
        raise ServiceError(409, "replica sync is disabled")

    yield http.get("/replica_sync/peers", lambda _: [])
    yield http.post("/replica_sync/register_peer", PEER, disabled, writes=True)
    yield http.post("/replica_sync/deregister_peer", PEER, disabled, writes=True)


def _answered(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (SelectionError, TrackerError) as error:
        raise ServiceError(error.status, str(error)) from None


def _done(work: Callable[[], None]) -> tuple[int, Any]:
    _answered(work)
    return 200, {"status": "ok"}


def _worker_id(http: web.Request) -> int:
    text = http.match_info["worker_id"]
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) >= 2**64:
        raise web.HTTPBadRequest(text=f"Invalid URL: Cannot parse `{text[:40]}` to a `u64`")
    return int(text)


def _filters(http: web.Request) -> tuple[str | None, str | None]:
    return http.query.get("model_name"), http.query.get("routing_group")


async def _empty(_: web.Request) -> web.Response:
    return web.Response(status=200)

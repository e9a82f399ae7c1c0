"""Operator endpoints of a running router: past decisions, settings, its view, thresholds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from aiohttp import web
from msgspec import UNSET

from dynctl import version
from dynctl.base.errors import without_credentials
from dynctl.documents.config import ConfigDocument, ConfigValue, config_document
from dynctl.documents.decisions import (
    RESPONSE_STATES,
    DecisionList,
    DecisionRow,
    decision_row,
    past_decision,
    with_preferences,
)
from dynctl.documents.doubts import distinct
from dynctl.documents.route_result import RouteResult
from dynctl.documents.view import encode_view
from dynctl.serving.http import busy_threshold
from dynctl.serving.http.auth import guarded
from dynctl.serving.http.busy_threshold import BusyThresholds
from dynctl.serving.http.json_responses import bad_request, json_response, not_found
from dynctl.serving.records.decision_memory import DecisionMemory, Remembered
from dynctl.serving.routing.config import FrontendConfig, ReplicaConfig
from dynctl.serving.routing.refusal import HttpError
from dynctl.serving.routing.service import RoutingService
from router_core import Outcome, RoutingPlan

DEFAULT_LIMIT = 50
MAX_LIMIT = 1_000
#: Ids that an error about an ambiguous suffix lists.
MAX_MATCHES = 10
#: Characters of a process that are compared; the name of a process has fewer.
_LONGEST_PROCESS = 64
#: Seconds that a reader may wait for the next decision.
MAX_WAIT_S = 30
OUTCOMES = (*get_args(Outcome), *RESPONSE_STATES)
_FILTERS = ("outcome", "worker", "domain", "model")
_PARAMETERS = ("limit", *_FILTERS, "moved", "since", "process", "wait", "preferences", "ends")


def serving_values(config: FrontendConfig) -> list[ConfigValue]:
    """The options of a process that steer routing beside the router's settings, by the names of
    `config show`."""
    started = _steering(config)
    defaults = _steering(FrontendConfig())
    return [
        ConfigValue(name, value, "default" if value == defaults[name] else "set at the start")
        for name, value in started.items()
    ]


def _steering(config: FrontendConfig) -> dict[str, Any]:
    ejection, replicas = config.health.ejection, config.replicas or ReplicaConfig()
    dynamo = config.dynamo
    nats = replicas.nats
    return {
        "kv_cache_block_size": config.block_size,
        "model_name": config.model_name,
        "index_memory": config.index_memory_bytes,
        "index_peer": list(config.index_peers),
        "first_byte_timeout": config.limits.first_output_s,
        "idle_timeout": config.limits.idle_s,
        "eject_after": ejection.failures,
        "eject_pause": ejection.pause_s,
        "eject_max_pause": ejection.max_pause_s,
        "panic_threshold": config.health.panic_threshold,
        "router_replica_bind": replicas.bind,
        "router_replica_peer": list(replicas.peers),
        "router_replica_nats": None if nats is None else without_credentials(nats),
        "router_replica_group": replicas.group,
        "namespace_prefix": None if dynamo is None else dynamo.namespace,
        "event_plane": None if dynamo is None else dynamo.event_plane,
        "migration_limit": None if dynamo is None else dynamo.migration_limit,
        "migration_max_seq_len": None if dynamo is None else dynamo.migration_max_tokens,
    }


class Admin:
    """The handlers. ``sources``: the origin of each setting, by name.

    ``serving``: the options of the process that steer routing.
    ``enabled`` False leaves ``/busy_threshold`` out (DYN_DISABLE_FRONTEND_ADMIN_API).
    """

    def __init__(
        self,
        service: RoutingService,
        memory: DecisionMemory,
        *,
        token: str | None = None,
        preset: str | None = None,
        sources: Mapping[str, str] | None = None,
        serving: Sequence[ConfigValue] = (),
        enabled: bool = True,
    ) -> None:
        self._service = service
        self._memory = memory
        self._token = token
        self._preset = preset
        self._sources = dict(sources or {})
        self._serving = serving
        self._enabled = enabled
        self._started = service.router.config
        self._saving = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """The endpoints. Reading thresholds and settings needs no token."""
        token = self._token
        routes = [
            web.get("/v1/config", self.config),
            web.get("/v1/decisions", guarded(self.decisions, token)),
            web.get("/v1/decisions/{id}", guarded(self.decision, token)),
            web.get("/v1/view", guarded(self.view, token), allow_head=False),
        ]
        if self._enabled:
            thresholds = BusyThresholds(self._service)
            routes += [
                web.get(busy_threshold.PATH, thresholds.get),
                web.post(busy_threshold.PATH, guarded(thresholds.post, token, json=False)),
            ]
        return routes

    async def config(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/config``: every router setting with its value and origin."""
        return json_response(self.settings())

    def settings(self) -> ConfigDocument:
        """Every router setting with its value and origin."""
        router, model = self._service.router, self._service.prefill_model
        return config_document(
            router.config,
            version=version(),
            preset=self._preset,
            sources=self._sources,
            started=self._started,
            thresholds={m: t.to_dict() for m, t in router.busy.overrides().items()},
            prefill_load=UNSET if model is None else model.describe(),
            serving=self._serving,
        )

    async def decisions(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/decisions``: the last decisions, newest first, filtered by the query.

        ``since=CURSOR`` skips decisions up to that cursor of an earlier response, and none where
        ``process=ID`` of that response is not this process; with ``wait=SECONDS`` a response
        without decisions waits for one that long. ``ends=CURSOR`` adds the earlier decisions whose
        requests ended after that cursor, and waits for these too.
        """
        return json_response(await self.decision_list(request.query))

    async def decision_list(self, query: Mapping[str, str]) -> DecisionList:
        """As :meth:`decisions`; raises HttpError naming the parameter."""
        wanted = _parse_query(query)
        memory = self._memory
        # A cursor of an earlier process at this address means nothing here.
        other = wanted.process not in ("", memory.process) or wanted.since > memory.recorded
        if other:
            wanted = replace(wanted, since=0, ends=None if wanted.ends is None else 0)
        matching = memory.recent(wanted.limit, since=wanted.since, **wanted.filters)
        ended = self._ended_plans(wanted)
        if not matching and not ended and wanted.wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wanted.wait):
                    await memory.next_recorded(or_ended=wanted.ends is not None)
            matching = memory.recent(wanted.limit, since=wanted.since, **wanted.filters)
            ended = self._ended_plans(wanted)
        plans = [kept.plan for kept in matching]
        rows = [self._row(kept, plan) for plan, kept in zip(plans, matching, strict=True)]
        if wanted.preferences:
            rows = with_preferences(rows, plans)
        counted = wanted.filters or not memory.max_bytes
        skipped = 0 if counted else memory.recorded - wanted.since - len(rows)
        return DecisionList(
            rows,
            len(memory),
            memory.evicted,
            memory.size,
            memory.max_bytes,
            memory.recorded,
            skipped,
            memory.process,
            UNSET if wanted.ends is None else [self._row(kept, kept.plan) for kept in ended],
            memory.ended,
        )

    def _ended_plans(self, wanted: _DecisionQuery) -> list[Remembered]:
        """Decisions before the cursor whose requests ended after the other one."""
        if wanted.ends is None or wanted.since > self._memory.recorded:
            return []
        plans = self._memory.ended_since(wanted.ends, wanted.since, MAX_LIMIT)
        return self._memory.matching(plans, **wanted.filters)

    def _row(self, kept: Remembered, plan: RoutingPlan) -> DecisionRow:
        response = self._memory.response(kept)
        return decision_row(
            plan, at=kept.at, whole=kept.whole, choice=kept.choice, response=response
        )

    async def decision(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/decisions/{id}``: a past decision as a RouteResult.

        The id's last characters are enough if no other kept id ends with them.
        """
        return json_response(self.past(request.match_info["id"]))

    def past(self, wanted: str) -> RouteResult:
        """As :meth:`decision`; raises HttpError (400, 404)."""
        attempts = self._memory.attempts(wanted)
        if not attempts:
            ids = self._memory.ids_ending_with(wanted, MAX_MATCHES + 1)
            if len(ids) > 1:
                raise bad_request(_ambiguous_message(wanted, ids), code="ambiguous_decision")
            attempts = self._memory.attempts(ids[0]) if ids else ()
        if not attempts:
            code = "unknown_decision" if self._memory.max_bytes else "decisions_not_kept"
            raise not_found(self._not_kept_message(wanted), code=code)
        *earlier, last = attempts
        rows = [self._row(kept, kept.plan) for kept in earlier]
        return past_decision(
            last.plan,
            at=last.at,
            whole=last.whole,
            preset=self._preset,
            earlier=rows,
            choice=last.choice,
            response=self._memory.response(last),
        )

    async def view(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/view``: all inputs of a decision, to repeat it offline.

        A consistent copy: the event loop is blocked for it, 0.3 s for a million blocks that no
        two workers share.
        """
        if self._saving.locked():
            raise HttpError(
                409, "another view is being copied; try again", "conflict", "view_in_progress"
            )
        async with self._saving:
            service = self._service
            # Copied here, encoded in a thread: a million cached blocks take seconds.
            body = await asyncio.to_thread(
                encode_view,
                service.router.capture(),
                now=service.clock(),
                preset=self._preset,
                **self.view_facts(),
            )
            response = web.StreamResponse(
                headers={"Content-Type": "application/json", "Content-Length": str(len(body))}
            )
            await response.prepare(request)
            for at in range(0, len(body), 1 << 20):
                await response.write(body[at : at + (1 << 20)])
            await response.write_eof()
            return response

    def view_facts(self) -> dict[str, Any]:
        """What a view has beside the router's state: arguments of :func:`encode_view`."""
        service = self._service
        tokenizers = {model: service.preparation.tokenizers.of(model) for model in service.models()}
        return {
            "model_paths": {m: str(t.directory) for m, t in tokenizers.items() if t is not None},
            "tokenizers": {m: t.fingerprint for m, t in tokenizers.items() if t is not None},
            "doubts": tuple(distinct(d for m in service.models() for d in service.doubts(m))),
        }

    def _not_kept_message(self, wanted: str) -> str:
        memory = self._memory
        if not memory.max_bytes:
            return "this router keeps no decisions; start it with --decision-memory 64MiB"
        shown = wanted if len(wanted) <= 64 else wanted[:64] + "..."
        gone = f", {memory.evicted:,} were removed" if memory.evicted else ""
        return (
            f"no decision {shown!r} is kept: {len(memory):,} are{gone}; "
            "the id is the x-dynctl-decision header of the response"
        )


def _ambiguous_message(wanted: str, ids: list[str]) -> str:
    more = ", .." if len(ids) > MAX_MATCHES else ""
    return f"{wanted[:64]!r} matches several decisions: {', '.join(ids[:MAX_MATCHES])}{more}"


@dataclass(frozen=True, slots=True)
class _DecisionQuery:
    """A query for past decisions; ``wait`` is in seconds. ``ends``: None where it is not given."""

    limit: int
    filters: dict[str, Any]
    since: int
    wait: float
    preferences: bool
    process: str = ""
    ends: int | None = None


def _parse_query(query: Mapping[str, str]) -> _DecisionQuery:
    """Raises HttpError naming the parameter."""
    for name in query:
        if name not in _PARAMETERS:
            expected = f"unknown parameter, expected one of {', '.join(_PARAMETERS)}"
            raise bad_request(f"{name[:64]}: {expected}", param=name[:64], code="unknown_parameter")
    outcome = query.get("outcome")
    if outcome is not None and outcome not in OUTCOMES:
        raise bad_request(
            f"outcome: expected one of {', '.join(OUTCOMES)}, got {outcome[:40]!r}",
            param="outcome",
            code="unknown_outcome",
        )
    return _DecisionQuery(
        _whole_number(query, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT),
        {name: query[name] for name in _FILTERS if name in query}
        | ({"moved": True} if _whole_number(query, "moved", 0, 0, 1) else {}),
        _whole_number(query, "since", 0, 0, 2**53),
        _whole_number(query, "wait", 0, 0, MAX_WAIT_S),
        bool(_whole_number(query, "preferences", 0, 0, 1)),
        query.get("process", "")[:_LONGEST_PROCESS],
        _whole_number(query, "ends", 0, 0, 2**53) if "ends" in query else None,
    )


def _whole_number(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and low <= int(text[:20]) <= high):
        raise bad_request(
            f"{name}: expected {low} to {high}, got {text[:20]!r}", param=name, code="out_of_range"
        )
    return int(text)

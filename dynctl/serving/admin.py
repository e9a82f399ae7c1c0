"""What operators ask a router at work: past decisions, settings, its whole view, thresholds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import get_args

from aiohttp import web

from dynctl import version
from dynctl.serving import busy_threshold
from dynctl.serving.auth import guarded
from dynctl.serving.busy_threshold import BusyThresholds
from dynctl.serving.decision_memory import DecisionMemory
from dynctl.serving.http_answers import bad_request, json_answer, not_found
from dynctl.serving.refusal import HttpError
from dynctl.serving.service import RoutingService
from dynctl.wire.control import (
    DecisionList,
    config_document,
    decision_row,
    past_decision,
)
from dynctl.wire.view_file import encode_view
from router_core.decision import Outcome

DEFAULT_LIMIT = 50
MAX_LIMIT = 1_000
OUTCOMES = (*get_args(Outcome), "refused")
_FILTERS = ("limit", "outcome", "worker", "domain", "model")


class Admin:
    """The handlers. ``sources``: where each setting came from, by name.

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
        enabled: bool = True,
    ) -> None:
        self._service = service
        self._memory = memory
        self._token = token
        self._preset = preset
        self._sources = dict(sources or {})
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
            web.get("/v1/view", guarded(self.view, token)),
        ]
        if self._enabled:
            thresholds = BusyThresholds(self._service)
            routes += [
                web.get(busy_threshold.PATH, thresholds.get),
                web.post(busy_threshold.PATH, guarded(thresholds.post, token)),
            ]
        return routes

    async def config(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/config``: every router setting, its value and where that came from."""
        router = self._service.router
        return json_answer(
            config_document(
                router.config,
                version=version(),
                preset=self._preset,
                sources=self._sources,
                started=self._started,
                thresholds={m: t.to_dict() for m, t in router.busy.overrides().items()},
            )
        )

    async def decisions(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/decisions``: the last ones, newest first, filtered by the query."""
        limit, filters = _filters(request.query)
        memory = self._memory
        rows = [
            decision_row(kept.plan, at=kept.at, whole=kept.whole)
            for kept in memory.recent(limit, **filters)
        ]
        return json_answer(
            DecisionList(rows, len(memory), memory.evicted, memory.size, memory.max_bytes)
        )

    async def decision(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/decisions/{id}``: a past decision as a RouteResult."""
        wanted = request.match_info["id"]
        attempts = self._memory.attempts(wanted)
        if not attempts:
            raise not_found(self._unknown(wanted), code="unknown_decision")
        *earlier, last = attempts
        rows = [decision_row(kept.plan, at=kept.at, whole=kept.whole) for kept in earlier]
        return json_answer(
            past_decision(
                last.plan, at=last.at, whole=last.whole, preset=self._preset, earlier=rows
            )
        )

    async def view(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/view``: everything that a decision depends on, to decide it again offline.

        Taken at one moment: the loop stands still for the copy, 0.3 s for a million blocks
        of which no two workers share any.
        """
        if self._saving.locked():
            raise HttpError(409, "another view is being taken", "conflict", "view_in_progress")
        async with self._saving:
            service = self._service
            tokenizers = {model: service.tokenizers.of(model) for model in service.models()}
            # Copied here, written out beside the loop: a million cached blocks take seconds.
            body = await asyncio.to_thread(
                encode_view,
                service.router.capture(),
                now=service.clock(),
                preset=self._preset,
                model_paths={m: str(t.directory) for m, t in tokenizers.items() if t is not None},
                tokenizers={m: t.fingerprint for m, t in tokenizers.items() if t is not None},
            )
            response = web.StreamResponse(
                headers={"Content-Type": "application/json", "Content-Length": str(len(body))}
            )
            await response.prepare(request)
            for at in range(0, len(body), 1 << 20):
                await response.write(body[at : at + (1 << 20)])
            await response.write_eof()
            return response

    def _unknown(self, wanted: str) -> str:
        memory = self._memory
        if not memory.max_bytes:
            return "no decisions are kept here; start with --decision-memory 64MiB"
        shown = wanted if len(wanted) <= 64 else wanted[:64] + "..."
        gone = f", {memory.evicted:,} had to leave" if memory.evicted else ""
        return (
            f"no decision {shown!r} is kept: {len(memory):,} are{gone}; "
            "the id is the x-dynctl-decision header of the answer"
        )


def _filters(query: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """``(limit, filters of DecisionMemory.recent)``; raises HttpError naming the parameter."""
    for name in query:
        if name not in _FILTERS:
            expected = f"unknown parameter, expected some of {', '.join(_FILTERS)}"
            raise bad_request(f"{name[:64]}: {expected}", param=name[:64], code="unknown_parameter")
    text = query.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= MAX_LIMIT):
        raise bad_request(
            f"limit: expected 1 to {MAX_LIMIT}, got {text[:20]!r}",
            param="limit",
            code="out_of_range",
        )
    outcome = query.get("outcome")
    if outcome is not None and outcome not in OUTCOMES:
        raise bad_request(
            f"outcome: expected one of {', '.join(OUTCOMES)}, got {outcome[:40]!r}",
            param="outcome",
            code="unknown_outcome",
        )
    return int(text), {name: query[name] for name in _FILTERS[1:] if name in query}

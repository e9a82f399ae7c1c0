"""Frontends of a live Dynamo, read again and again: what they export, and their thresholds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, TimedOut, Unreachable
from dynctl.health.facts import FrontendFacts, Unread
from dynctl.sources.dynamo.frontend import MAX_ANSWER_BYTES, DynamoFrontend
from dynctl.sources.dynamo.router_state import Thresholds
from dynctl.sources.kubernetes import Reached
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, read_frontend_metrics

#: Metrics are not read more often than this, nor waited for longer.
METRICS_S: Final = 1.0
READ_S: Final = 3.0
#: Thresholds and who is there change seldom.
SELDOM_S: Final = 10.0


@dataclass(slots=True)
class _Frontend:
    """One of them. ``problem``: why its metrics could not be read the last time."""

    url: str
    metrics: FrontendMetrics | None = None
    problem: str = ""
    thresholds: dict[str, Thresholds] | Unread = field(
        default_factory=lambda: Unread("not read yet")
    )


class PolledFrontends:
    """``timeout``: seconds of a seldom question. One client reads the metrics of all."""

    def __init__(
        self, urls: Sequence[str], timeout: float, wall: Callable[[], float] = time.time
    ) -> None:
        self._timeout = timeout
        self._wall = wall
        self._all = [_Frontend(DynamoFrontend(url, timeout).url) for url in urls]
        # trust_env: a proxy of the machine must not see control calls to a local frontend.
        self._client = httpx.AsyncClient(trust_env=False, timeout=None)  # noqa: S113
        self._read_at = 0.0
        self._seldom_at = 0.0
        self.thresholds: dict[str, Thresholds] = {}

    async def close(self) -> None:
        await self._client.aclose()

    async def read(self) -> None:
        """Read what is due. Never raises: what did not answer is not in :meth:`metrics`."""
        now = self._wall()
        if self._all and abs(now - self._read_at) >= METRICS_S:
            self._read_at = now
            await asyncio.gather(*(self._read_metrics(one) for one in self._all))
        if self._all and abs(now - self._seldom_at) >= SELDOM_S:
            self._seldom_at = now
            await asyncio.gather(*(self._read_seldom(one) for one in self._all))
            told = [one.thresholds for one in self._all if not isinstance(one.thresholds, Unread)]
            self.thresholds = told[0] if told else {}

    def thresholds_changed(self) -> None:
        """Read them again at the next reading."""
        self._seldom_at = 0.0

    def metrics(self) -> list[FrontendMetrics]:
        """Of those that answered the last time."""
        return [one.metrics for one in self._all if one.metrics is not None and not one.problem]

    @property
    def refused(self) -> str:
        """Why no frontend tells anything; empty where one does."""
        silent = [f"{one.url}: {one.problem}" for one in self._all if one.problem]
        return "; ".join(silent) if len(silent) == len(self._all) else ""

    def facts(self) -> tuple[FrontendFacts, ...]:
        """What checks judge."""
        return tuple(
            FrontendFacts(one.url, Unread(one.problem))
            if one.problem
            else FrontendFacts(
                one.url,
                "dynamo",
                version=Unread("not asked"),
                models=Unread("not asked"),
                metrics=one.metrics or Unread("not read yet"),
                thresholds=one.thresholds,
            )
            for one in self._all
        )

    async def _read_metrics(self, one: _Frontend) -> None:
        try:
            async with asyncio.timeout(min(READ_S, self._timeout)):
                one.metrics = read_frontend_metrics(await self._body(f"{one.url}/metrics"))
            one.problem = ""
        except TimeoutError:
            one.problem = f"no answer within {min(READ_S, self._timeout):g} s"
        except (httpx.HTTPError, WireError) as error:
            one.problem = str(error) or type(error).__name__

    async def _body(self, url: str) -> bytes:
        async with self._client.stream("GET", url) as answer:
            parts, size = [], 0
            async for part in answer.aiter_bytes():
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise httpx.TransportError(f"answer over {MAX_ANSWER_BYTES:,} bytes")
                parts.append(part)
        if answer.status_code != 200:
            raise httpx.TransportError(f"/metrics answered {answer.status_code}")
        return b"".join(parts)

    async def _read_seldom(self, one: _Frontend) -> None:
        try:
            asked = DynamoFrontend(one.url, min(READ_S, self._timeout))
            one.thresholds = await asyncio.to_thread(_thresholds, asked)
        except DynctlError as error:
            one.thresholds = Unread(error.message, error.hint)


def _thresholds(frontend: DynamoFrontend) -> dict[str, Thresholds]:
    told: Mapping[str, dict[str, float | int | None]] = frontend.thresholds()
    return dict(told)


@dataclass(frozen=True, slots=True)
class FrontendReports:
    """``thresholds``: model -> its busy thresholds. ``doubts``: what is not known, for people."""

    metrics: list[FrontendMetrics]
    thresholds: Mapping[str, Thresholds]
    doubts: tuple[str, ...] = ()


def read_frontends(frontends: Sequence[DynamoFrontend], ways: Reached | None) -> FrontendReports:
    """Settings come from the first that answers, load from every one.

    ``ways``: how they were found in a cluster; None: they were named. Raises Unreachable or
    TimedOut where a named one does not answer.
    """
    metrics: list[FrontendMetrics] = []
    doubts: list[str] = []
    answering: list[DynamoFrontend] = []
    for place, frontend in enumerate(frontends):
        try:
            metrics.append(frontend.metrics())
            answering.append(frontend)
        except (Unreachable, TimedOut) as error:
            if ways is None:
                raise
            name = ways.names[place]
            said = error.message.replace(frontend.url, name).rstrip(".")
            doubts.append(f"{said}; its load is not known")
    thresholds: Mapping[str, Thresholds] = {}
    try:
        thresholds = answering[0].thresholds() if answering else {}
    except Unreachable as error:
        # Dynamo before 1.0 has no such address, and a gateway may keep it to itself.
        doubts.append(f"busy thresholds are not known: {error.message}")
    return FrontendReports(metrics, thresholds, tuple(doubts))

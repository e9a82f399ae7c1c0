"""Several frontends of one service: ask the first that answers, change all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.documents.config import ConfigDocument
from dynctl.documents.route_result import RouteResult
from dynctl.documents.workers import WorkerRow
from dynctl.sources.dynamo.replicas import replica_at
from dynctl.sources.frontend.client import FrontendClient
from dynctl.sources.query import RouteQuery
from dynctl.sources.thresholds.replicas import (
    HoldsThresholds,
    Replica,
    Values,
    at_once,
    failure,
    set_everywhere,
)

Answer = TypeVar("Answer")


class Frontend(HoldsThresholds, Protocol):
    """A frontend that can be named."""

    @property
    def url(self) -> str: ...


def set_on_all(
    frontends: Sequence[Frontend], model: str, values: Values
) -> dict[str, float | int | None]:
    """Set on every frontend, or on none of them; returns what is in force on the first.

    Raises DynctlError.
    """
    replicas = [Replica(one.url, one) for one in frontends]
    result = set_everywhere(replicas, model, values)
    if not result.ok:
        raise failure(result, partial=False)
    return dict(result.outcomes[0].after or {})


class FrontendSource:
    """Reads come from the first replica that can be reached; a setting is set on every one."""

    def __init__(self, sources: Sequence[FrontendClient]) -> None:
        self.sources = list(sources)
        self.doubts: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return ", ".join(source.title for source in self.sources)

    def route(self, query: RouteQuery) -> RouteResult:
        return self._first(lambda source: source.route(query))

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        return self._first(lambda source: source.workers())

    def thresholds(self) -> dict[str, dict[str, float | int | None]]:
        return self._first(lambda source: source.thresholds())

    def set_thresholds(
        self, model: str, values: Mapping[str, float | int | None]
    ) -> dict[str, float | int | None]:
        return set_on_all(self.sources, model, values)

    @contextmanager
    def replicas(self) -> Iterator[list[Replica]]:
        """Each of them, whoever's it is."""
        yield at_once(replica_at, self.sources)

    def judged(self, model: str, values: Mapping[str, float | int | None]) -> list[WorkerRow]:
        return self._first(lambda source: source.judged(model, values))

    def config(self) -> ConfigDocument:
        return self._first(lambda source: source.config())

    def decision(self, decision_id: str) -> RouteResult:
        """Only the replica that made a decision knows it."""
        last: UsageProblem | None = None
        for source in self.sources:
            try:
                return source.decision(decision_id)
            except UsageProblem as error:
                last = error
        raise last if last is not None else UsageProblem("no frontend was named")

    def save(self) -> bytes:
        return self._first(lambda source: source.save())

    def _first(self, ask: Callable[[FrontendClient], Answer]) -> Answer:
        last: Unreachable | None = None
        for source in self.sources:
            try:
                return ask(source)
            except Unreachable as error:
                last = error
        raise last if last is not None else Unreachable("no frontend was named")

"""Several frontends of one service: ask the first that answers, change all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dynctl.connect.frontend_source import FrontendSource
from dynctl.connect.query import RouteQuery
from dynctl.errors import Unreachable, UsageProblem
from dynctl.wire.route_result import RouteResult
from dynctl.wire.worker_rows import WorkerRow

Answer = TypeVar("Answer")


Values = Mapping[str, float | int | None]


class HoldsThresholds(Protocol):
    """A frontend whose busy thresholds can be set: ours or Dynamo's."""

    def set_thresholds(self, model: str, values: Values) -> dict[str, float | int | None]: ...


def set_on_all(
    frontends: Sequence[HoldsThresholds], model: str, values: Values
) -> dict[str, float | int | None]:
    """Set on every replica; one that cannot be reached is an error after the others are set."""
    failed, after = [], None
    for frontend in frontends:
        try:
            after = frontend.set_thresholds(model, values)
        except Unreachable as error:
            failed.append(error.message)
    if failed or after is None:
        raise Unreachable(
            f"thresholds were set on {len(frontends) - len(failed)} of "
            f"{len(frontends)} frontends: {'; '.join(failed)}",
            "run the same command again once all of them answer",
        )
    return after


class Replicas:
    """Reads come from the first replica that can be reached; a setting is set on every one."""

    def __init__(self, sources: Sequence[FrontendSource]) -> None:
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

    def judged(self, model: str, values: Mapping[str, float | int | None]) -> list[WorkerRow]:
        return self._first(lambda source: source.judged(model, values))

    def config(self) -> dict[str, Any]:
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

    def _first(self, ask: Callable[[FrontendSource], Answer]) -> Answer:
        last: Unreachable | None = None
        for source in self.sources:
            try:
                return ask(source)
            except Unreachable as error:
                last = error
        raise last if last is not None else Unreachable("no frontend was named")

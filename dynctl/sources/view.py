"""A saved view: the router of one past moment decides here, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dynctl import version
from dynctl.base.errors import UsageProblem, file_problem
from dynctl.base.files import read_file
from dynctl.documents.config import ConfigDocument, config_document
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.route_result import RouteResult
from dynctl.documents.snapshot import Header, Part, Snapshot
from dynctl.documents.thresholds import Thresholds, ThresholdValues
from dynctl.documents.view import MAX_BYTES, SavedView, decode_view, encode_view
from dynctl.documents.workers import WorkerRow, worker_rows
from dynctl.sources.dry_run import DryRun
from dynctl.sources.query import RouteQuery
from dynctl.sources.source import LiveSource
from dynctl.sources.thresholds.replicas import Replica
from router_core import (
    SETTINGS,
    THRESHOLD_SETTINGS,
    Router,
    ThresholdsSet,
)

if TYPE_CHECKING:
    pass


class ViewSource:
    """A router at one moment. Dry runs never change it, so they repeat byte for byte."""

    def __init__(self, view: SavedView, title: str) -> None:
        self.view = view
        self.title = title
        self.doubts: tuple[str, ...] = ()
        self.other_routers: list[ReplicaRow] | None = None

    @property
    def router(self) -> Router:
        return self.view.router

    def route(self, query: RouteQuery) -> RouteResult:
        """The plan for a prompt; raises UsageProblem where the view cannot answer."""
        return DryRun(self.view, query).route()

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        return worker_rows(self.router, self.view.now)

    def thresholds(self) -> dict[str, Thresholds]:
        registry, busy = self.router.registry, self.router.busy
        return {model: busy.thresholds(model).to_dict() for model in registry.models()}

    def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        raise UsageProblem(
            f"{self.title} is a saved view and cannot be changed",
            "--dry-run shows the effect of thresholds; --frontend URL sets them on a frontend",
        )

    def check_values(self, model: str, present: ThresholdValues, values: ThresholdValues) -> None:
        """Accept every value, for dry runs; :meth:`set_thresholds` raises."""

    def settable_values(self, values: ThresholdValues) -> Thresholds:
        return dict(values)

    @contextmanager
    def replicas(self) -> Iterator[list[Replica]]:
        """The view itself, which has the thresholds of one frontend."""
        yield [Replica(self.title, self, self.workers)]

    def judged(self, model: str, values: ThresholdValues) -> list[WorkerRow]:
        router = Router.restore(self.router.snapshot())
        applied = router.apply(ThresholdsSet(model, values), self.view.now)
        if not applied.ok:
            raise UsageProblem(applied.message)
        return worker_rows(router, self.view.now)

    def lengths(self) -> None:
        """None: a view has no requests."""

    def recent_decisions(self, limit: int) -> None:
        """None: it keeps no decisions."""

    def config(self) -> ConfigDocument:
        router, origins = self.router, self.view.origins
        if origins is None:
            origins = dict.fromkeys(SETTINGS, self.title)
        return config_document(
            router.config.with_values(
                {
                    name: value
                    for name, value in self._common_thresholds().items()
                    if name in origins
                }
            ),
            version=version(),
            preset=self.view.preset if self.view.origins is None else None,
            sources=origins,
            unknown=SETTINGS.keys() - origins.keys(),
            thresholds={
                model: values.to_dict() for model, values in router.busy.overrides().items()
            },
        )

    def _common_thresholds(self) -> Thresholds:
        """The busy thresholds that all models have alike."""
        models = list(self.thresholds().values())
        return {
            name: models[0][name]
            for name in THRESHOLD_SETTINGS
            if models and len({model[name] for model in models}) == 1
        }

    def decision(self, decision_id: str | None) -> RouteResult:
        wanted = "the last one" if decision_id is None else decision_id
        raise UsageProblem(
            f"{self.title} keeps no decisions: {wanted} cannot be looked up",
            "use the frontend that made it: dynctl why ID --frontend URL",
        )

    def save(self) -> bytes:
        view = self.view
        return encode_view(
            view.router.capture(),
            now=view.now,
            preset=view.preset,
            model_paths=view.model_paths,
            tokenizers=view.tokenizers,
            assumptions=view.assumptions,
            source=view.source,
            chats=view.chats,
            doubts=view.doubts,
            origins=view.origins,
        )


def open_view(path: Path) -> ViewSource:
    """Read a view file; raises UsageProblem or WireError naming the file."""
    try:
        data = read_file(path, MAX_BYTES)
    except OSError as error:
        raise UsageProblem(
            f"--view {path}: {file_problem(error)}",
            "save one: dynctl route PROMPT --save-view FILE",
        ) from None
    if len(data) > MAX_BYTES:
        raise UsageProblem(f"--view {path}: over the limit of {MAX_BYTES:,} bytes")
    return open_view_bytes(data, f"--view {path}", f"view {path.name}")


def open_view_bytes(data: bytes, where: str, title: str, *, from_file: bool = True) -> ViewSource:
    """A view from the bytes of its file; errors begin with ``where``. ``from_file``: see
    :class:`SavedView`."""
    from dynctl.base.decode_errors import WireError

    try:
        return ViewSource(decode_view(data, from_file=from_file), title)
    except WireError as error:
        raise UsageProblem(f"{where}: {error}", "save a new one: --save-view FILE") from None


_NO_DECISIONS: Final = "a saved view keeps no decisions"
_NOT_LIVE: Final = "a saved view is one moment"
_USE_LIVE: Final = "dynctl top --frontend URL shows a running service"
_USE_ROUTE: Final = (
    'dynctl --view FILE route --explain "PROMPT" shows where a request would have gone'
)


class StillView(LiveSource):
    """The one snapshot of a saved view."""

    def __init__(self, source: ViewSource, wall: Callable[[], float] = time.time) -> None:
        super().__init__(source, source.title)
        self._view = source
        self._at = wall()
        self._rows = tuple(source.workers())

    @property
    def past(self) -> str:
        return "saved view"

    async def snapshot(self) -> Snapshot:
        view, title = self._view, self.title
        settings = view.config().values
        here = Part(title, self._at)
        parts = dict.fromkeys(("workers", "load", "index", "thresholds", "settings"), here)
        parts["decisions"] = Part(title, unknown=_NO_DECISIONS, provide=_USE_ROUTE)
        for part in ("waiting", "transfers", "queue"):
            parts[part] = Part(title, unknown=_NOT_LIVE, provide=_USE_LIVE)
        return Snapshot(
            at=self._at,
            source=title,
            header=Header(
                models=tuple(sorted({row.model for row in self._rows})),
                mode=settings["router_mode"],
                preset=view.view.preset,
            ),
            workers=self._rows,
            thresholds=view.thresholds(),
            settings=settings,
            parts=parts,
        )

    async def read_index(self, worker: WorkerRow | None) -> str:
        raise UsageProblem(f"{_NOT_LIVE}: no more caches can be read", _USE_LIVE)

"""Answers about a live Dynamo, read from its planes. Nothing is written there.

Each question observes anew: list what is registered, ask the workers what they cache, take over
load and settings, decide. What could not be known is an assumption that the answer carries.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dynctl.adapters.ports import RequestPlaneError
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.config import ConfigDocument
from dynctl.documents.route_result import RouteResult
from dynctl.documents.view import SavedView
from dynctl.documents.workers import WorkerRow
from dynctl.health.deployment import Deployment, ProblemCode
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.dynamo.frontends import read_frontends
from dynctl.sources.dynamo.observer import PRESET, Observer, live_router
from dynctl.sources.dynamo.planes import Planes, backend, namespace, open_planes
from dynctl.sources.dynamo.replicas import dynamo_replica
from dynctl.sources.dynamo.router_state import (
    MOST_NAMED,
    Thresholds,
    index_doubts,
    take_load,
    take_settings,
)
from dynctl.sources.dynamo.worker_reports import WorkerReports
from dynctl.sources.frontend.source import set_on_all
from dynctl.sources.kubernetes import OUT_OF_REACH, Reached, cluster_ways
from dynctl.sources.query import RouteQuery, choose_model
from dynctl.sources.thresholds.replicas import Replica
from dynctl.sources.view import ViewSource
from router_core import hash_prompt

#: Contradictions that make an answer doubtful, so they stand beside it.
_DOUBTFUL: Final = (
    ProblemCode.BLOCK_SIZES_DIFFER,
    ProblemCode.ROUTER_CONFIGS_DIFFER,
    ProblemCode.UNKNOWN_ROLE,
    ProblemCode.CARD_REJECTED,
)
_PROGRESS_S: Final = 1.0

Wanted = Literal["none", "asked", "all"]
"""Whose tokenizers are fetched: nobody's, that of the model asked about, every model's."""


class DynamoSource:
    """A live deployment. ``frontends``: URLs that add load, thresholds and what is set there."""

    def __init__(self, options: GlobalOptions, frontends: tuple[str, ...] = ()) -> None:
        self._options = options
        self._frontends = [DynamoFrontend(url, options.timeout) for url in frontends]
        self.title = "live Dynamo"
        self.doubts: tuple[str, ...] = ()

    # -- what a Source answers -------------------------------------------------------------

    def route(self, query: RouteQuery) -> RouteResult:
        known = query.token_ids is not None or query.model_path is not None
        wanted: Wanted = "none" if known else "asked"
        return self._view(query.model, tokenizers=wanted, query=query).route(query)

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        return self._view(index=index).workers()

    def thresholds(self) -> dict[str, Thresholds]:
        with self._reached() as found:
            if found.frontends:
                return found.frontends[0].thresholds()
        return self._view(index=False).thresholds()

    def set_thresholds(
        self, model: str, values: Mapping[str, float | int | None]
    ) -> dict[str, float | int | None]:
        """Set on every frontend that was named; thresholds live in those processes."""
        with self._reached() as found:
            if not found.frontends:
                raise _no_frontend()
            return set_on_all(found.frontends, model, values)

    @contextlib.contextmanager
    def replicas(self) -> Iterator[list[Replica]]:
        """The frontends that were named, or the cluster's, and what the cards advertise where there
        is none; each with the workers as it counts their load."""
        with self._reached() as found:
            followed = WorkerReports(
                lambda: open_planes(self._options),
                namespace=namespace(self._options),
                follow=found.workers,
                timeout=self._options.timeout,
            )
            with followed:
                self.doubts = found.unknown()
                if found.frontends:
                    yield self._replicas_of(found, followed)
                else:
                    cards = _Advertised(self, followed)
                    yield [Replica("no frontend was named", cards, followed.rows, cards)]

    def _replicas_of(self, found: _Reached, followed: WorkerReports | None = None) -> list[Replica]:
        urls = tuple(one.url for one in found.frontends)
        names, graphs = urls, ("",) * len(urls)
        if found.ways is not None:
            names, graphs = found.ways.names, found.ways.graphs
        return [
            dynamo_replica(name, one, followed, graph)
            for name, graph, one in zip(names, graphs, found.frontends, strict=True)
        ]

    def judged(self, model: str, values: Mapping[str, float | int | None]) -> list[WorkerRow]:
        return self._view(index=False).judged(model, values)

    def config(self) -> ConfigDocument:
        return self._view(index=False).config()

    def decision(self, decision_id: str) -> RouteResult:
        raise UsageProblem(
            f"Dynamo keeps no decisions, so {decision_id} cannot be looked up",
            'ask before the request instead: dynctl route --explain "PROMPT"',
        )

    def save(self) -> bytes:
        """The view with the tokenizers that can be had; without one, --view takes --model-path."""
        return self._view(tokenizers="all").save()

    # -- observing -------------------------------------------------------------------------

    def _view(
        self,
        model: str | None = None,
        *,
        index: bool = True,
        tokenizers: Wanted = "none",
        query: RouteQuery | None = None,
    ) -> ViewSource:
        """What is known now. ``query``: only this prompt matters, so an indexer may be asked."""
        with self._reached() as found:
            look = self._observe(found, model, index=index, tokenizers=tokenizers, query=query)
            view = asyncio.run(look)
        return ViewSource(view, self.title)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[_Reached]:
        """The frontends that were named; in Kubernetes those of the cluster, unless some were."""
        if self._frontends or (backend(self._options) or ("",))[0] != "kubernetes":
            yield _Reached(self._frontends)
            return
        with cluster_ways(self._options) as ways:
            fronts = [DynamoFrontend(url, self._options.timeout) for url in ways.urls]
            yield _Reached(fronts, ways)

    async def _observe(
        self,
        found: _Reached,
        model: str | None,
        *,
        index: bool,
        tokenizers: Wanted,
        query: RouteQuery | None,
    ) -> SavedView:
        planes = open_planes(self._options)
        self.title = planes.title
        observer = Observer(
            live_router(),
            planes.discovery,
            planes.plane_of,
            planes.requests,
            time.monotonic,
            namespace=namespace(self._options),
            prefer=model,
            follow_index=False,
            follow_load=not found.frontends and found.workers,
        )
        try:
            async with observer:
                deployment = observer.deployment
                if not deployment.workers:
                    raise _nobody(deployment, planes, namespace(self._options))
                paths, doubts = await self._tokenizers(deployment, model, tokenizers)
                doubts += found.doubts()
                if not found.workers:
                    index, query = False, None
                if query is not None and await _asked_indexers(observer, query, paths, doubts):
                    index = False
                if index:
                    observer.follow_indexes()
                return await self._observed(observer, found, paths, doubts)
        finally:
            await planes.close()

    async def _observed(
        self, observer: Observer, found: _Reached, paths: dict[str, str], doubts: list[str]
    ) -> SavedView:
        problems = observer.deployment.problems
        assumptions = [p.message for p in problems if p.code in _DOUBTFUL] + doubts
        told = await asyncio.to_thread(read_frontends, found.frontends, found.ways)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.wait):
                await _settled(observer)
        source, load_doubts = take_load(observer, told.metrics)
        assumptions += [*index_doubts(observer), *load_doubts, *told.doubts]
        self.doubts = tuple(assumptions)
        assumptions += take_settings(observer, told.thresholds)
        return SavedView(
            observer.router,
            time.monotonic(),
            PRESET,
            paths,
            {},
            tuple(dict.fromkeys(assumptions)),
            source,
            chats="dynamo",
        )

    async def _tokenizers(
        self, deployment: Deployment, model: str | None, wanted: Wanted
    ) -> tuple[dict[str, str], list[str]]:
        """(model -> directory, what could not be had); the one asked for must be there."""
        if wanted == "none":
            return {}, []
        if wanted == "asked":
            return await self._tokenizer(deployment, choose_model(model, deployment.models)), []
        paths: dict[str, str] = {}
        doubts = []
        for name in deployment.models:
            try:
                paths |= await self._tokenizer(deployment, name)
            except (UsageProblem, Unreachable) as error:
                doubts.append(f"no tokenizer for {name}: {error.message}")
        return paths, doubts

    async def _tokenizer(self, deployment: Deployment, model: str) -> dict[str, str]:
        from dynctl.adapters.dynamo.model_files import fetch_model_files, host_of

        item = next(item for item in deployment.workers if item.worker.model == model)
        fetched = await fetch_model_files(
            item.card,
            host_of(item.instance),
            _cache_directory(),
            timeout=self._options.timeout,
        )
        return {model: str(fetched.directory)}


@dataclass(frozen=True, slots=True)
class _Reached:
    """Frontends that can be asked. ``ways``: how they are reached in a cluster; None: they were
    named."""

    frontends: list[DynamoFrontend]
    ways: Reached | None = None

    @property
    def workers(self) -> bool:
        """Whether workers can be spoken to from here."""
        return self.ways is None or self.ways.direct

    def unknown(self) -> tuple[str, ...]:
        """Why the frontends are not known, where they should be."""
        if self.ways is None:
            return ()
        if self.ways.refused:
            return (f"the cluster's frontends are not known: {self.ways.refused}",)
        if self.ways.beyond:
            return (f"{self.ways.beyond:,} more frontends of the cluster are not asked",)
        return ()

    def doubts(self) -> list[str]:
        said = [*self.unknown()]
        if not self.workers:
            said.append(f"what workers cached is {OUT_OF_REACH}; answered from load and topology")
        return said


class _Advertised:
    """Thresholds as the workers' cards advertise them, where no frontend was named: to be read."""

    def __init__(self, source: DynamoSource, followed: WorkerReports) -> None:
        self._source = source
        self._followed = followed

    def thresholds(self) -> dict[str, Thresholds]:
        return self._source.thresholds()

    def refuse(self, model: str, present: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        raise _no_frontend()

    def set_thresholds(self, model: str, values: Mapping[str, float | int | None]) -> Thresholds:
        raise _no_frontend()

    def nearest(self, values: Mapping[str, float | int | None]) -> Thresholds:
        return dict(values)

    def refuses_worker(self, model: str, worker_id: int, dp_rank: int | None) -> bool | None:
        return None

    def unheard(self) -> str:
        return self._followed.unheard


def _no_frontend() -> UsageProblem:
    return UsageProblem(
        "busy thresholds live in the frontends, and none was named",
        "name every replica: --frontend http://HOST:8000",
    )


async def _asked_indexers(
    observer: Observer, query: RouteQuery, paths: dict[str, str], doubts: list[str]
) -> bool:
    """Ask the indexers that frontends serve for this one prompt; False where there are too few.

    Then the workers' whole caches need not be read: only the prompt's hashes travel.
    """
    deployment = observer.deployment
    model = choose_model(query.model, deployment.models)
    members = [i for i in deployment.workers if i.worker.model == model and i.sources]
    pools = {item.instance.endpoint[:2] for item in members}
    indexers = {item.endpoint[:2]: item for item in deployment.indexers}
    if not members or not pools <= indexers.keys():
        return False
    now = time.monotonic()
    view = SavedView(observer.router, now, PRESET, paths, chats="dynamo")
    tokens = await asyncio.to_thread(ViewSource(view, "").tokens, query, model)
    hashes = hash_prompt(tokens, members[0].worker.block_size)
    try:
        for pool in sorted(pools):
            pooled = [i.worker for i in members if i.instance.endpoint[:2] == pool]
            await observer.ask_indexer(indexers[pool], model, hashes, pooled)
    except (RequestPlaneError, WireError) as error:
        doubts.append(f"{error}: the workers were asked instead")
        return False
    doubts.append("what is cached is known from the indexer that a frontend serves")
    return True


async def _settled(observer: Observer) -> None:
    """Until every cache is known; says once a second on stderr how many are not."""
    settled = asyncio.ensure_future(observer.settled())
    try:
        while not (await asyncio.wait({settled}, timeout=_PROGRESS_S))[0]:
            left, total = len(observer.not_current()), len(observer.stream_states())
            sys.stderr.write(f"reading caches: {total - left:,} of {total:,} ranks are current\n")
    finally:
        settled.cancel()


def _nobody(deployment: Deployment, planes: Planes, wanted: str | None) -> UsageProblem:
    """Nobody serves there: say what there is instead."""
    others = [name for name in deployment.namespaces if name != wanted]
    found = f"{planes.title}: no worker is registered"
    if wanted is not None:
        found += f" in namespace {wanted}"
    if others:
        return UsageProblem(
            f"{found}; there are: {', '.join(others)}", f"--dyn-namespace {others[0]}, or '*'"
        )
    problems = [f"{p.subject}: {p.message}" for p in deployment.problems[:MOST_NAMED]]
    hint = "is this the right backend? dynctl check"
    if planes.title.startswith("kubernetes"):
        hint = "name its namespace with -n NAMESPACE, or look at all with -A"
    return UsageProblem(found, "\n".join(problems) or hint)


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dynctl" / "models"

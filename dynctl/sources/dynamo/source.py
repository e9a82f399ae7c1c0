"""A live Dynamo as a source, read through its planes. Nothing is written there.

Each question observes the deployment: list the registered workers, read their caches, take over
load and settings, decide. What stays unknown is a doubt about the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

from dynctl.adapters.dynamo.planes import Planes, namespace, open_planes
from dynctl.adapters.ports import RequestPlaneError
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.base.terminal import printable, say
from dynctl.documents.doubts import MOST_NAMED, Doubt, Varies, distinct, doubt, some_names
from dynctl.documents.thresholds import Thresholds, ThresholdValues
from dynctl.documents.view import SavedView
from dynctl.documents.workers import WorkerRow
from dynctl.health.deployment import Deployment
from dynctl.serving.dynamo.observer import PRESET, Observer
from dynctl.sources.dry_run import DryRun
from dynctl.sources.dynamo.accepted_cards import contested_models, take_versions
from dynctl.sources.dynamo.equal_ids import refuse_equal_ids
from dynctl.sources.dynamo.frontends import ReachedFrontends, no_frontend, reached_frontends
from dynctl.sources.dynamo.replicas import dynamo_replica
from dynctl.sources.dynamo.router_state import (
    index_doubts,
    known_settings,
    registration_doubts,
    take_load,
    take_settings,
)
from dynctl.sources.dynamo.worker_reports import WorkerReports
from dynctl.sources.query import RouteQuery, choose_model
from dynctl.sources.thresholds.replicas import Replica
from dynctl.sources.view import ViewSource
from dynctl.wire.dynamo.frontend_metrics import Lengths, read_lengths

if TYPE_CHECKING:
    from dynctl.documents.config import ConfigDocument
    from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.route_result import RouteResult

_PROGRESS_S: Final = 1.0
_FOLLOW_S: Final = 0.25
#: Doubts about requests that began before; they end with those requests.
_ENDING: Final = frozenset({"DYR0707", "DYR0708", "DYR0715", "DYR0741"})

TokenizersOf = Literal["none", "model", "all"]
"""Which tokenizers are fetched: none, that of the queried model, those of all models."""


class DynamoSource:
    """A live deployment. ``urls``: its frontends, which add load and thresholds; in Kubernetes
    those of the cluster, unless some were named."""

    def __init__(self, options: GlobalOptions, urls: tuple[str, ...] = ()) -> None:
        self._options = options
        self._urls = urls
        self.title = "live Dynamo"
        self.doubts: tuple[str, ...] = ()
        self.other_routers: list[ReplicaRow] | None = None

    def route(self, query: RouteQuery) -> RouteResult:
        given = query.token_ids is not None or query.model_path is not None
        wanted = query.lora or query.wanted
        return self._view(wanted, tokenizers="none" if given else "model", query=query).route(query)

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        return self._view(index=index).workers()

    def thresholds(self) -> dict[str, Thresholds]:
        with self._reach_frontends() as reached:
            if reached.frontends:
                return reached.frontends[0].thresholds()
        return self._view(index=False).thresholds()

    def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        with self._reach_frontends() as reached:
            return reached.set_thresholds(model, values)

    @contextlib.contextmanager
    def replicas(self) -> Iterator[list[Replica]]:
        """The frontends, each with the workers and the load that it counts. Without a frontend:
        the thresholds in the workers' cards, which cannot be set."""
        with self._reach_frontends() as reached:
            reached.expect_all()
            reports = WorkerReports(
                lambda: open_planes(self._options),
                namespace=namespace(self._options),
                follow=reached.workers_reachable,
                timeout=self._options.timeout,
            )
            with reports:
                self.doubts = reached.unread()
                if reached.frontends:
                    yield [
                        dynamo_replica(name, frontend, reports, group)
                        for name, frontend, group in zip(
                            reached.names, reached.frontends, reached.groups, strict=True
                        )
                    ]
                else:
                    cards = _CardThresholds(self, reports)
                    yield [Replica("no frontend is set", cards, reports.rows, cards)]

    def judged(self, model: str, values: ThresholdValues) -> list[WorkerRow]:
        return self._view(index=False).judged(model, values)

    def lengths(self) -> dict[str, Lengths] | None:
        with self._reach_frontends() as reached:
            if not reached.frontends:
                return None
            return read_lengths(
                frontend.send("GET", "/metrics").content for frontend in reached.frontends
            )

    def recent_decisions(self, limit: int) -> None:
        """None: it keeps no decisions."""

    def config(self) -> ConfigDocument:
        return self._view(index=False).config()

    def decision(self, decision_id: str | None) -> RouteResult:
        wanted = "the last one" if decision_id is None else decision_id
        raise UsageProblem(
            f"Dynamo keeps no decisions and reports only the winner: {wanted} cannot be explained",
            'explain it before the request: dynctl route --explain "PROMPT"',
        )

    def save(self) -> bytes:
        """The view with the tokenizers that can be fetched; --view --model-path adds others."""
        return self._view(tokenizers="all").save()

    # -- observing -------------------------------------------------------------------------

    def _reach_frontends(self) -> contextlib.AbstractContextManager[ReachedFrontends]:
        return reached_frontends(self._options, self._urls)

    def _view(
        self,
        model: str | None = None,
        *,
        index: bool = True,
        tokenizers: TokenizersOf = "none",
        query: RouteQuery | None = None,
    ) -> ViewSource:
        """The present state. ``query``: only this prompt is needed, so an indexer may have it."""
        with self._reach_frontends() as reached:
            view = asyncio.run(
                self._observe(reached, model, index=index, tokenizers=tokenizers, query=query)
            )
        return ViewSource(view, self.title)

    async def _observe(
        self,
        reached: ReachedFrontends,
        model: str | None,
        *,
        index: bool,
        tokenizers: TokenizersOf,
        query: RouteQuery | None,
    ) -> SavedView:
        planes = open_planes(self._options)
        self.title = planes.title
        observer = Observer(
            planes,
            namespace=namespace(self._options),
            prefer=model,
            follow_index=False,
            follow_load=reached.workers_reachable,
        )
        async with observer:
            deployment = observer.deployment
            if not deployment.workers:
                raise _no_workers(deployment, planes, namespace(self._options))
            refuse_equal_ids(deployment)
            follow = 0.0 if query is None else query.follow
            paths, notes = await self._tokenizers(deployment, model, tokenizers)
            if not reached.workers_reachable:
                index, query = False, None
            tiers: list[Doubt] = []
            if query is not None and await _query_indexers(observer, query, paths, notes, tiers):
                index = False
            if index:
                observer.follow_indexes()
            return await self._view_of(observer, reached, paths, notes, tiers, follow=follow)

    async def _view_of(
        self,
        observer: Observer,
        reached: ReachedFrontends,
        paths: dict[str, str],
        notes: list[str],
        doubts: list[Doubt],
        *,
        follow: float = 0.0,
    ) -> SavedView:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.wait):
                await _wait_for_caches(observer)
        # Events in a stream show only when they are read which workers publish any.
        doubts = [*registration_doubts(observer), *reached.doubts(), *doubts]
        # After the caches: the gauges are compared with the requests seen until now.
        reports = await asyncio.to_thread(reached.read, contested_models(observer))
        load_source, load_doubts = take_load(observer, reports.metrics)
        deadline = time.monotonic() + follow
        while time.monotonic() < deadline and not {d.code for d in load_doubts}.isdisjoint(_ENDING):
            await asyncio.sleep(_FOLLOW_S)
            reports = await asyncio.to_thread(reached.read, contested_models(observer))
            load_source, load_doubts = take_load(observer, reports.metrics)
        doubts += take_versions(observer, reports.metrics, reports.ready)
        doubts += [*index_doubts(observer), *load_doubts, *reports.doubts]
        # Of a list of workers: sums are doubtful only for a prompt that shares blocks with others.
        self.doubts = (*(d.what for d in distinct(doubts) if d.code != "DYR0715"), *notes)
        assumptions, unknown = take_settings(observer, reports.thresholds, reports.metrics)
        known = known_settings(observer, reports.thresholds, reports.metrics)
        return SavedView(
            observer.router,
            time.monotonic(),
            PRESET,
            paths,
            {},
            tuple(dict.fromkeys([*notes, *assumptions])),
            load_source,
            chats="dynamo",
            doubts=tuple(distinct([*doubts, *unknown])),
            origins={name: source for name, (_, source) in known.items()},
        )

    async def _tokenizers(
        self, deployment: Deployment, model: str | None, wanted: TokenizersOf
    ) -> tuple[dict[str, str], list[str]]:
        """(model -> directory, notes). Raises where the queried model has no tokenizer."""
        if wanted == "none":
            return {}, []
        if wanted == "model":
            name = choose_model(model, deployment.models, deployment.served_names)
            return {name: await model_tokenizer(deployment, name, self._options.timeout)}, []
        paths: dict[str, str] = {}
        notes = []
        for name in deployment.served_names:
            try:
                paths[name] = await model_tokenizer(deployment, name, self._options.timeout)
            except (UsageProblem, Unreachable) as error:
                notes.append(f"no tokenizer for {name}: {error.message}")
        return paths, notes


async def model_tokenizer(deployment: Deployment, model: str, timeout: float) -> str:
    """The directory of a model's tokenizer, fetched from its workers where it is not here yet.

    ``timeout``: seconds for each file. Raises UsageProblem or Unreachable.
    """
    from dynctl.adapters.dynamo.model_files import (
        cache_directory,
        fetch_model_files,
        file_hosts,
        host_of,
    )

    item = next(item for item in deployment.workers if model in item.worker.served_names)
    card = next((card for card in item.adapters if card.name == model), item.card)
    host = host_of(item.instance)
    fetched = await fetch_model_files(
        card,
        host,
        cache_directory(),
        # A worker on NATS has no address of its own to compare with.
        allowed_hosts=() if host else file_hosts(card),
        timeout=timeout,
    )
    return str(fetched.directory)


class _CardThresholds:
    """The thresholds that the workers' cards advertise: a read-only holder without a frontend."""

    def __init__(self, source: DynamoSource, reports: WorkerReports) -> None:
        self._source = source
        self._reports = reports

    def thresholds(self) -> dict[str, Thresholds]:
        return self._source.thresholds()

    def check_values(self, model: str, present: ThresholdValues, values: ThresholdValues) -> None:
        raise no_frontend()

    def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        raise no_frontend()

    def settable_values(self, values: ThresholdValues) -> Thresholds:
        return dict(values)

    def refuses_worker(self, model: str, worker_id: int, dp_rank: int | None) -> bool | None:
        return None

    def no_report_reason(self) -> str:
        return self._reports.no_report_reason


async def _query_indexers(
    observer: Observer,
    query: RouteQuery,
    paths: dict[str, str],
    notes: list[str],
    doubts: list[Doubt],
) -> bool:
    """Read this prompt's overlaps from the indexers that frontends serve; False without enough.

    Then the workers' whole caches need not be read: only the prompt's hashes are sent.
    """
    deployment = observer.deployment
    model = choose_model(query.lora or query.wanted, deployment.models, deployment.served_names)
    members = [i for i in deployment.workers if model in i.worker.served_names and i.sources]
    if len({i.worker.block_size for i in members}) > 1:
        return False
    pools = {item.instance.endpoint[:2] for item in members}
    indexers = {item.endpoint[:2]: item for item in deployment.indexers}
    if not members or not pools <= indexers.keys():
        return False
    view = SavedView(observer.router, time.monotonic(), PRESET, paths, chats="dynamo")
    dry_run = await asyncio.to_thread(DryRun, view, query)
    hashes = dry_run.hashes()
    try:
        for pool in sorted(pools):
            workers = [i.worker for i in members if i.instance.endpoint[:2] == pool]
            if await observer.query_indexer(indexers[pool], model, hashes, workers):
                names = [worker.name for worker in workers]
                varies = Varies(overlap=True, workers=names)
                doubts.append(doubt("DYR0706", varies=varies, workers=some_names(names)))
    except (RequestPlaneError, WireError) as error:
        notes.append(f"{error}: the caches were read from the workers instead")
        return False
    notes.append("cache contents come from the indexer of a frontend")
    return True


async def _wait_for_caches(observer: Observer) -> None:
    """Wait until every cache is read; shows the progress once a second on stderr."""
    settled = asyncio.ensure_future(observer.settled())
    try:
        while not (await asyncio.wait({settled}, timeout=_PROGRESS_S))[0]:
            left, total = len(observer.not_current()), len(observer.stream_states())
            say(f"reading caches: {total - left:,} of {total:,} ranks are current")
    finally:
        settled.cancel()


def _no_workers(deployment: Deployment, planes: Planes, wanted: str | None) -> UsageProblem:
    """The error for a deployment without workers, with the namespaces that have some."""
    others = [name for name in deployment.namespaces if name != wanted]
    problem = f"{planes.title}: no worker is registered"
    if wanted is not None:
        problem += f" in namespace {wanted}"
    if others:
        return UsageProblem(
            f"{problem}; other namespaces: {', '.join(others)}",
            f"--dyn-namespace {others[0]}, or '*'",
        )
    problems = [f"{p.subject}: {p.message}" for p in deployment.problems[:MOST_NAMED]]
    hint = "check that this is the right backend: dynctl check"
    if planes.title.startswith("kubernetes"):
        hint = "name its namespace with -n NAMESPACE, or read all with -A"
    return UsageProblem(problem, "\n".join(map(printable, problems)) or hint)

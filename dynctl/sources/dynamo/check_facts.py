"""Gather what `check` judges: planes and frontends at the same time, bounded, writing nothing.

What cannot be read becomes a fact of its own (:class:`Unread`), never an error: one dead worker
must not hide what is wrong with the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeVar

from dynctl.adapters.ports import (
    NotCalledBack,
    RequestPlaneError,
    StreamCode,
    StreamCondition,
)
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.workers import StreamState
from dynctl.health.deployment import ObservedWorker
from dynctl.health.facts import (
    CheckFacts,
    FrontendFacts,
    ModelReady,
    PlaneFacts,
    RankFacts,
    Unread,
)
from dynctl.settings.contexts.precedence import in_context
from dynctl.sources import (
    DEFAULT_FRONTEND,
    GUESS_TIMEOUT,
    frontends,
    token,
)
from dynctl.sources.dynamo.frontend import DynamoFrontend, ModelReadiness
from dynctl.sources.dynamo.observer import Observer, live_router
from dynctl.sources.dynamo.planes import Planes, backend, namespace, open_planes
from dynctl.sources.frontend.client import FrontendClient
from dynctl.sources.kubernetes import OUT_OF_REACH, cluster_ways
from dynctl.wire.dynamo.discovery import EventChannel, EventSource, ZmqTransport
from dynctl.wire.dynamo.recovery import Events, TooNew, TreeDump, parse_recovery, recovery_query

#: Events are listened to for this long once the caches are read.
LISTEN_S: Final = 1.0
#: What was published just before its publisher was asked has this long to arrive.
_ON_THE_WAY_S: Final = 0.3
#: Each step of asking a worker may take this long.
ASK_S: Final = 2.0
_ASKED_AT_ONCE: Final = 8
_ASK_BYTES: Final = 64 * 1024 * 1024
_FRONTEND_S: Final = 5.0
_FRONTENDS_AT_ONCE: Final = 8
#: A number that no worker's events reach: asked from there, it only tells its newest one.
_BEYOND: Final = 2**62

_WAYS: Final = """name its discovery backend, its frontends, or both:
--discovery etcd --etcd-endpoints HOST:2379   a live Dynamo that registers in etcd
--discovery file --file-kv DIR                ... or in files
--frontend http://HOST:8000                   once for every replica"""

_T = TypeVar("_T")


def gather(options: GlobalOptions) -> CheckFacts:
    """Everything that the options name. Raises UsageProblem, or Unreachable where they name
    nothing and nothing answers at the default address."""
    for flag, given in (("--demo", options.demo), ("--view", options.view is not None)):
        if given:
            raise UsageProblem(
                f"{flag}: check looks at a running deployment",
                _WAYS,
            )
    options = in_context(options)
    planes_named = backend(options) is not None
    urls = frontends(options)
    if not planes_named and not urls:
        # Asked for nothing: the default address is tried, as other commands do.
        try:
            guess = DynamoFrontend(DEFAULT_FRONTEND, min(options.timeout, GUESS_TIMEOUT)).identify()
        except DynctlError:
            guess = "other"
        if guess == "other":
            raise Unreachable(
                f"nothing was named to check, and no frontend answers at {DEFAULT_FRONTEND}", _WAYS
            )
        urls = (DEFAULT_FRONTEND,)
    if (backend(options) or ("",))[0] != "kubernetes":
        return asyncio.run(_gather(options, planes_named, urls))
    with cluster_ways(options) as ways:
        names = {} if urls else {u: f"Pod {n}" for u, n in zip(ways.urls, ways.names, strict=True)}
        beyond = "" if ways.direct else OUT_OF_REACH
        facts = asyncio.run(_gather(options, planes_named, urls or (*names,), beyond, names))
        return facts if urls else replace(facts, frontends_unread=ways.refused)


async def _gather(
    options: GlobalOptions,
    planes: bool,
    urls: tuple[str, ...],
    out_of_reach: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
) -> CheckFacts:
    """``names``: how frontends are called that were not named by their URL."""
    found = await _plane_facts(options, out_of_reach) if planes else None
    models: tuple[str, ...] = ()
    if found is not None:
        models = found.deployment.models
    limit = asyncio.Semaphore(_FRONTENDS_AT_ONCE)

    async def ask(url: str) -> FrontendFacts:
        async with limit:
            told = await asyncio.to_thread(_frontend_facts, url, options, models)
            name = names.get(url, told.url)
            if isinstance(told.kind, Unread):
                # The address of a forward is gone by the time that somebody reads it.
                kind = Unread(told.kind.why.replace(told.url, name), told.kind.hint)
                told = replace(told, kind=kind)
            return replace(told, url=name)

    return CheckFacts(found, tuple(await asyncio.gather(*map(ask, urls))))


# -- planes ----------------------------------------------------------------------------------------


class _Conditions:
    """The last thing that was said of each rank, by kind."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int, str], str] = {}

    def take(self, condition: StreamCondition) -> None:
        for rank in condition.ranks:
            self._last[condition.worker_id, rank, condition.code] = condition.message

    def last(self, rank: tuple[int, int], *codes: StreamCode) -> str:
        told = (self._last.get((*rank, code.value)) for code in codes)
        return next(filter(None, told), "")


@dataclass(frozen=True, slots=True)
class _Asked:
    newest: int | None = None
    refusal: str | None = None
    called_back: bool | None = None


async def _plane_facts(options: GlobalOptions, out_of_reach: str) -> PlaneFacts:
    """``out_of_reach``: why no worker is to be heard or asked; empty where they may be."""
    planes = open_planes(options)
    wanted = namespace(options)
    conditions = _Conditions()
    observer = Observer(
        live_router(),
        planes.discovery,
        planes.plane_of,
        planes.requests,
        time.monotonic,
        namespace=wanted,
        on_condition=conditions.take,
        follow_index=not out_of_reach,
        follow_load=not out_of_reach,
    )
    try:
        async with observer:
            if out_of_reach:
                return _registered_only(observer, planes, wanted, out_of_reach)
            return await _observed(observer, planes, wanted, conditions, options.wait)
    except Unreachable as error:
        return PlaneFacts(planes.title, wanted, Unread(error.message, error.hint))
    finally:
        await planes.close()


def _registered_only(
    observer: Observer, planes: Planes, wanted: str | None, out_of_reach: str
) -> PlaneFacts:
    ranks = tuple(
        _rank_facts(item, rank, observer, _Conditions(), _Asked())
        for item in observer.deployment.workers
        for rank in item.sources
    )
    return PlaneFacts(
        planes.title,
        wanted,
        deployment=observer.deployment,
        ranks=ranks,
        out_of_reach=out_of_reach,
    )


async def _observed(
    observer: Observer,
    planes: Planes,
    wanted: str | None,
    conditions: _Conditions,
    wait: float,
) -> PlaneFacts:
    # As it was at the start: what leaves meanwhile is a matter of the next check.
    workers = observer.deployment.workers
    sources = [(item, rank, source) for item in workers for rank, source in item.sources.items()]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait):
            await observer.settled()
    # Where nothing is connected there is nothing to hear.
    hears = any(state.connected for state in observer.stream_states().values())
    if hears:
        await asyncio.sleep(LISTEN_S)
    asked = await _ask_all(planes, [source for _, _, source in sources])
    if hears:
        await asyncio.sleep(_ON_THE_WAY_S)
    await observer.applier.drained()
    ranks = tuple(
        _rank_facts(item, rank, observer, conditions, asked[source.worker_id, source.dp_rank])
        for item, rank, source in sources
    )
    return PlaneFacts(
        planes.title,
        wanted,
        deployment=observer.deployment,
        ranks=ranks,
        waited_s=wait,
        listened_s=LISTEN_S + _ON_THE_WAY_S,
        asked_s=ASK_S,
        comparable=observer.router.index.any_shared(),
        routers_heard=observer.load.added,
    )


def _rank_facts(
    item: ObservedWorker,
    rank: int,
    observer: Observer,
    conditions: _Conditions,
    asked: _Asked,
) -> RankFacts:
    key = (item.worker.worker_id, rank)
    channel, source = item.kv_events.get(rank), item.sources[rank]
    slot = observer.router.registry.slot(*key)
    incomplete = observer.not_current().get(key)
    return RankFacts(
        worker=item.worker.name,
        dp_rank=rank,
        channel=None if channel is None else _heard_at(channel),
        indexer=None if source.recovery is None else source.recovery.address.partition("/")[0],
        state=observer.stream_states().get(key, StreamState()),
        newest=asked.newest,
        refusal=asked.refusal,
        called_back=asked.called_back,
        current=incomplete is None,
        incomplete=incomplete or "",
        disconnected=conditions.last(key, StreamCode.STREAM_DISCONNECTED),
        foreign=conditions.last(key, StreamCode.FOREIGN_PUBLISHER),
        strange=conditions.last(
            key, StreamCode.MALFORMED_BATCH, StreamCode.MALFORMED_MESSAGE, StreamCode.UNKNOWN_EVENT
        ),
        own_names=0 if slot is None else observer.router.index.own_names(slot),
    )


def _heard_at(channel: EventChannel) -> str:
    transport = channel.transport
    return transport.endpoint if isinstance(transport, ZmqTransport) else "NATS"


async def _ask_all(planes: Planes, sources: Iterable[EventSource]) -> dict[tuple[int, int], _Asked]:
    """Each rank's own count of its events."""
    limit = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def ask(source: EventSource) -> _Asked:
        async with limit:
            try:
                return await _ask(planes, source)
            except NotCalledBack as error:
                return _Asked(refusal=str(error), called_back=False)
            except (RequestPlaneError, WireError) as error:
                return _Asked(refusal=str(error))

    listed = list(sources)
    answers = await asyncio.gather(*map(ask, listed))
    return {
        (source.worker_id, source.dp_rank): answer
        for source, answer in zip(listed, answers, strict=True)
    }


async def _ask(planes: Planes, source: EventSource) -> _Asked:
    if source.recovery is None:
        return _Asked(refusal="it has no local indexer")
    body = recovery_query(source.worker_id, source.dp_rank, _BEYOND)
    items = planes.requests.ask_raw(source.recovery, body, timeout=ASK_S, max_bytes=_ASK_BYTES)
    async with aclosing(items) as answer:
        async for item in answer:
            match parse_recovery(item):
                case TooNew(newest_available=newest):
                    return _Asked(newest, called_back=True)
                case Events(last_event_id=newest) | TreeDump(last_event_id=newest):
                    return _Asked(newest, called_back=True)
                case other:
                    told = getattr(other, "message", "invalid range")
                    return _Asked(refusal=f"it answers: {told}", called_back=True)
    return _Asked(refusal="it answered with nothing", called_back=True)


# -- frontends -------------------------------------------------------------------------------------


def _frontend_facts(url: str, options: GlobalOptions, models: tuple[str, ...]) -> FrontendFacts:
    """What one frontend tells; every question may fail by itself."""
    frontend = DynamoFrontend(url, min(options.timeout, _FRONTEND_S))
    try:
        kind = frontend.identify()
    except DynctlError as error:
        return FrontendFacts(frontend.url, Unread(error.message, error.hint))
    if kind == "dynctl":
        return _dynctl_facts(frontend.url, options)
    if kind == "other":
        return FrontendFacts(frontend.url, kind)
    served = _told(lambda: tuple(sorted(frontend.models())))
    metrics = _told(frontend.metrics)
    known = set(models) | set(() if isinstance(served, Unread) else served)
    if not isinstance(metrics, Unread):
        known |= {name for name, facts in metrics.models.items() if facts.ready is not None}
    return FrontendFacts(
        frontend.url,
        kind,
        version=_told(frontend.openapi_version),
        models=served,
        metrics=metrics,
        ready={model: _model_ready(frontend, model) for model in sorted(known)},
        thresholds=_told(frontend.thresholds),
    )


def _model_ready(frontend: DynamoFrontend, model: str) -> ModelReady | Unread:
    try:
        told = frontend.ready(model)
    except UsageProblem as error:
        return ModelReady(False, f"it does not know this model; {error.hint}")
    except DynctlError as error:
        return Unread(error.message, error.hint)
    return _readiness(told)


def _readiness(told: ModelReadiness) -> ModelReady:
    missing = {kind for space in told.namespaces.values() for kind in space.missing}
    return ModelReady(
        told.ready,
        told.reason,
        {name: dict(space.workers) for name, space in told.namespaces.items()},
        tuple(sorted(missing)),
    )


def _dynctl_facts(url: str, options: GlobalOptions) -> FrontendFacts:
    source = FrontendClient(url, token(options), min(options.timeout, _FRONTEND_S))
    thresholds = _told(source.thresholds)
    if isinstance(thresholds, Unread):
        models: tuple[str, ...] | Unread = thresholds
    else:
        models = tuple(sorted(thresholds))
    return FrontendFacts(
        url,
        "dynctl",
        version=_told(source.version),
        mode=_mode(source),
        models=models,
        thresholds=thresholds,
    )


def _mode(source: FrontendClient) -> str | None:
    document = _told(source.config)
    if isinstance(document, Unread):
        return None
    mode = document.values.get("router_mode")
    return mode if isinstance(mode, str) else None


def _told(ask: Callable[[], _T]) -> _T | Unread:
    try:
        return ask()
    except DynctlError as error:
        return Unread(error.message, error.hint)

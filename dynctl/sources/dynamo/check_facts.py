"""Gather the facts for `check`: planes and frontends at the same time, bounded, read-only.

What cannot be read becomes a fact (:class:`Unread`) and not an error: a worker that fails must not
hide problems of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from dynctl.adapters.dynamo.planes import Planes, backend, in_cluster, namespace, open_planes
from dynctl.adapters.ports import (
    NotCalledBack,
    RequestPlaneError,
    StreamCode,
    StreamCondition,
)
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import DynctlError, TimedOut, Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.workers import StreamState
from dynctl.health.deployment import RegisteredWorker
from dynctl.health.facts import (
    NATS,
    UNNUMBERED,
    CheckFacts,
    FrontendFacts,
    PlaneFacts,
    RankFacts,
    Unread,
)
from dynctl.serving.dynamo.observer import Observer
from dynctl.settings.contexts.precedence import in_context
from dynctl.sources.dynamo.equal_ids import refuse_equal_ids
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.dynamo.frontend_pods import OUT_OF_REACH, cluster_ways
from dynctl.sources.dynamo.frontends import frontend_facts, with_name
from dynctl.sources.named import DEFAULT_FRONTEND, expect_no_place, frontends
from dynctl.wire.dynamo.discovery import EventChannel, EventSource, ZmqTransport
from dynctl.wire.dynamo.recovery import Events, TooNew, TreeDump, parse_recovery, recovery_query

#: Events are received for this long after the caches are read.
COLLECT_S: Final = 1.0
#: Events published just before the last query have this long to arrive.
_ON_THE_WAY_S: Final = 0.3
#: Limit of each step of a query to a worker.
QUERY_S: Final = 2.0
_QUERIES_AT_ONCE: Final = 8
_QUERY_BYTES: Final = 64 * 1024 * 1024
_FRONTENDS_AT_ONCE: Final = 8
#: Above any event number: the response to a query from there is only the newest number.
_BEYOND: Final = 2**62

_WAYS: Final = """specify its discovery backend, its frontends, or both:
--discovery etcd --etcd-endpoints HOST:2379   a live Dynamo that registers in etcd
--discovery file --file-kv DIR                ... or in files
--frontend http://HOST:8000                   once for every replica"""

_T = TypeVar("_T")


def gather(options: GlobalOptions) -> CheckFacts:
    """The facts of all that the options name. Where they name nothing, raises Unreachable if no
    frontend is at the default address, TimedOut if it does not answer in time. Raises UsageProblem.
    """
    if options.offline:
        raise UsageProblem(f"{options.offline}: check needs a running deployment", _WAYS)
    options = in_context(options)
    planes_named = backend(options) is not None
    urls = frontends(options)
    if not planes_named and not urls:
        # Nothing is named: try the default address, as other commands do.
        expect_no_place(options)
        try:
            guess = DynamoFrontend(DEFAULT_FRONTEND, options.timeout).identify()
        except TimedOut as slow:  # a busy frontend is not a missing one
            hint = f"--timeout {options.timeout * 3:g} waits longer; or {_WAYS}"
            raise TimedOut(f"no deployment is set, and {slow.message}", hint) from None
        except DynctlError:
            guess = "other"
        if guess == "other":
            raise Unreachable(
                f"no deployment is set, and no frontend answers at {DEFAULT_FRONTEND}", _WAYS
            )
        urls = (DEFAULT_FRONTEND,)
    if not in_cluster(options):
        return asyncio.run(_gather(options, planes_named, urls))
    with cluster_ways(options, namespace(options)) as ways:
        rows = zip(ways.urls, ways.names, ways.graphs, ways.spaces, strict=True)
        names = {} if urls else {url: _Pod(f"Pod {name}", *rest) for url, name, *rest in rows}
        beyond = "" if ways.direct else OUT_OF_REACH
        facts = asyncio.run(_gather(options, planes_named, urls or (*names,), beyond, names))
        if urls:
            return facts
        silent = [FrontendFacts(f"Pod {name}", Unread(why)) for name, why in ways.silent.items()]
        return replace(facts, frontends=(*facts.frontends, *silent), frontends_unread=ways.refused)


class _Pod(NamedTuple):
    """The pod of a frontend: its name to show, its graph and its Dynamo namespace."""

    name: str
    graph: str
    space: str


async def _gather(
    options: GlobalOptions,
    planes: bool,
    urls: tuple[str, ...],
    out_of_reach: str = "",
    pods: Mapping[str, _Pod] = MappingProxyType({}),
) -> CheckFacts:
    """``pods``: by URL, for frontends of a cluster."""
    found = await _plane_facts(options, out_of_reach) if planes else None
    models: tuple[str, ...] = ()
    if found is not None:
        models = found.deployment.models
    limit = asyncio.Semaphore(_FRONTENDS_AT_ONCE)

    async def read(url: str) -> FrontendFacts:
        async with limit:
            facts = await asyncio.to_thread(frontend_facts, url, options, models)
            name, graph, space = pods.get(url, _Pod(facts.url, "", ""))
            if isinstance(facts.kind, Unread):
                kind = Unread(with_name(facts.kind.why, facts.url, name), facts.kind.hint)
                facts = replace(facts, kind=kind)
            return replace(facts, url=name, graph=graph, space=space)

    return CheckFacts(found, tuple(await asyncio.gather(*map(read, urls))))


# -- planes ----------------------------------------------------------------------------------------


class _Conditions:
    """The last message of each rank and kind of condition."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int, str], str] = {}

    def take(self, condition: StreamCondition) -> None:
        for rank in condition.ranks:
            self._last[condition.worker_id, rank, condition.code] = condition.message

    def last(self, rank: tuple[int, int], *codes: StreamCode) -> str:
        messages = (self._last.get((*rank, code.value)) for code in codes)
        return next(filter(None, messages), "")


@dataclass(frozen=True, slots=True)
class _RecoveryResponse:
    newest: int | None = None
    refusal: str | None = None
    called_back: bool | None = None


async def _plane_facts(options: GlobalOptions, out_of_reach: str) -> PlaneFacts:
    """``out_of_reach``: why workers are not reachable; empty where they are."""
    planes = open_planes(options)
    wanted = namespace(options)
    conditions = _Conditions()
    observer = Observer(
        planes,
        namespace=wanted,
        on_condition=conditions.take,
        follow_index=not out_of_reach,
        follow_load=not out_of_reach,
    )
    try:
        async with observer:
            refuse_equal_ids(observer.deployment)
            if out_of_reach:
                return _registered_only(observer, planes, wanted, out_of_reach)
            return await _observed_facts(observer, planes, wanted, conditions, options.wait)
    except Unreachable as error:
        return PlaneFacts(planes.title, wanted, Unread(error.message, error.hint))


def _registered_only(
    observer: Observer, planes: Planes, wanted: str | None, out_of_reach: str
) -> PlaneFacts:
    ranks = tuple(
        _rank_facts(item, rank, observer, _Conditions(), _RecoveryResponse())
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


async def _observed_facts(
    observer: Observer,
    planes: Planes,
    wanted: str | None,
    conditions: _Conditions,
    wait: float,
) -> PlaneFacts:
    # The workers at the start: those that leave meanwhile belong to the next check.
    workers = observer.deployment.workers
    sources = [(item, rank, source) for item in workers for rank, source in item.sources.items()]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait):
            await observer.settled()
    # Without a connection no events arrive.
    connected = any(state.connected for state in observer.stream_states().values())
    if connected:
        await asyncio.sleep(COLLECT_S)
    responses = await _query_all(planes, [source for _, _, source in sources])
    if connected:
        await asyncio.sleep(_ON_THE_WAY_S)
    await observer.applier.drained()
    ranks = tuple(
        _rank_facts(item, rank, observer, conditions, responses[source.worker_id, source.dp_rank])
        for item, rank, source in sources
    )
    return PlaneFacts(
        planes.title,
        wanted,
        deployment=replace(observer.deployment, problems=observer.problems),
        ranks=ranks,
        waited_s=wait,
        listened_s=COLLECT_S + _ON_THE_WAY_S,
        query_timeout_s=QUERY_S,
        comparable=observer.router.index.any_shared(),
        replica_sync_events=observer.load.added,
    )


def _rank_facts(
    item: RegisteredWorker,
    rank: int,
    observer: Observer,
    conditions: _Conditions,
    response: _RecoveryResponse,
) -> RankFacts:
    key = (item.worker.worker_id, rank)
    channel, source = item.kv_events.get(rank), item.sources[rank]
    slot = observer.router.registry.slot(*key)
    incomplete = observer.not_current().get(key)
    return RankFacts(
        worker=item.worker.name,
        dp_rank=rank,
        channel=_shared_channels(item) if channel is None else _address(channel),
        indexer=None if source.recovery is None else source.recovery.address.partition("/")[0],
        state=observer.stream_states().get(key, StreamState()),
        newest=response.newest,
        refusal=response.refusal,
        called_back=response.called_back,
        current=incomplete is None,
        incomplete=incomplete or "",
        disconnected=conditions.last(key, StreamCode.STREAM_DISCONNECTED),
        foreign=conditions.last(key, StreamCode.FOREIGN_PUBLISHER),
        unreadable=conditions.last(
            key, StreamCode.MALFORMED_BATCH, StreamCode.MALFORMED_MESSAGE, StreamCode.UNKNOWN_EVENT
        ),
        own_names=0 if slot is None else observer.router.index.own_names(slot),
    )


def _shared_channels(item: RegisteredWorker) -> str | None:
    """The channels of its component, before Dynamo 1.4; None without any."""
    number = len(item.shared_events)
    return f"one of {number:,} of {item.card.endpoint.component}" if number else None


def _address(channel: EventChannel) -> str:
    transport = channel.transport
    return transport.endpoint if isinstance(transport, ZmqTransport) else NATS


async def _query_all(
    planes: Planes, sources: Iterable[EventSource]
) -> dict[tuple[int, int], _RecoveryResponse]:
    """The number of the newest event of each rank, as its worker reports it."""
    limit = asyncio.Semaphore(_QUERIES_AT_ONCE)

    async def query(source: EventSource) -> _RecoveryResponse:
        async with limit:
            try:
                return await _query(planes, source)
            except NotCalledBack as error:
                return _RecoveryResponse(refusal=str(error), called_back=False)
            except (RequestPlaneError, WireError) as error:
                return _RecoveryResponse(refusal=str(error))

    listed = list(sources)
    responses = await asyncio.gather(*map(query, listed))
    return {
        (source.worker_id, source.dp_rank): response
        for source, response in zip(listed, responses, strict=True)
    }


async def _query(planes: Planes, source: EventSource) -> _RecoveryResponse:
    if source.recovery is None:
        return _RecoveryResponse(refusal="the worker has no local indexer")
    body = recovery_query(source.worker_id, source.dp_rank, _BEYOND)
    items = planes.requests.ask_raw(source.recovery, body, timeout=QUERY_S, max_bytes=_QUERY_BYTES)
    async with aclosing(items) as answer:
        async for item in answer:
            match parse_recovery(item):
                case TooNew(newest_available=newest):
                    return _RecoveryResponse(newest, called_back=True)
                case Events(last_event_id=last) | TreeDump(last_event_id=last):
                    return _RecoveryResponse(UNNUMBERED if last is None else last, called_back=True)
                case other:
                    message = getattr(other, "message", "invalid range")
                    return _RecoveryResponse(refusal=f"it answers: {message}", called_back=True)
    return _RecoveryResponse(refusal="the response was empty", called_back=True)

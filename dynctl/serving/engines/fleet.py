"""The fleet: engines by spec, with their facts, health and event streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from dynctl.adapters.ports import StreamCode, StreamCondition
from dynctl.adapters.zmq.kv_event_source import KvEventSource
from dynctl.base.quantities import percent
from dynctl.base.tasks import SLICE, drained, end_tasks
from dynctl.documents.models import EngineHealth
from dynctl.documents.workers import (
    UNREACHED,
    EngineRow,
    RankRow,
    StreamState,
    UnregisteredEngine,
    WorkerRow,
    engine_rank,
    engine_row,
    rank_rows,
    worker_row,
)
from dynctl.health import conditions as codes
from dynctl.serving.engines.ejection import Ejection
from dynctl.serving.engines.facts import (
    EngineReader,
    bootstrap_address,
    build_worker,
    contradictions,
    event_sources,
)
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.serving.engines.worker_spec import WorkerSpec, WorkerSpecError
from dynctl.serving.routing.config import EjectionLimits, FrontendConfig
from dynctl.serving.routing.index_runtime import IndexRuntime
from dynctl.serving.routing.prompts import NOT_MODELLED
from dynctl.serving.routing.service import RoutingService
from dynctl.wire.engine_kinds.facts import EngineFacts
from dynctl.wire.engine_kinds.kind import EngineKind
from dynctl.wire.engine_kinds.table import kind_named
from dynctl.wire.index_events import DropCode
from router_core import (
    Cleared,
    IndexConnected,
    IndexMarked,
    KvEvent,
    Worker,
    canonical_taint,
)

_log = logging.getLogger(__name__)

#: Maximum probes of the whole fleet per second: in a large fleet each engine is probed less often.
_PROBES_A_SECOND = 100
#: Maximum readings of engines' metrics per second: each is about 100 kB.
_METRICS_A_SECOND = 20
_NO_METRICS_S = 60.0
#: Seconds between two readings of an engine's facts: adapters come and go while it runs.
_FACTS_S = 30.0
#: The share of a probe's time-out that our event loop must have been late to excuse it.
_LATE = 0.25
_MOST_EXCUSED = 5
#: Seconds for which our event loop must have stood still to excuse a request that failed meanwhile.
_STILL_S = 1.0
_OVERLOADED = 503
_NOT_FOUND = 404
#: Statuses of a probe where the engine has no health endpoint: it is up.
_NO_HEALTH_ENDPOINT = (404, 405)
#: Failures of requests that a process can cause by standing still.
_MAY_BE_OURS = ("connect", "vanished", "reset", "timeout")
#: Seconds between two readings of an engine's names because it does not serve one.
_NAMES_S = 1.0
WAITING = "waiting for its first health probe"
#: Conditions of an engine's events; they end when the index starts empty.
_OF_EVENTS = (
    *map(str, DropCode),
    *map(
        str,
        (
            StreamCode.EVENTS_LOST,
            StreamCode.EVENTS_OVERFLOW,
            StreamCode.FOREIGN_PUBLISHER,
            StreamCode.MALFORMED_BATCH,
            StreamCode.MALFORMED_MESSAGE,
            StreamCode.REPLAY_UNAVAILABLE,
            StreamCode.UNKNOWN_EVENT,
        ),
    ),
)
#: Code of a stream that recovered -> the conditions that end.
_ENDED_BY = {
    str(StreamCode.INDEX_CURRENT): (str(StreamCode.EVENTS_LOST),),
    str(StreamCode.EVENTS_KEPT_UP): (str(StreamCode.EVENTS_OVERFLOW),),
    str(StreamCode.REPLAY_AVAILABLE): (str(StreamCode.REPLAY_UNAVAILABLE),),
    str(StreamCode.ENGINE_RESTARTED): _OF_EVENTS,
}
#: Code of a stream -> whether its events have pairs of tokens.
_PAIRS = {
    str(StreamCode.PAIRS_PUBLISHED): True,
    str(StreamCode.TOKENS_PUBLISHED): False,
}
_RECOVERIES = (
    StreamCode.EVENTS_KEPT_UP,
    StreamCode.INDEX_CURRENT,
    StreamCode.REPLAY_AVAILABLE,
    StreamCode.STREAM_CONNECTED,
)


#: Seconds between two readings of an index that is over its bound again and again.
_REREAD_S = (10.0, 30.0, 120.0, 600.0)


@dataclass(slots=True)
class Member:
    """One engine of the fleet. ``source``: ``command line``, ``file`` or ``api``.

    ``worker`` is None while its model is unknown; ``problem`` is why it is not routable.
    ``gone``: its port refused connections, so the process that responds next is a new one, unless
    its event stream noticed the restart first (``restarts_seen``: its count of restarts then).
    ``doubt``: the problem may be ours (a probe without an answer), not the engine's. ``ejection``:
    what its requests say about it; ``responses``: those without an output yet. ``excused``: probes
    in a row that failed while our own event loop was late. ``output_at``: time of its last first
    output of a request.
    ``read_at``: the earliest time at which an index over its bound is read again, for the
    ``rereads``-th time. ``waiting``: rank -> requests that wait in the engine, by its last report;
    ``load_at`` and ``facts_at``: the earliest time of the next reading, by the service's clock;
    ``named_at``: the time of the last reading of its names.
    ``pairs``: whether its events have pairs of tokens; None: as its facts say.
    """

    spec: WorkerSpec
    source: str
    facts: EngineFacts = field(default_factory=EngineFacts)
    worker: Worker | None = None
    bootstrap: tuple[str, int] | None = None
    tokenize: bool | None = None
    problem: str | None = WAITING
    doubt: bool = False
    ejection: Ejection = field(default_factory=lambda: Ejection(EjectionLimits()))
    responses: set[EngineStream] = field(default_factory=set)
    group: WorkerGroup | None = None
    failures: int = 0
    excused: int = 0
    probed: bool = False
    waiting: Mapping[int, int] = field(default_factory=dict)
    output_at: float = float("-inf")
    load_at: float = 0.0
    facts_at: float = 0.0
    named_at: float = float("-inf")
    gone: bool = False
    restarts_seen: int = 0
    read_at: float = 0.0
    rereads: int = 0
    pairs: bool | None = None
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def kind(self) -> EngineKind:
        return kind_named(self.facts.kind)

    @property
    def reason(self) -> str | None:
        """Why it gets no requests."""
        return self.problem if self.problem is not None else self.ejection.reason()

    @property
    def well(self) -> bool:
        return self.problem is None and self.ejection.state == "in"


@dataclass(slots=True)
class WorkerGroup:
    """The registered workers of one model and role. ``panic``: too few of them are well."""

    name: str
    members: dict[str, Member] = field(default_factory=dict)
    well: set[str] = field(default_factory=set)
    panic: bool = False


class FleetFull(Exception):
    """The fleet has the maximum number of workers."""


class Fleet:
    """Registers engines with the service, probes them, and follows their KV events."""

    def __init__(self, service: RoutingService, upstream: Upstream, config: FrontendConfig) -> None:
        self._service = service
        self._upstream = upstream
        self._config = config
        self._members: dict[str, Member] = {}
        self._by_id: dict[int, Member] = {}
        self._groups: dict[str, WorkerGroup] = {}
        self._joining = asyncio.Lock()
        self._turn = 0
        #: Ids of the workers that have no ``/tokenize``.
        self._without_tokenize: set[int] = set()
        self._engines = EngineReader(upstream, config.health.timeout_s)
        self.index = IndexRuntime(
            service.apply,
            service.sweep,
            self._on_stream_condition,
            service.clock,
            service.tasks,
        )
        self.other_kinds: dict[int, EngineKind] = {}
        service.preparation.tokenizers.ask_engines(self.tokenize, self.kinds)
        service.read_fleet(self._all_rows, self.unregistered, lambda: self.load_interval)

    # -- reading ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def by_id(self, worker_id: int) -> Member | None:
        return self._by_id.get(worker_id)

    def engines(self) -> list[EngineHealth]:
        """Every engine with its problem, if it has one."""
        return [EngineHealth(m.spec.name, m.spec.url, m.problem) for m in self]

    def find(self, text: str) -> EngineRow | UnregisteredEngine | None:
        """The row of an engine, by its name or its worker's id; None for an unknown one."""
        worker = self._service.membership.find(text)
        member = self._members.get(text)
        if member is None and worker is not None:
            member = self._members.get(worker.name)
        return None if member is None else self.row(member)

    def rows(self) -> list[EngineRow | UnregisteredEngine]:
        """The rows of ``GET /v1/workers``: every engine, registered or not."""
        return drained(self.row_steps())

    def row_steps(self) -> Generator[None, None, list[EngineRow | UnregisteredEngine]]:
        """As :meth:`rows`, in steps of a few milliseconds at most. What changes is read in the
        first one."""
        states = self.streams_by_worker()
        read = [self._read(member, states.get(member.spec.worker_id, {})) for member in self]
        rows: list[EngineRow | UnregisteredEngine] = []
        for make in read:
            if not len(rows) % SLICE:
                yield
            rows.append(make())
        yield
        return rows

    def row(self, member: Member) -> EngineRow | UnregisteredEngine:
        """The row of one engine."""
        return self._read(member, self.streams(member.spec.worker_id))()

    def streams(self, worker_id: int) -> Mapping[int, StreamState]:
        """Rank -> state of its event stream."""
        return self.index.states(worker_id)

    def streams_by_worker(self) -> Mapping[int, Mapping[int, StreamState]]:
        """Worker id -> rank -> state of its event stream."""
        return self.index.states_by_worker()

    def _read(
        self, member: Member, states: Mapping[int, StreamState]
    ) -> Callable[[], EngineRow | UnregisteredEngine]:
        """Read what changes of an engine; the result makes its row."""
        spec, router = member.spec, self._service.router
        worker = router.registry.get(spec.worker_id)
        if worker is None:
            return partial(
                UnregisteredEngine,
                name=spec.name,
                worker_id=spec.worker_id,
                model=spec.model or "",
                role=spec.role.value if spec.role else "",
                reason=member.problem,
                id=str(spec.worker_id),
                source=member.source,
                endpoint=spec.url,
                domains=dict(spec.domains),
                runtime_config=_specified_config(spec),
            )
        ranks = rank_rows(router, worker, self._service.clock(), member.waiting)
        held = self._service.conditions.get(codes.NO_TOKENIZER, worker.model)
        if held is not None and held.message == NOT_MODELLED:
            ranks = [_without_estimate(rank) for rank in ranks]
        reason, doubt = router.registry.unavailable_reason(spec.worker_id), member.reason
        return lambda: engine_row(
            worker_row(worker, ranks, reason, doubt),
            source=member.source,
            endpoint=spec.url,
            events=states,
        )

    def _all_rows(self) -> Iterator[WorkerRow]:
        """Rows for an evaluation of the fleet.

        Which workers there are, and which of them are available and busy, is read now; index and
        load of each on iteration. Of a worker that has left by then they are unknown.
        """
        registry = self._service.router.registry
        read = [
            (
                worker,
                registry.slots(worker.worker_id),
                registry.unavailable_reason(worker.worker_id),
            )
            for worker in registry
        ]
        return chain(self._rows_of(read, self._service.router.busy.busy_ranks), self.unregistered())

    def _rows_of(
        self, read: Iterable[tuple[Worker, Sequence[int], str | None]], busy: int
    ) -> Iterator[WorkerRow]:
        """The rows of workers with these slots, available or not, and with these busy slots."""
        router, clock = self._service.router, self._service.clock
        states: Mapping[int, Mapping[int, StreamState]] | None = None
        for worker, slots, reason in read:
            ranks: Sequence[RankRow]
            if router.registry.slots(worker.worker_id) == slots:
                ranks = rank_rows(router, worker, clock(), busy_ranks=busy)
            else:
                ranks = [
                    RankRow(dp_rank=rank, busy=bool(busy >> slot & 1))
                    for rank, slot in zip(worker.ranks, slots, strict=True)
                ]
            # An engine of another process has no stream here.
            if worker.worker_id in self._by_id and any(r.index == "disconnected" for r in ranks):
                if states is None:
                    states = self.streams_by_worker()
                events = states.get(worker.worker_id, {})
                ranks = [engine_rank(rank, events.get(rank.dp_rank)) for rank in ranks]
            member = self._by_id.get(worker.worker_id)
            yield worker_row(worker, ranks, reason, None if member is None else member.reason)

    def unregistered(self) -> list[WorkerRow]:
        """Engines whose model is unknown yet, or that are not routable."""
        known = self._service.router.registry.get
        return [_unregistered_row(m) for m in self if known(m.spec.worker_id) is None]

    def waiting(self) -> dict[int, Mapping[int, int]]:
        """Worker id -> rank -> requests that wait in the engine, where engines report them."""
        return {m.spec.worker_id: m.waiting for m in self._members.values() if m.waiting}

    @property
    def probe_interval(self) -> float:
        """Seconds between two probes of an engine: a large fleet is probed less often."""
        return max(self._config.health.interval_s, len(self) / _PROBES_A_SECOND)

    @property
    def load_interval(self) -> float:
        """Seconds between two readings of an engine's load, the longest in the fleet."""
        metrics = any(member.kind.load is None for member in self._members.values())
        return max(self.probe_interval, len(self) / _METRICS_A_SECOND if metrics else 0.0)

    # -- joining and leaving ---------------------------------------------------------------

    async def first_read(self, timeout_s: float) -> None:
        """Wait until what the engines cache was read once, at most ``timeout_s`` seconds."""
        await self.index.first_read(timeout_s)

    async def add(self, spec: WorkerSpec, source: str) -> Member:
        """Add an engine to the fleet, or replace the one with that name. Returns after its first
        probe; raises WorkerSpecError (a bad combination) or FleetFull."""
        key = self._engine_key(spec, source)
        async with self._joining:
            old = self._members.get(spec.name)
            if old is not None and old.spec == spec:
                return old
            if old is None and len(self._members) >= self._config.limits.workers:
                raise FleetFull(f"the fleet has {len(self._members)} workers, the maximum")
            clash = self._by_id.get(spec.worker_id)
            if clash is not None and clash.spec.name != spec.name:
                raise WorkerSpecError(
                    f"worker {spec.name}: has the same id as {clash.spec.name}; set another name"
                )
            if old is not None:
                await self.remove(spec.name)
            if key is not None:
                self._upstream.authorize(spec.url, key)
            member = Member(spec, source, ejection=Ejection(self._config.health.ejection))
            self._members[spec.name] = member
            self._by_id[spec.worker_id] = member
        await self._probe(member)
        if self._members.get(spec.name) is member:
            member.task = self._service.tasks.start(
                "health probe", partial(self._watch, member), spec.name
            )
        return member

    def _engine_key(self, spec: WorkerSpec, source: str) -> str | None:
        """The key that the engine needs. Engines of the API get none: an operator of a running
        process must not be able to read its environment or its keys."""
        if source == "api":
            if spec.api_key_env is not None:
                raise WorkerSpecError(
                    f"worker {spec.name}: api-key-env is accepted on the command line and in the "
                    "workers file only"
                )
            return None
        if spec.api_key_env is None:
            return self._config.engine_api_key
        key = os.environ.get(spec.api_key_env, "")
        if not key or not key.isascii() or not key.isprintable():
            raise WorkerSpecError(
                f"worker {spec.name}: api-key-env: the variable {spec.api_key_env} has no valid "
                "key; expected printable ASCII characters"
            )
        return key

    async def remove(self, name: str) -> bool:
        """Remove an engine; its running requests continue."""
        member = self._members.pop(name, None)
        if member is None:
            return False
        self._by_id.pop(member.spec.worker_id, None)
        self.other_kinds.pop(member.spec.worker_id, None)
        self._without_tokenize.discard(member.spec.worker_id)
        if all(other.spec.url != member.spec.url for other in self):
            self._upstream.authorize(member.spec.url, None)
        if member.task is not None:
            await end_tasks([member.task])
            member.task = None  # it refers to its error, and through it to the member
        self.index.unfollow(member.spec.worker_id)
        self._regroup(member, None)
        if member.worker is not None:
            self._service.membership.remove(member.spec.worker_id)
            self.index.request_sweep()
        self._service.conditions.forget(name)
        for key in [key for key in self._service.engine_failures if key[0] == name]:
            del self._service.engine_failures[key]
        return True

    async def close(self) -> None:
        """Stop probing and following; the registry is unchanged."""
        members = self._members.values()
        await end_tasks([member.task for member in members if member.task is not None])
        await self.index.close()

    # -- health ----------------------------------------------------------------------------

    def dispatched(self, member: Member) -> None:
        """A request is sent to the engine."""
        if member.ejection.state != "in" and member.ejection.sent(self._service.clock()):
            self._show(member)

    def answered(self, worker_id: int) -> None:
        """The engine sent the first output of a request."""
        member = self._by_id.get(worker_id)
        if member is None:
            return
        member.output_at = now = self._service.clock()
        if member.ejection.answered(now):
            _log.info(
                "worker %s: a request was answered, so it gets requests again", member.spec.name
            )
            self._service.clear_condition(codes.WORKER_EJECTED, member.spec.name)
            self._show(member)

    def report_failure(
        self, worker_id: int, failure: UpstreamFailure, sent_at: float | None = None
    ) -> None:
        """A request to the engine, sent at ``sent_at``, failed: a refused connection ejects it,
        others probe it, and too many of them eject it."""
        member = self._by_id.get(worker_id)
        if member is None:
            return
        if failure.status == _NOT_FOUND:
            self._read_names(member)
        if not failure.of_engine:
            return
        self._service.engine_failures[member.spec.name, failure.kind] += 1
        if failure.kind == "refused":
            self._eject(member, str(failure), gone=True)
            return
        if failure.kind in _MAY_BE_OURS:
            member.probe_now.set()
        if failure.kind == "ejected" or failure.status == _OVERLOADED:
            return
        if failure.kind in _MAY_BE_OURS and sent_at is not None and self._stood_still(sent_at):
            return
        silent = failure.kind == "timeout" and sent_at is not None and member.output_at < sent_at
        if member.ejection.failed(self._service.clock(), str(failure), silent=silent):
            name, reason = member.spec.name, member.ejection.reason() or ""
            self._service.set_condition(codes.WORKER_EJECTED, name, reason)
            self._show(member)
            member.probe_now.set()  # for the time of its trial

    def _stood_still(self, sent_at: float) -> bool:
        """Whether this process, not the engine, was stopped while a request waited."""
        waited = self._service.clock() - sent_at
        return self._service.loop_late_since(sent_at) >= max(_STILL_S, _LATE * waited)

    def _read_names(self, member: Member) -> None:
        """Read the names that the engine serves at once: it does not serve one any more."""
        now = self._service.clock()
        if now - member.named_at >= _NAMES_S:
            member.named_at = member.facts_at = now
            member.probe_now.set()

    # -- who gets requests -------------------------------------------------------------------

    def _regroup(self, member: Member, worker: Worker | None) -> None:
        """Move the member to the group of its worker; None: out of every group."""
        name = None if worker is None else f"{worker.model} {worker.role.value}"
        old = member.group
        if old is not None and old.name != name:
            old.members.pop(member.spec.name, None)
            old.well.discard(member.spec.name)
            member.group = None
            if not old.members:
                self._groups.pop(old.name, None)
            self._judge(old)
        if name is not None and member.group is None:
            member.group = self._groups.setdefault(name, WorkerGroup(name))
            member.group.members[member.spec.name] = member

    def _show(self, member: Member) -> None:
        """Tell the router whether the member may get requests; its group may begin to panic."""
        group = member.group
        if group is None:
            return
        (group.well.add if member.well else group.well.discard)(member.spec.name)
        if not self._judge(group):
            self._admit(member, panic=group.panic)

    def _judge(self, group: WorkerGroup) -> bool:
        """Begin or end the panic of a group; returns whether it changed."""
        well, everyone = len(group.well), len(group.members)
        threshold = self._config.health.panic_threshold
        panic = (
            everyone > 0
            and well < threshold * everyone
            and any(map(_in_doubt, group.members.values()))
        )
        if panic:
            message = (
                f"{well}/{everyone} workers are well, fewer than {percent(threshold)}: workers "
                "whose probes or requests failed get requests all the same"
            )
            self._service.set_condition(codes.TOO_FEW_WELL, group.name, message)
        elif group.panic:
            self._service.clear_condition(codes.TOO_FEW_WELL, group.name)
        if panic == group.panic:
            return False
        group.panic = panic
        for member in group.members.values():
            self._admit(member, panic=panic)
        return True

    def _admit(self, member: Member, *, panic: bool) -> None:
        """Set whether the router may choose the member; without it, its waiting requests go."""
        worker_id = member.spec.worker_id
        reason = None if panic and _in_doubt(member) else member.reason
        self._service.membership.set_available(worker_id, reason)
        if reason is None or (member.problem is None and member.ejection.state == "trial"):
            return
        given_back, member.responses = member.responses, set()
        for response in given_back:
            response.abandon(UpstreamFailure("ejected", f"{response.origin}: {reason}"))

    async def _watch(self, member: Member) -> None:
        while True:
            pause = member.ejection.wait_s(self._service.clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self.probe_interval, pause or self.probe_interval)):
                    await member.probe_now.wait()
            member.probe_now.clear()
            if member.ejection.tick(self._service.clock()):
                self._show(member)
            await self._probe(member)

    async def _probe(self, member: Member) -> None:
        health, began = self._config.health, self._service.clock()
        try:
            status, _ = await self._upstream.get(member.spec.url + health.path, health.timeout_s)
        except UpstreamFailure as failure:
            gone = failure.kind == "refused"
            if self._was_removed(member) or (not gone and self._excuse(member, began)):
                return
            self._note_failed_probe(member, str(failure), gone=gone, doubt=not gone)
            return
        if self._was_removed(member):
            return
        member.excused = 0
        if status >= 400 and status not in _NO_HEALTH_ENDPOINT:
            self._note_failed_probe(member, f"{health.path} returned status {status}")
            return
        member.failures = 0
        self._read_again(member)
        if member.problem is not None or self._service.clock() >= member.facts_at:
            await self._join(member)
        else:
            await self._read_load(member)

    def _note_failed_probe(
        self, member: Member, reason: str, *, gone: bool = False, doubt: bool = False
    ) -> None:
        member.failures += 1
        if gone or member.failures >= self._config.health.failures or not member.probed:
            self._eject(member, reason, gone=gone, doubt=doubt)

    def _was_removed(self, member: Member) -> bool:
        """Whether the member was removed in the meantime: its first probe is not cancelled."""
        return self._members.get(member.spec.name) is not member

    def _excuse(self, member: Member, began: float) -> bool:
        """Whether a probe failed because our own event loop was late, not the engine; counts it
        then."""
        late = self._service.loop_late_since(began)
        if late < _LATE * self._config.health.timeout_s or member.excused >= _MOST_EXCUSED:
            return False
        member.excused += 1
        self._service.probes_excused += 1
        return True

    def _eject(self, member: Member, reason: str, *, gone: bool, doubt: bool = False) -> None:
        first = member.problem is None
        member.problem, member.doubt = reason, doubt
        member.waiting = {}
        name = member.spec.name
        self._service.clear_condition(codes.WORKER_REJECTED, name)
        if member.worker is None:
            self._service.set_condition(codes.WORKER_UNREACHABLE, name, reason)
            return
        if first:
            member.restarts_seen = self._restarts(member)
        self._show(member)
        self._service.set_condition(codes.WORKER_UNREACHABLE, name, reason)
        if gone and not member.gone:
            # The process ended, so its cache is lost.
            member.gone = True
            self._clear_index(member)

    async def _join(self, member: Member) -> None:
        """The engine responds: read its facts, register it, follow its events."""
        spec, back = member.spec, member.problem is not None
        facts = await self._engines.facts(spec)
        if self._was_removed(member):
            return
        facts = _complete_facts(member, facts)
        try:
            worker, sources = self._described(member, facts)
            if worker != member.worker:
                applied = self._service.membership.upsert(worker)
                if not applied.ok:
                    raise WorkerSpecError(applied.message)
        except WorkerSpecError as error:
            self._reject(member, str(error))
            return
        if _is_new_process(member, facts):
            self._note_tokenize(member, None)
        first = member.worker is None
        starts_over = self._starts_over(member, facts, worker, sources)
        member.facts, member.worker, member.problem = facts, worker, None
        self._note_kind(member)
        member.load_at = 0.0
        member.facts_at = self._service.clock() + max(_FACTS_S, len(self) / _METRICS_A_SECOND)
        member.bootstrap = bootstrap_address(spec, facts)
        if starts_over:
            self._follow(member, sources)
        member.gone = False
        self._service.clear_condition(codes.WORKER_UNREACHABLE, spec.name)
        self._service.clear_condition(codes.WORKER_REJECTED, spec.name)
        differs = contradictions(
            spec, facts, model=self._config.model_name, block_size=self._config.block_size
        )
        self.hold_condition(codes.SPEC_DIFFERS_FROM_ENGINE, spec.name, differs)
        self._regroup(member, worker)
        self._show(member)
        if back:
            how = "first contact" if first else "back"
            _log.info("worker %s (%s, %s): %s", spec.name, worker.role.value, worker.model, how)
        member.probed = True
        await self._read_load(member)

    def _described(self, member: Member, facts: EngineFacts) -> tuple[Worker, list[KvEventSource]]:
        """The worker of an engine and the sources of its events. Raises WorkerSpecError."""
        worker = build_worker(
            member.spec, facts, model=self._config.model_name, block_size=self._config.block_size
        )
        worker = _with_pairs(worker, member.pairs)
        sources = event_sources(member.spec, facts, worker)
        if not self._service.router.config.use_kv_events:
            return replace(worker, kv_events=False), []
        return worker, sources

    def _starts_over(
        self, member: Member, facts: EngineFacts, worker: Worker, sources: Sequence[KvEventSource]
    ) -> bool:
        """Whether the engine's index starts empty: what is known of its caches is not true of it
        any more. The member is as it was before this reading."""
        old = member.worker
        if old is None:
            return True
        if _is_new_process(member, facts) and self._restarts(member) == member.restarts_seen:
            return True
        if not old.kv_events and not sources:
            # What was estimated of this process stays when its facts become more complete.
            return False
        # Names come and go in a process whose caches stay.
        renamed = replace(old, aliases=worker.aliases, adapters=worker.adapters)
        return worker != renamed or facts.kv_events != member.facts.kv_events

    def hold_condition(self, code: str, subject: str, message: str | None) -> None:
        """Report a condition; None: it ends."""
        if message is None:
            self._service.clear_condition(code, subject)
        else:
            self._service.set_condition(code, subject, message)

    def _reject(self, member: Member, reason: str) -> None:
        """The engine answers, but cannot be registered as it is."""
        member.problem, member.doubt = reason, False
        if member.worker is not None:
            self._show(member)
        self._service.clear_condition(codes.WORKER_UNREACHABLE, member.spec.name)
        self._service.set_condition(codes.WORKER_REJECTED, member.spec.name, reason)

    def _follow(self, member: Member, sources: list[KvEventSource]) -> None:
        """Follow the engine's events from the start, on an EMPTY index: the process may be new, so
        only (re)played events count."""
        self.index.unfollow(member.spec.worker_id)
        self._clear_index(member)
        for source in sources:
            # Disconnected until the stream reports that it is connected.
            unread = IndexConnected(source.worker_id, source.dp_rank, False, recovering=True)
            self._service.apply(IndexMarked(source.worker_id, source.dp_rank, "current"))
            self._service.apply(unread)
            self.index.follow(source, member.spec.name)

    def _read_again(self, member: Member) -> None:
        """Read the caches of an engine again whose index was over its bound and is dropped."""
        worker, router, now = member.worker, self._service.router, self._service.clock()
        if worker is None:
            return
        slots = router.registry.slots(worker.worker_id)
        if not any(router.freshness[slot].index_state == "over_limit" for slot in slots):
            if now >= member.read_at + _REREAD_S[-1]:
                member.rereads = 0
            return
        emptied = all(router.index_is_empty(worker.worker_id, rank) for rank in worker.ranks)
        if emptied and now >= member.read_at:
            member.read_at = now + _REREAD_S[min(member.rereads, len(_REREAD_S) - 1)]
            member.rereads += 1
            self._reread(member, worker)

    def _reread(self, member: Member, worker: Worker) -> None:
        self._follow(member, event_sources(member.spec, member.facts, worker))

    def _restarts(self, member: Member) -> int:
        states = self.index.states(member.spec.worker_id).values()
        return sum(state.restarts for state in states)

    def _clear_index(self, member: Member) -> None:
        if member.worker is None:
            return
        self._end_conditions(member.spec.name, _OF_EVENTS)
        for rank in member.worker.ranks:
            self._service.apply(KvEvent(member.worker.worker_id, rank, Cleared()))

    async def _read_load(self, member: Member) -> None:
        """Read the load that the engine reports, beside the bookings of this router."""
        worker, now = member.worker, self._service.clock()
        if worker is None or now < member.load_at:
            return
        load = await self._engines.load(member.spec.url, worker, member.kind)
        if member.kind.load is None:
            # Metrics are large: not at every probe of a large fleet, and rarely if an engine has
            # none.
            wait = len(self) / _METRICS_A_SECOND if load.reported else _NO_METRICS_S
            member.load_at = now + wait
        if member.worker is worker:
            member.waiting = load.waiting
            for report in load.reports:
                self._service.apply(report)

    # -- event streams ---------------------------------------------------------------------

    def _on_stream_condition(self, condition: StreamCondition) -> None:
        member = self._by_id.get(condition.worker_id)
        if member is None:
            return
        name = member.spec.name
        if condition.code in _PAIRS:
            self._set_pairs(member, _PAIRS[condition.code])
            return
        self._end_conditions(name, _ENDED_BY.get(condition.code, ()))
        if condition.code in _RECOVERIES:
            return
        if condition.code == StreamCode.STREAM_DISCONNECTED:
            member.probe_now.set()  # most likely the process ended
            return
        self._service.set_condition(str(condition.code), name, condition.message)

    def _set_pairs(self, member: Member, pairs: bool) -> None:
        """Have prompts hashed as the engine's events show that it caches them."""
        member.pairs = pairs
        if member.worker is not None:
            worker = _with_pairs(member.worker, pairs)
            if self._service.membership.upsert(worker).ok:
                member.worker = worker

    def _end_conditions(self, name: str, ended: Iterable[str]) -> None:
        for code in ended:
            # Workers of different block sizes stay different.
            if code != codes.BLOCK_SIZE_MISMATCH or name not in self._service.mismatched:
                self._service.clear_condition(code, name)

    # -- tokenizing ------------------------------------------------------------------------

    def kinds(self, model: str) -> set[EngineKind]:
        """The kinds of a model's engines; empty in a fleet without `other_kinds`."""
        if not self.other_kinds:  # asked for each request, and most fleets have one kind
            return set()
        return {
            member.kind
            for member in self
            if member.worker is not None and member.worker.model == model
        }

    def _note_kind(self, member: Member) -> None:
        if member.kind.as_vllm:
            self.other_kinds.pop(member.spec.worker_id, None)
        else:
            self.other_kinds[member.spec.worker_id] = member.kind

    async def tokenize(self, model: str, prompt: Any) -> list[int] | None:
        """Tokenize a prompt at an engine of the model; None if none has the endpoint."""
        if len(self._without_tokenize) == len(self._members):
            return None  # asked for each request: not each time of a thousand engines
        # A different engine each time, to spread the load.
        self._turn += 1
        members = list(self)
        start = self._turn % max(1, len(members))
        for member in members[start:] + members[:start]:
            worker = member.worker
            if worker is None or worker.model != model or member.problem is not None:
                continue
            if member.tokenize is False:
                continue
            body = prompt.to_tokenize_body(model, member.kind)
            answer = await self.tokenize_at(member, body)
            if answer.ids is not None:
                return answer.ids
        return None

    def _note_tokenize(self, member: Member, has: bool | None) -> None:
        """Note whether an engine has ``/tokenize``; None: it is not known any more."""
        member.tokenize = has
        worker_id = member.spec.worker_id
        if has is not False:
            self._without_tokenize.discard(worker_id)
        elif self._by_id.get(worker_id) is member:
            self._without_tokenize.add(worker_id)

    async def tokenize_at(self, member: Member, body: Mapping[str, Any]) -> EngineTokens:
        """One engine's ``POST /tokenize``; remembers engines without it."""
        try:
            status, raw = await self._upstream.post(
                f"{member.spec.url}/tokenize", body, self._config.health.timeout_s
            )
        except UpstreamFailure:
            return EngineTokens(None, None)
        if status in (404, 405, 501):
            self._note_tokenize(member, False)
        tokens = _token_ids(raw) if status == 200 else None
        if not tokens and (body.get("prompt") or body.get("messages")):
            # An empty list: it has the endpoint, and did not read this kind of prompt.
            tokens = None
        if tokens is not None:
            self._note_tokenize(member, True)
        return EngineTokens(tokens, status)


class EngineTokens(NamedTuple):
    """An engine's response to ``POST /tokenize``.

    ``ids``: None where it has no tokens of the prompt. ``status``: None without a response.
    """

    ids: list[int] | None
    status: int | None


def _token_ids(raw: bytes) -> list[int] | None:
    """The token ids in the body of a response to ``POST /tokenize``; None where it has none."""
    try:
        answer = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(type(t) is int and t >= 0 for t in tokens):
        return None
    return tokens


def _is_new_process(member: Member, facts: EngineFacts) -> bool:
    """Whether another process responds than before. An id that was not read before, as at a late
    first contact, is no restart."""
    known = member.facts.engine_id
    return member.gone or (known is not None and facts.engine_id != known)


def _complete_facts(member: Member, facts: EngineFacts) -> EngineFacts:
    """The facts with what is known of the same process: a reading that failed does not lose it."""
    if member.gone or facts.engine_id not in (None, member.facts.engine_id):
        return facts
    known = replace(member.facts, adapters=()) if facts.models else member.facts
    return facts.or_else(known)


def _with_pairs(worker: Worker, pairs: bool | None) -> Worker:
    """The worker, whose events have pairs of tokens or not; None: unknown."""
    runtime = worker.runtime_config
    if pairs is None or runtime.enable_eagle is pairs:
        return worker
    return replace(worker, runtime_config=replace(runtime, enable_eagle=pairs))


def _in_doubt(member: Member) -> bool:
    """Whether only probes without an answer or failed requests speak against the member."""
    return member.doubt if member.problem is not None else member.ejection.state != "in"


def _unregistered_row(member: Member) -> WorkerRow:
    spec = member.spec
    return WorkerRow(
        name=spec.name,
        worker_id=spec.worker_id,
        model=spec.model or "",
        role=spec.role.value if spec.role else "",
        endpoint=spec.url,
        status=UNREACHED,
        reason=member.problem,
        domains=dict(spec.domains),
        runtime_config=_specified_config(spec),
    )


def _without_estimate(rank: RankRow) -> RankRow:
    """A rank whose cache is estimated from prompts that the router cannot read: unknown, not empty.

    Prompts of token ids need no tokenizer: an estimate that has blocks of them stays.
    """
    if rank.index != "estimated" or rank.cached_blocks:
        return rank
    return msgspec.structs.replace(rank, index="absent")


def _specified_config(spec: WorkerSpec) -> dict[str, Any]:
    """What the spec has of the card of an engine that was not reached yet."""
    taints = [canonical_taint(domain, value) for domain, value in spec.domains.items()]
    return {"taints": [*taints, *spec.taints]} if taints or spec.taints else {}

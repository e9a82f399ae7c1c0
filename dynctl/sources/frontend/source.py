"""Dynctl frontends as a source: one, or all replicas of one service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UnsetType

from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.base.naming import resolve_worker
from dynctl.documents.config import ConfigDocument
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.route_result import RouteResult
from dynctl.documents.thresholds import Thresholds, ThresholdValues
from dynctl.documents.workers import CordonChange, WorkerChange, WorkerRow
from dynctl.sources.client import AmbiguousDecision, FrontendClient
from dynctl.sources.query import RouteQuery

if TYPE_CHECKING:
    from dynctl.sources.thresholds.replicas import Replica
    from dynctl.wire.dynamo.frontend_metrics import Lengths

_Answer = TypeVar("_Answer")


def substitutes(worker: WorkerRow, rows: Iterable[WorkerRow]) -> list[WorkerRow]:
    """The other ready workers of its model and role, in its first domain where it has one."""
    place = next(iter(worker.domains.items()), None)
    return [
        row
        for row in rows
        if (row.role, row.model) == (worker.role, worker.model)
        and (place is None or row.domains.get(place[0]) == place[1])
        and row.worker_id != worker.worker_id
        and row.status == "ready"
    ]


class FrontendSource:
    """Reads from the first frontend that can be reached; sets thresholds on all of them.

    ``timeout``: seconds for each response.
    """

    def __init__(
        self, urls: Sequence[str], token: str | None = None, timeout: float = 10.0
    ) -> None:
        self.clients = [FrontendClient(url, token, timeout) for url in urls]
        self.title = ", ".join(client.title for client in self.clients)
        self.doubts: tuple[str, ...] = ()
        self.other_routers: list[ReplicaRow] | None = None

    def route(self, query: RouteQuery) -> RouteResult:
        if query.assignments:
            return self._first(lambda client: _what_if(client, query))
        return self._first(lambda client: client.route(query))

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        answer = self._first(lambda client: client.workers_and_replicas())
        self.other_routers = None if isinstance(answer.replicas, UnsetType) else answer.replicas
        return answer.workers

    def thresholds(self) -> dict[str, Thresholds]:
        return self._first(lambda client: client.thresholds())

    def set_thresholds(self, model: str, values: ThresholdValues) -> Thresholds:
        from dynctl.sources.thresholds.replicas import set_on_all

        return set_on_all(self.clients, model, values)

    @contextmanager
    def replicas(self) -> Iterator[list[Replica]]:
        """Each address, with a dynctl or a Dynamo frontend behind it."""
        from dynctl.sources.dynamo.replicas import replica_at
        from dynctl.sources.thresholds.replicas import at_once

        yield at_once(replica_at, self.clients)

    def judged(self, model: str, values: ThresholdValues) -> list[WorkerRow]:
        from dynctl.sources.thresholds.effects import judged_rows

        return self._first(
            lambda client: judged_rows(
                client.workers(), model, client.thresholds().get(model, {}), values
            )
        )

    def lengths(self) -> dict[str, Lengths]:
        """Those of all replicas that respond."""
        from dynctl.wire.dynamo.frontend_metrics import read_lengths

        bodies, problem = [], None
        for client in self.clients:
            try:
                bodies.append(client.send("GET", "/metrics").content)
            except Unreachable as error:
                problem = error
        if problem is not None and not bodies:
            raise problem
        return read_lengths(bodies)

    def cordon(self, worker: str, *, cordoned: bool, dry_run: bool = False) -> CordonChange:
        """Take a worker out of routing on every frontend, or put it back; ``worker``: a name or
        id, or its unique end. Where one frontend fails, the others are set back."""
        known = {
            row.worker_id: row for client in reversed(self.clients) for row in client.workers()
        }
        wanted = resolve_worker(worker, [(row.worker_id, row.name) for row in known.values()])
        row = known[wanted]
        if not dry_run:
            self._cordon_all(row.name, cordoned)
        same = substitutes(row, known.values())
        return CordonChange(
            self.title,
            row.name,
            row.worker_id,
            row.role,
            cordoned,
            row.cordoned,
            not dry_run,
            self.running(row.name),
            len(same),
            row.domains,
            [client.url for client in self.clients],
        )

    def running(self, worker: str, *, cordoned: bool = False) -> int:
        """Requests on a worker that the frontends count now.

        ``cordoned``: raises Unreachable where a frontend gives it requests again, as after a
        restart, which forgets cordons and requests.
        """
        answers = [client.workers_and_replicas() for client in self.clients]
        for client, answer in zip(self.clients, answers, strict=True):
            rows = [row for row in answer.workers if row.name == worker and row.gets_requests]
            if cordoned and rows:
                raise Unreachable(
                    f"{client.url}: {worker} is not cordoned any more; the frontend restarted, or "
                    "the worker was uncordoned",
                    f"dynctl workers drain {worker} begins again",
                )
        shared = any(not isinstance(answer.replicas, UnsetType) for answer in answers)
        return _running([answer.workers for answer in answers], worker, shared=shared)

    def add(self, body: Mapping[str, Any], *, dry_run: bool = False) -> WorkerChange:
        """Register a worker on every frontend; ``body`` as of ``POST /v1/workers``, with its name.
        Where one frontend fails, those before it remove a worker that they did not have."""
        name = str(body["name"])
        known = [{row.name: row for row in client.workers()} for client in self.clients]
        _expect_new_engine(name, str(body["url"]), known)
        row = next((rows[name] for rows in known if name in rows), None)
        done: list[FrontendClient] = []
        for client, rows in zip(self.clients, known, strict=True):
            if dry_run:
                break
            try:
                added = client.add_worker(body)
            except DynctlError:
                for other in done:
                    with suppress(DynctlError):
                        other.remove_worker(name)
                raise
            row = row if client is not self.clients[0] else added
            if name not in rows:
                done.append(client)
        there = sum(name in rows for rows in known)
        return self._change(name, "replaced" if there else "added", row, applied=not dry_run)

    def remove(self, worker: str, *, dry_run: bool = False) -> WorkerChange:
        """Take a worker out of the fleet of every frontend that has it; ``worker``: a name or id,
        or its unique end. Its running requests go on. Raises UsageProblem, Unreachable."""
        known = [{row.worker_id: row for row in client.workers()} for client in self.clients]
        every = {key: row for rows in reversed(known) for key, row in rows.items()}
        wanted = resolve_worker(worker, [(row.worker_id, row.name) for row in every.values()])
        row = every[wanted]
        running = self.running(row.name)
        for client, rows in zip(self.clients, known, strict=True):
            if wanted in rows and not dry_run:
                client.remove_worker(row.name)
        change = self._change(row.name, "removed", row, applied=not dry_run)
        same = substitutes(row, every.values())
        return msgspec.structs.replace(change, running=running, same=len(same))

    def _change(
        self, name: str, change: str, row: WorkerRow | None, *, applied: bool
    ) -> WorkerChange:
        return WorkerChange(
            self.title,
            name,
            change,
            applied,
            None if row is None else row.worker_id,
            None if row is None else row.role,
            None if row is None else row.status,
            None if row is None else row.reason,
            domains={} if row is None else row.domains,
            frontends=[client.url for client in self.clients],
        )

    def _cordon_all(self, name: str, cordoned: bool) -> None:
        done: list[tuple[FrontendClient, bool]] = []
        for client in self.clients:
            try:
                before = next((r.cordoned for r in client.workers() if r.name == name), False)
                client.cordon(name, cordoned=cordoned)
            except DynctlError:
                for other, was in done:
                    with suppress(DynctlError):
                        other.cordon(name, cordoned=was)
                raise
            done.append((client, before))

    def config(self) -> ConfigDocument:
        return self._first(lambda client: client.config())

    def decision(self, decision_id: str | None) -> RouteResult:
        """Only the replica that made a decision keeps it."""
        if decision_id is None:
            return self._last_decision()
        results: dict[str, RouteResult] = {}
        problem: DynctlError | None = None
        ambiguous: AmbiguousDecision | None = None
        for client in self.clients:
            try:
                result = client.decision(decision_id)
            except Unreachable as error:
                problem = error
                continue
            except AmbiguousDecision as error:
                ambiguous = error
                continue
            except UsageProblem as error:
                # A replica without a response may have the decision.
                problem = problem or error
                continue
            if result.id == decision_id:
                return result
            results[result.id] = result
        if ambiguous is not None:
            raise ambiguous
        if len(results) > 1:
            ids = ", ".join(results)
            raise AmbiguousDecision(f"{decision_id!r} matches several decisions: {ids}")
        if results:
            return results.popitem()[1]
        raise problem if problem is not None else UsageProblem("no frontend is set")

    def recent_decisions(self, limit: int) -> list[RouteResult] | None:
        """Those of all replicas that respond, ``limit`` of each."""
        decisions: list[RouteResult] = []
        for client in self.clients:
            with suppress(Unreachable, UsageProblem):
                # A decision may be dropped from the memory after it was listed.
                rows = client.recent_decisions(limit)
                decisions += [client.decision(row.id) for row in rows]
        return decisions

    def _last_decision(self) -> RouteResult:
        rows = [
            (row.at, row.id, client)
            for client in self.clients
            for row in client.recent_decisions(1)
        ]
        if not rows:
            raise UsageProblem(
                f"{self.title} keeps no decisions yet",
                "send a request first; with --decision-memory 0 a frontend keeps none",
            )
        _, last, client = max(rows, key=lambda row: row[0])
        return client.decision(last)

    def save(self) -> bytes:
        return self._first(lambda client: client.save())

    def _first(self, read: Callable[[FrontendClient], _Answer]) -> _Answer:
        last: Unreachable | None = None
        for client in self.clients:
            try:
                return read(client)
            except Unreachable as error:
                last = error
        raise last if last is not None else Unreachable("no frontend is set")


def _expect_new_engine(name: str, url: str, fleets: Sequence[Mapping[str, WorkerRow]]) -> None:
    """Raise UsageProblem where another worker has the engine: as two it would count twice."""
    for row in (row for rows in fleets for row in rows.values()):
        if row.name != name and (row.endpoint or "").rstrip("/") == url.rstrip("/"):
            raise UsageProblem(
                f"{url} is the engine of worker {row.name}; a second worker would count it twice",
                f"add name={row.name} to replace that worker, or first: dynctl workers remove "
                f"{row.name}",
            )


def _running(answers: Sequence[Sequence[WorkerRow]], name: str, *, shared: bool) -> int:
    """``shared``: each frontend counts the requests of all of them."""
    counts = [
        sum(rank.active_requests for row in rows if row.name == name for rank in row.ranks)
        for rows in answers
    ]
    return max(counts, default=0) if shared else sum(counts)


def _what_if(client: FrontendClient, query: RouteQuery) -> RouteResult:
    """``--set`` is computed here, on the frontend's present state: a frontend has no what-if."""
    from dynctl.sources.dry_run import NoTokenizer
    from dynctl.sources.view import open_view_bytes

    saved = client.save()
    try:
        return open_view_bytes(saved, client.url, client.title, from_file=False).route(query)
    except NoTokenizer:
        # The frontend has no tokenizer either: for its own decisions it calls the same endpoint.
        ids = client.token_ids(query)
        if ids is None:
            raise
    known = replace(query, messages=None, prompt=None, token_ids=ids)
    return open_view_bytes(saved, client.url, client.title).route(known)

"""The events that `events tail` shows, and the live deployment that they come from."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dynctl.adapters.dynamo.planes import backend, namespace, open_planes
from dynctl.base.errors import UsageProblem
from dynctl.base.naming import resolve_worker
from dynctl.base.options import GlobalOptions
from dynctl.documents.events import LOAD_KINDS, TailKind, TailLine
from dynctl.documents.workers import WorkerRow
from dynctl.health.deployment import Deployment
from dynctl.sources.dynamo.event_stream import EventTail, Wanted, everyone
from dynctl.sources.query import Selector
from router_core import Worker

WAYS = """name where the workers are registered:
--discovery file --file-kv DIR                (or DYN_FILE_KV)
--discovery etcd --etcd-endpoints HOST:2379   (or ETCD_ENDPOINTS)
of dynctl's frontend, workers list has each worker's INDEX and CACHED"""


@dataclass(frozen=True, slots=True)
class TailQuery:
    """``workers``: as typed; empty: all. ``kinds``: empty: all."""

    workers: tuple[str, ...] = ()
    selector: Selector = field(default_factory=Selector)
    kinds: frozenset[str] = frozenset()
    load: bool = False

    @classmethod
    def parse(
        cls, workers: Iterable[str], selector: str, kinds: Iterable[str], *, load: bool
    ) -> TailQuery:
        """Raises UsageProblem naming the word. A kind of load line sets ``load``."""
        chosen = frozenset(kinds)
        known = [one.value for one in TailKind]
        for one in sorted(chosen.difference(known)):
            raise UsageProblem(f"--kind {one}: expected one of {', '.join(known)}")
        load = load or bool(chosen & LOAD_KINDS)
        return cls(tuple(workers), Selector.parse(selector), chosen, load)

    def wants(self, line: TailLine) -> bool:
        """Whether a line's kind is wanted; a line about skipped lines always is."""
        return not self.kinds or line.event in self.kinds or line.event == TailKind.SKIPPED

    def wanted(self, deployment: Deployment) -> Wanted:
        """Which workers are wanted; raises UsageProblem for an unknown worker."""
        if not self.workers and not self.selector.terms:
            return everyone
        known = [(item.worker.worker_id, item.worker.name) for item in deployment.workers]
        chosen = {resolve_worker(text, known) for text in self.workers}

        def wanted(worker: Worker | None) -> bool:
            if worker is None or (chosen and worker.worker_id not in chosen):
                return False
            return self.selector.matches(_row(worker))

        return wanted


def check_source(options: GlobalOptions) -> None:
    """Raise UsageProblem for every source but live planes: only they have events."""
    other = {
        "--demo": options.demo,
        "--view": options.view is not None,
        "--recording": options.recording is not None,
        "--frontend": bool(options.frontend) and not options.planes,
    }
    for flag, given in other.items():
        if given:
            raise UsageProblem(
                f"{flag} has no event plane; events tail follows a live Dynamo", WAYS
            )
    if backend(options) is None:
        raise UsageProblem(
            "events tail follows a live Dynamo, and no discovery backend is set", WAYS
        )


@asynccontextmanager
async def open_tail(
    options: GlobalOptions,
    query: TailQuery,
    emit: Callable[[TailLine], None],
    say: Callable[[str], None],
) -> AsyncIterator[EventTail]:
    """The tail of the planes that the options name. Raises Unreachable or UsageProblem."""
    check_source(options)
    planes = open_planes(options)

    def pass_on(line: TailLine) -> None:
        if query.wants(line):
            emit(line)

    tail = EventTail(
        planes.discovery,
        planes.plane_of,
        pass_on,
        say,
        now_ms,
        namespace=namespace(options),
        load=query.load,
    )
    try:
        async with tail:
            tail.wanted = query.wanted(tail.deployment)
            tail.follow()
            say(followed(tail, planes.title, namespace(options)))
            yield tail
    finally:
        await planes.close()


def followed(tail: EventTail, title: str, wanted: str | None) -> str:
    """What is followed, as a sentence for the user."""
    number = tail.publishers
    text = f"following {number:,} publisher{'' if number == 1 else 's'} of KV events"
    if tail.load_channels:
        text += f" and {tail.load_channels:,} channels of load"
    text += f": {title}, " + ("all namespaces" if wanted is None else f"namespace {wanted}")
    others = [name for name in tail.deployment.namespaces if name != wanted]
    if number:
        return text
    if not tail.deployment.workers and wanted is not None and others:
        return f"{text}; no worker yet; other namespaces: {', '.join(others)}"
    return f"{text}; waiting for the first one"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _row(worker: Worker) -> WorkerRow:
    return WorkerRow(
        name=worker.name,
        worker_id=worker.worker_id,
        model=worker.model,
        role=worker.role.value,
        domains=dict(worker.domains),
    )

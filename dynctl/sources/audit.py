"""`hits --predicted` and `decisions compare`: predictions against what happened, beside live
traffic."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Final

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.audit import AuditReport, add_by_worker, audit_report, since
from dynctl.documents.fleet_load import FleetLoad
from dynctl.sources.connect import connect
from dynctl.sources.dynamo.source import DynamoSource
from dynctl.sources.frontend.source import FrontendSource

#: How long a live Dynamo is followed unless specified, in seconds.
FOLLOWED_S: Final = 30.0


#: What is compared -> the command that does it.
_COMMANDS: Final = {"reuse": "dynctl hits --predicted", "choice": "dynctl decisions compare"}


def audit(
    options: GlobalOptions, compares: str, *, duration: float | None, log: str | None = None
) -> AuditReport:
    """Compare predictions with what happened. Raises UsageProblem, Unreachable or TimedOut.

    ``compares``: ``reuse`` (tokens that engines reused, of dynctl frontends) or ``choice`` (the
    worker that a Dynamo frontend chose, of a live Dynamo or `serve observe`). ``duration``: seconds
    to follow; None: what dynctl frontends counted since they started, and :data:`FOLLOWED_S` for a
    live Dynamo. ``log``: the log of a Dynamo frontend, or ``-``.
    """
    source = connect(options)
    if isinstance(source, DynamoSource):
        _expect(source.title, compares, "choice")
        seconds = FOLLOWED_S if duration is None else duration
        return asyncio.run(_follow_dynamo(options, source, seconds, log))
    if not isinstance(source, FrontendSource):
        raise UsageProblem(
            f"{source.title} routes no requests, so there is nothing to compare",
            "name a frontend: --frontend http://HOST:PORT, or a live Dynamo: --discovery etcd",
        )
    if log is not None:
        raise UsageProblem(
            f"--frontend-log {log}: a dynctl frontend does not need a log",
            "the log is for a live Dynamo: --discovery etcd --etcd-endpoints HOST:2379",
        )
    return _compare_frontends(source, compares, duration)


def _compare_frontends(
    source: FrontendSource, compares: str, duration: float | None
) -> AuditReport:
    """What dynctl frontends counted in ``duration`` seconds, None: since they started."""
    before: list[FleetLoad] = []
    if duration:
        before = [client.fleet() for client in source.clients]
        time.sleep(duration)
    now = [client.fleet() for client in source.clients]
    kinds = {fleet.compares for fleet in now}
    if len(kinds) > 1:
        raise UsageProblem(
            f"{source.title}: one of them serves requests, the other observes a Dynamo",
            "compare each of them alone",
        )
    (kind,) = kinds
    _expect(source.title, compares, kind)
    rows = []
    skipped = Counter[str]()
    for number, fleet in enumerate(now):
        # A frontend that restarted meanwhile counts from 0.
        old = before[number] if before and before[number].process == fleet.process else None
        rows += fleet.audit if old is None else since(fleet.audit, old.audit)
        skipped.update(fleet.skipped)
        skipped.subtract({} if old is None else old.skipped)
    return audit_report(
        source.title,
        kind,
        add_by_worker(rows),
        skipped={reason: count for reason, count in skipped.items() if count > 0},
        seconds=duration or None,
    )


def _expect(title: str, compares: str, actual: str) -> None:
    if compares != actual:
        what = "tokens that engines reuse" if actual == "reuse" else "choices of Dynamo's frontends"
        raise UsageProblem(f"{title}: it compares {what}", f"use: {_COMMANDS[actual]}")


async def _follow_dynamo(
    options: GlobalOptions, source: DynamoSource, seconds: float, log: str | None
) -> AuditReport:
    from dynctl.adapters.dynamo.planes import namespace, open_planes
    from dynctl.base.tasks import Supervisor
    from dynctl.serving.dynamo.choice_audit import ChoiceAudit
    from dynctl.serving.dynamo.observer import Observer, live_router
    from dynctl.sources.dynamo.log_tail import LogTail
    from dynctl.sources.dynamo.router_state import take_settings
    from dynctl.wire.dynamo.frontend_log import read_line

    router = live_router()
    judge = ChoiceAudit(router)

    def take_line(text: str) -> None:
        read = read_line(text)
        if read is not None:
            judge.take_line(read)

    tail = None if log is None else LogTail(log, take_line)
    planes = open_planes(options)
    observer = Observer(
        planes, router, namespace=namespace(options), on_sequence=judge.take_sequence
    )
    tasks = Supervisor()
    try:
        async with observer:
            if not observer.deployment.workers:
                raise UsageProblem(
                    f"{planes.title}: no worker is registered",
                    "dynctl check shows what is registered, and in which namespaces",
                )
            if not observer.deployment.sequences:
                raise UsageProblem(
                    f"{planes.title}: no frontend publishes its choices",
                    "start the frontends with --router-mode kv --router-replica-sync",
                )
            take_settings(observer, {}, [])
            if tail is not None:
                tasks.start("frontend log", tail.run)
            await asyncio.sleep(seconds)
    finally:
        await tasks.close()
        if tail is not None:
            tail.read()
            tail.close()
    title, skipped = planes.title, dict(judge.skipped)
    return audit_report(title, "choice", judge.rows(), skipped=skipped, seconds=seconds)

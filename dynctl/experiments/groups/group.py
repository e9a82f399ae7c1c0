"""What every group of `dynctl test` is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from dynctl.base.quantities import plural
from dynctl.experiments.canary import CanaryClient, Chat, Reply
from dynctl.experiments.changes import FleetChanges
from dynctl.experiments.operator import FleetFacts, Operator
from dynctl.experiments.prompts import Prompts
from dynctl.findings.runner import Check, Skipped
from dynctl.wire.prometheus_text import read_samples

Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tested. ``model``: the name that requests have, ``row`` its row of /v1/models.

    ``rows``: all rows, ``listed``: how the server answered for them. ``names_workers``: a reply
    names the workers that the router chose, if it is asked to. ``shows_decisions``: so
    do the decisions that were read with it. ``count``: prompt tokens of the turns of a chat by a
    tokenizer of the user's, None without one. ``fleet``: what the server shows of its workers,
    None where it does not.
    """

    model: str
    listed: Reply
    rows: Sequence[Mapping[str, Any]] = ()
    names_workers: bool = False
    shows_decisions: bool = False
    count: Callable[[tuple[str, ...]], int] | None = None
    fleet: FleetFacts | None = None

    @property
    def row(self) -> Mapping[str, Any]:
        return next((row for row in self.rows if row.get("id") == self.model), {})

    @property
    def context(self) -> int | None:
        """The most tokens of a prompt and its answer; None: the server does not report it."""
        context = self.row.get("max_model_len")
        return context if isinstance(context, int) and context > 0 else None


@dataclass(frozen=True, slots=True)
class Bench:
    """What a group works with.

    ``settle_s``: seconds from a request to the next that must find its blocks: an index learns of
    them from events, which take some 100 ms. ``pause``: waits so many seconds. ``operator``: what
    the fleet shows beside the replies. ``changes``: those that the user
    allows, and what an earlier test left.
    """

    client: CanaryClient
    prompts: Prompts
    subject: Subject
    settle_s: float
    pause: Callable[[float], Awaitable[None]]
    operator: Operator
    changes: FleetChanges

    def chat(self, *turns: str, **fields: Any) -> Chat:
        """A canary of one generated token to the model, which asks for the names of workers."""
        subject = self.subject
        return Chat(subject.model, turns, fields=fields, workers=subject.names_workers)

    def chat_at(self, worker_id: int, *turns: str) -> Chat:
        """Such a canary that asks for one worker."""
        controls = {"extra_fields": ["worker_id"], "decode_worker_id": worker_id}
        return self.chat(*turns, nvext=controls)


NO_NAMES: Final = Skipped(
    "replies do not name workers: nvext worker_id of a dynctl or Dynamo frontend"
)
NO_CHANGES: Final = Skipped("changes the frontend for some seconds: --allow-changes")
SHARED: Final = Skipped("other requests run in this fleet: their load may decide")
REFUSED: Final = frozenset({503, 529})
"""Statuses of a request whose workers are all busy."""
_STEP_S: Final = 0.1


_RUNNING: Final = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "dynamo_frontend_inflight_requests",
)
"""Gauges of running requests; the first that a server has is read."""


@dataclass(frozen=True, slots=True)
class TrialGroup(Generic[Facts]):
    """``word``: of --only. ``requests`` and ``generated``: the most that it sends and generates."""

    word: str
    section: str
    requests: int
    generated: int
    gather: Callable[[Bench], Awaitable[Facts]]
    checks: Sequence[Check[Facts]] = field(default_factory=tuple)


def refusal(replies: Sequence[Reply]) -> Skipped | None:
    """Why a check cannot be judged: the first error among ``replies``; None if all answered."""
    failed = [reply for reply in replies if not reply.answered]
    if not failed:
        return None
    return Skipped(f"{len(failed)} of {len(replies)} requests failed: {failed[0]}", unread=True)


def served_by(replies: Sequence[Reply]) -> str:
    """The number of workers that the replies name, for the message of a check."""
    workers = {worker for r in replies for worker in (r.prefill, r.decode) if worker is not None}
    return f", by {plural(len(workers), 'worker')}" if workers else ", workers not named"


async def running_requests(client: CanaryClient) -> tuple[str, float]:
    """The gauge of running requests that the server has, and its sum; empty and 0 without one."""
    return await first_metric(client, _RUNNING)


async def count_running(bench: Bench) -> float | None:
    """The requests that run now, by the workers' rows, else by the server's gauge; None where both
    are unknown."""
    fleet = None
    if bench.subject.fleet is not None:
        fleet = await bench.operator.fleet(bench.subject.model)
    if fleet is not None:
        return fleet.active_requests
    gauge, running = await running_requests(bench.client)
    return running if gauge else None


async def changeable_fleet(bench: Bench) -> FleetFacts | Skipped:
    """The workers of the model; or why none of them can be changed for a test."""
    if not bench.changes.allowed:
        return NO_CHANGES
    if not bench.subject.names_workers:
        return NO_NAMES
    fleet = await bench.operator.fleet(bench.subject.model)
    return bench.operator.unreadable("the workers are unknown") if fleet is None else fleet


async def is_shared(bench: Bench, own: int) -> bool:
    """Whether more requests run than the test's ``own``; False where that is unknown.

    Read twice: a request that just ended may still be counted.
    """
    for _ in range(2):
        if (await count_running(bench) or 0.0) <= own:
            return False
        await bench.pause(_STEP_S)
    return True


async def first_metric(client: CanaryClient, names: Sequence[str]) -> tuple[str, float]:
    """The first of these metrics that the server has, and its sum; empty and 0 without one."""
    text = await client.metrics()
    if text is None:
        return "", 0.0
    data = text.encode()
    samples = list(read_samples(data, frozenset(names), max_bytes=len(data), strict=False))
    for name in names:
        values = [float(sample.value) for sample in samples if sample.name == name]
        if values:
            return name, sum(values)
    return "", 0.0

"""Group "restart": nothing is lost, the worker returns, and the router knows its new cache.

The command is the user's: it may restart a process, a container or a pod, and may end before the
worker serves again. A worker that returns under another id, as those of Dynamo do, is known by its
role.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dynctl.base.errors import DynctlError
from dynctl.documents.workers import CORDONED, WorkerRow
from dynctl.experiments.canary import Reply
from dynctl.experiments.changes import RestartCommand
from dynctl.experiments.groups.change import NO_SPARE, drain, spare_worker
from dynctl.experiments.groups.group import Bench, TrialGroup, changeable_fleet
from dynctl.experiments.operator import FleetFacts
from dynctl.findings.runner import Check, Outcome, Passed, Skipped, Wrong, found
from router_core import Role

_PROMPTS: Final = 6
_WORDS: Final = 200
_SHORT: Final = 24
_STEP_S: Final = 0.25
_PACE: Final = 3.0
_MOST_PACED: Final = 32
"""Requests at this pace in an hour, the longest test."""
_MOST_REQUESTS: Final = 2 * (_PROMPTS + _MOST_PACED + _PROMPTS)
_LEARNED_S: Final = 5.0
_RESERVED_S: Final = 10.0
_LEAST_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Belief:
    """Cached tokens of a prompt at the worker: as the router expected, and as the engine reused."""

    expected: int
    reused: int

    @property
    def right(self) -> bool:
        low, high = sorted((self.expected, self.reused))
        return low >= _LEAST_SHARE * high


@dataclass(slots=True)
class RestartedWorker:
    """What happened when ``worker`` was restarted.

    ``replies``: to requests for any worker, from the command's start until it was back.
    ``waited_s``: from then to its return, if it is ``back``. ``gone``: it was seen without service,
    or returned under another id. ``old``: of prompts from before, one after the other until one is
    right; ``new``: of a prompt that it computed since, again and again. Both are empty where they
    cannot be known: ``unknown`` says why. ``learned_s``: from its return until both are right,
    None: not within 5 s.
    """

    worker: WorkerRow
    replies: list[Reply] = field(default_factory=list)
    waited_s: float = 0.0
    back: bool = False
    gone: bool = False
    old: list[Belief] = field(default_factory=list)
    new: list[Belief] = field(default_factory=list)
    unknown: str = ""
    learned_s: float | None = None

    @property
    def proven(self) -> bool:
        """Whether it did restart: it was away, or has lost its cache."""
        return self.gone or any(not belief.reused for belief in self.old)

    @property
    def is_known_again(self) -> bool:
        """Whether the router was right about the last prompt of both kinds."""
        lasts = [*self.old[-1:], *self.new[-1:]]
        return len(lasts) == 2 and all(belief.right for belief in lasts)


async def _gather(bench: Bench) -> RestartedWorker | Skipped:
    command = bench.changes.restart
    if command is None:
        return Skipped("restarts a worker: --allow-changes and --restart COMMAND")
    fleet = await changeable_fleet(bench)
    if isinstance(fleet, Skipped):
        return fleet
    worker = spare_worker(fleet)
    if worker is None:
        return NO_SPARE
    budget = bench.client.budget
    if budget.requests - budget.sent < _MOST_REQUESTS:
        return Skipped(f"it may take {_MOST_REQUESTS} requests; raise --budget", unread=True)
    try:
        return await _Restart(bench, fleet, worker).run(command)
    except DynctlError as error:
        return Skipped(f"worker {worker.name} is not restarted: {error.message}", unread=True)


class _Restart:
    """The restart of one worker. ``fleet``: the workers before it."""

    def __init__(self, bench: Bench, fleet: FleetFacts, worker: WorkerRow) -> None:
        self._bench = bench
        self._facts = RestartedWorker(worker)
        self._others = {row.worker_id for row in fleet.workers} - {worker.worker_id}
        self._ends_at = bench.client.budget.ends_at - _RESERVED_S
        self._began = self._next_request = self._next_try = time.monotonic()

    async def run(self, command: RestartCommand) -> RestartedWorker | Skipped:
        """Restart it. Raises DynctlError where nothing was done."""
        bench, facts = self._bench, self._facts
        command.of(facts.worker)  # before anything is changed
        texts = [bench.prompts.fresh(_WORDS) for _ in range(_PROMPTS)]
        await self._prime(texts)
        async with bench.changes.cordoned(facts.worker):
            drained_s, running = await drain(bench, facts.worker)
            if drained_s is None:
                return Skipped(f"{running} requests run on {facts.worker.name} still", unread=True)
            problem = await self._while_running(command)
        if problem:
            return Skipped(f"--restart {command}: {problem}", unread=True)
        returned = await self._returned(texts[0])
        facts.waited_s = time.monotonic() - self._began
        facts.back = returned is not None
        if returned is not None and not facts.unknown:
            await self._learn(returned, texts[1:])
        return facts

    async def _prime(self, texts: Sequence[str]) -> None:
        """Fill its cache, and see whether reuse there is known."""
        bench, facts = self._bench, self._facts
        worker = facts.worker
        if worker.role != Role.AGGREGATED:
            facts.unknown = "a decode worker is not chosen by its cache"
        chats = [bench.chat_at(worker.worker_id, text) for text in texts]
        await bench.client.chats(*chats)
        await bench.pause(bench.settle_s)
        replies = await bench.client.chats(*chats)
        if not all(reply.decode == worker.worker_id for reply in replies):
            facts.unknown = f"prompts for {worker.name} went elsewhere: {replies[0]}"
        elif not all(reply.cached_tokens for reply in replies):
            # Some engines leave out a count of 0, so that it must be known that they count.
            facts.unknown = f"{worker.name} reported no reuse before the restart (DYE0401)"

    async def _while_running(self, command: RestartCommand) -> str:
        """Run the command beside requests; why it failed, empty if it did not."""
        self._began = time.monotonic()
        left = self._ends_at - self._began
        running = asyncio.create_task(command.run(self._facts.worker, left))
        try:
            while not running.done():
                await self._look()
        finally:
            running.cancel()
            await asyncio.wait([running])
        return running.result()

    async def _look(self) -> list[WorkerRow]:
        """Read the workers, and note whether it is away; those that may be the restarted one.
        Sometimes a request is sent."""
        bench, facts = self._bench, self._facts
        if time.monotonic() >= self._next_request:
            facts.replies.append(await bench.client.chat(bench.chat(bench.prompts.fresh(_SHORT))))
            self._next_request = self._later()
        fleet = await bench.operator.fleet(bench.subject.model)
        await bench.pause(_STEP_S)
        if fleet is None:
            return []
        row = fleet.worker(facts.worker.worker_id)
        if row is None or row.reason not in (None, CORDONED):
            facts.gone = True
        return [
            row
            for row in fleet.answering()
            if row.worker_id not in self._others
            and row.role == facts.worker.role
            and row.status == "ready"
        ]

    def _later(self) -> float:
        """When the next request is due: the more time has passed, the later."""
        now = time.monotonic()
        return now + max(_STEP_S, (now - self._began) / _PACE)

    async def _returned(self, text: str) -> WorkerRow | None:
        """The restarted worker, when it has answered a prompt; None: not in the time of the test.

        A router may still count it as ready when it is away, which the prompt shows.
        """
        facts = self._facts
        while time.monotonic() < self._ends_at:
            rows = await self._look()
            if time.monotonic() < self._next_try:
                continue
            for row in rows:
                reply = await self._ask(row, text)
                if reply.answered and reply.decode == row.worker_id:
                    facts.gone = facts.gone or row.worker_id != facts.worker.worker_id
                    await self._note(reply, facts.old)
                    return row
                facts.gone = True
            if rows:
                self._next_try = self._later()
        return None

    async def _learn(self, worker: WorkerRow, texts: Sequence[str]) -> None:
        """Compare old prompts until the router is right about one, and then a new one."""
        facts = self._facts
        started = time.monotonic()
        for text in texts:
            if facts.unknown or facts.old[-1].right:
                break
            await self._bench.pause(_LEARNED_S / _PROMPTS)
            await self._note(await self._ask(worker, text), facts.old)
        await self._learn_new(worker)
        if facts.is_known_again:
            facts.learned_s = time.monotonic() - started

    async def _learn_new(self, worker: WorkerRow) -> None:
        """Compare a prompt that the worker has computed since its return, until it is reused."""
        facts, text = self._facts, self._bench.prompts.fresh(_WORDS)
        await self._ask(worker, text)
        for _ in range(_PROMPTS):
            await self._bench.pause(self._bench.settle_s)
            await self._note(await self._ask(worker, text), facts.new)
            if facts.unknown or (facts.new[-1].right and facts.new[-1].reused):
                break

    async def _ask(self, worker: WorkerRow, text: str) -> Reply:
        """A reply of the worker."""
        return await self._bench.client.chat(self._bench.chat_at(worker.worker_id, text))

    async def _note(self, reply: Reply, beliefs: list[Belief]) -> None:
        expectation = await self._bench.client.expectation(reply)
        if expectation is None:
            self._facts.unknown = self._facts.unknown or "decisions cannot be read (--token-file)"
        elif expectation.tokens is None:
            self._facts.unknown = f"the router had no expectation: {expectation.unknown}"
        else:
            beliefs.append(Belief(expectation.tokens, reply.cached_tokens or 0))


def _loses_none(facts: RestartedWorker | Skipped) -> Outcome:
    if isinstance(facts, Skipped):
        return facts
    failed = [reply for reply in facts.replies if not reply.answered]
    if failed:
        seen = f"{len(failed)} of {len(facts.replies)} requests failed: {failed[0]}"
        return Wrong((found(facts.worker.name, seen=seen),))
    return Passed(f"{len(facts.replies)} requests in {facts.waited_s:.1f} s")


def _returns(facts: RestartedWorker | Skipped) -> Outcome:
    if isinstance(facts, Skipped):
        return facts
    if not facts.back:
        return Wrong((found(facts.worker.name, seconds=f"{facts.waited_s:.0f}"),))
    if not facts.proven:
        return Skipped(
            f"nothing shows that {facts.worker.name} restarted: it was never seen without service",
            unread=True,
        )
    return Passed(f"{facts.worker.name}: after {facts.waited_s:.1f} s")


def _is_known_again(facts: RestartedWorker | Skipped) -> Outcome:
    if isinstance(facts, Skipped):
        return facts
    if not facts.back:
        return Skipped(f"{facts.worker.name} did not return")
    if facts.unknown:
        return Skipped(facts.unknown)
    if facts.learned_s is None:
        wrong = facts.old[-1] if not facts.old[-1].right else facts.new[-1]
        what = "a prompt from before the restart" if wrong is facts.old[-1] else "a new prompt"
        return Wrong(
            (
                found(
                    facts.worker.name,
                    prompt=what,
                    expected=f"{wrong.expected:,}",
                    reused=f"{wrong.reused:,}",
                ),
            )
        )
    return Passed(f"{facts.worker.name}: {facts.learned_s:.1f} s after its return")


RESTART: Final = TrialGroup(
    "restart",
    "restart",
    requests=_MOST_REQUESTS,
    generated=_MOST_REQUESTS,
    gather=_gather,
    checks=(
        Check("DYE1101", _loses_none),
        Check("DYE1102", _returns),
        Check("DYE1103", _is_known_again),
    ),
)

"""Run the groups of `dynctl test` one after the other, and report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import Any, Final, TypeVar

from dynctl.base.errors import DynctlError, Unreachable, UsageProblem
from dynctl.documents.trial import Spent, TrialReport
from dynctl.documents.workers import WorkerRow
from dynctl.experiments.canary import MOST_AT_ONCE, BudgetSpent, CanaryBudget, CanaryClient, Chat
from dynctl.experiments.changes import RestartCommand, opened_changes
from dynctl.experiments.groups.all import GROUPS, NOT_RESTARTED
from dynctl.experiments.groups.group import Bench, Subject, TrialGroup
from dynctl.experiments.groups.restart import RESTART
from dynctl.experiments.operator import Operator, served_workers
from dynctl.experiments.prompts import Prompts
from dynctl.findings.catalogue import all_codes
from dynctl.findings.report import Section, summarize
from dynctl.findings.runner import Check, Skipped, run
from dynctl.findings.suppression import NOTHING, Suppressions
from dynctl.sources.client import FrontendClient

Facts = TypeVar("Facts")
_GREETING: Final = "dynctl-test: hello"
_AGAIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """What to test. ``key`` is that of a client, ``token`` that of an operator.

    ``timeout``: seconds for each response, ``duration`` for the whole test, ``settle`` between a
    request and its repeat. ``only``: words of groups, all where it is empty. ``seed`` None:
    a random one. ``model_path``: a tokenizer directory with which counts of tokens are compared.
    ``changes``: allow those that the test puts back. ``restart``: restarts a worker, None: none is
    restarted. ``state``: the directory of their journal,
    None: the user's. ``wait``: seconds in which a test that does not pass is repeated.
    ``workers``: reads those of a frontend that does not show them, None: unknown.
    """

    url: str
    key: str | None = None
    token: str | None = None
    model: str | None = None
    only: tuple[str, ...] = ()
    requests: int = 200
    duration: float = 120.0
    timeout: float = 30.0
    settle: float = 0.5
    seed: int | None = None
    model_path: Path | None = None
    suppressed: Suppressions = NOTHING
    changes: bool = False
    restart: RestartCommand | None = None
    state: Path | None = None
    wait: float | None = None
    workers: Callable[[], Sequence[WorkerRow]] | None = None


def chosen_groups(only: Sequence[str]) -> list[TrialGroup[Any]]:
    """The groups with these words, all where there are none. Raises UsageProblem."""
    words = [group.word for group in GROUPS]
    unknown = [word for word in only if word not in words]
    if unknown:
        raise UsageProblem(f"--only {unknown[0]}: unknown group", f"groups: {', '.join(words)}")
    return [group for group in GROUPS if not only or group.word in only]


def _groups(wanted: TrialOptions) -> list[TrialGroup[Any]]:
    """The groups of a test: without a command, no worker is restarted. Raises UsageProblem."""
    groups = chosen_groups(wanted.only)
    if not wanted.only and wanted.restart is None:
        groups.remove(RESTART)
    return groups


def announcement(wanted: TrialOptions) -> str:
    """What the test sends at most, for a message before it starts."""
    groups = _groups(wanted)
    requests = min(wanted.requests, 1 + sum(group.requests for group in groups))
    generated = 1 + sum(group.generated for group in groups)
    changed = "nothing is changed"
    if wanted.changes:
        changed = "a threshold is set and a worker is cordoned for some seconds, then put back"
        if wanted.restart is not None and RESTART in groups:
            changed += f"; a worker is restarted: {wanted.restart}"
    again = (
        "" if wanted.wait is None else f", again and again for {wanted.wait:g} s until it passes"
    )
    return (
        f"test: at most {requests:,} requests and {generated:,} generated tokens in "
        f"{wanted.duration:g} s{again}, {MOST_AT_ONCE} at a time, to {wanted.url}; {changed}"
    )


class NoModelListed(UsageProblem):
    """The server lists no model, and none was specified."""


async def run_until_passed(
    wanted: TrialOptions, passed: Callable[[TrialReport], bool], say: Callable[[str], object] = str
) -> TrialReport:
    """Repeat the test until ``passed``, for the time of ``wanted.wait``; the last report.

    A server that does not answer, or lists no model, is tried again too. The last test may end
    after that time. Raises as :func:`run_trial`.
    """
    ends_at = time.monotonic() + (wanted.wait or 0.0)
    while True:
        try:
            report = await run_trial(wanted, say)
        except (Unreachable, NoModelListed):
            if time.monotonic() >= ends_at:
                raise
        else:
            if passed(report) or time.monotonic() >= ends_at:
                return report
        say("waiting for the server")
        await asyncio.sleep(_AGAIN_S)


async def run_trial(wanted: TrialOptions, say: Callable[[str], object] = str) -> TrialReport:
    """Test a server. ``say`` gets the section of each group when it begins.

    Raises Unreachable where the server does not answer, NoModelListed without a model.
    """
    groups = _groups(wanted)
    started = time.monotonic()
    seed = randbits(32) if wanted.seed is None else wanted.seed
    budget = CanaryBudget(
        wanted.requests, 1 + sum(group.generated for group in groups), started + wanted.duration
    )
    operator = Operator(FrontendClient(wanted.url, wanted.token, wanted.timeout))
    async with (
        CanaryClient(wanted.url, wanted.timeout, budget, wanted.key, wanted.token) as client,
        opened_changes(
            operator, allowed=wanted.changes, state=wanted.state, restart=wanted.restart
        ) as changes,
    ):
        subject = await _subject(client, operator, wanted)
        bench = Bench(
            client, Prompts(seed), subject, wanted.settle, asyncio.sleep, operator, changes
        )
        sections: list[Section] = []
        for group in groups:
            say(group.section)
            sections += await _section(group, bench, wanted.suppressed)
        if subject.fleet is not None and not wanted.only:
            await operator.report(summarize(sections), subject.model)
    seconds = time.monotonic() - started
    spent = Spent(budget.sent, budget.prompt_tokens, budget.generated, round(seconds, 2))
    return TrialReport(
        [f"{client.url}, model {subject.model}: {spent}", *changes.lines()],
        sections,
        summarize(sections),
        [] if RESTART in groups else [NOT_RESTARTED],
        spent=spent,
        model=subject.model,
        seed=seed,
        at=time.time(),
    )


async def _subject(client: CanaryClient, operator: Operator, wanted: TrialOptions) -> Subject:
    listed, rows = await client.models()
    if listed.status == 0:
        raise Unreachable(f"{client.url} does not answer: {listed.problem}", listed.hint)
    if listed.status in (401, 403):
        raise DynctlError(
            f"{client.url}/v1/models: {listed}",
            "set the variable with the API key: --api-key-env NAME",
        )
    model = wanted.model or next((str(row["id"]) for row in rows), None)
    if model is None:
        raise NoModelListed(
            f"{client.url}/v1/models lists no models: {listed}", "specify one: --model NAME"
        )
    # A server that does not know the field ignores or refuses it.
    reply = await client.chat(Chat(model, (_GREETING,), workers=True))
    names_workers = reply.decode is not None or reply.prefill is not None
    fleet = await operator.fleet(model)
    if fleet is None and wanted.workers is not None and names_workers:
        fleet = served_workers(await operator.call(wanted.workers), model)
    return Subject(
        model,
        listed,
        rows,
        names_workers=names_workers,
        shows_decisions=await client.decision(reply) is not None,
        count=_counter(wanted.model_path),
        fleet=fleet,
    )


def _counter(model_path: Path | None) -> Callable[[tuple[str, ...]], int] | None:
    """Counts the prompt tokens of a chat as the tokenizer in a directory makes them."""
    if model_path is None:
        return None
    from dynctl.tokenization.errors import TokenizerError
    from dynctl.tokenization.model import load_tokenizer

    try:
        tokenizer = load_tokenizer(model_path)
    except TokenizerError as error:
        raise UsageProblem(f"--model-path {model_path}: {error}") from None
    roles = ("user", "assistant")
    return lambda turns: len(
        tokenizer.encode_chat(
            [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]
        )
    )


async def _section(
    group: TrialGroup[Facts], bench: Bench, suppressed: Suppressions
) -> Sequence[Section]:
    """The section of a group. A budget that is spent before its end skips all its checks."""
    checks = group.checks
    facts: Any = None
    if all(suppressed.leaves_out(check.code) for check in checks):
        return run([(group.section, checks)], facts, all_codes(), suppressed=suppressed).sections
    try:
        facts = await group.gather(bench)
    except BudgetSpent as spent:
        text = f"{spent}, {group.word} may take {group.requests} requests; raise {spent.option}"
        reason = Skipped(text, unread=True)
        checks = [Check(check.code, lambda _: reason) for check in checks]
    return run([(group.section, checks)], facts, all_codes(), suppressed=suppressed).sections

"""Checks of KV events: channels, indexers, gaps, block hashes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.health.checks.planes import (
    count,
    entries_known,
    has_workers,
    nats_is_lost,
    planes_of,
    problems,
    reachable,
)
from dynctl.health.deployment import ProblemCode
from dynctl.health.facts import NATS, UNNUMBERED, CheckFacts, RankFacts

#: Why channels over NATS are not read.
NATS_LOST: Final = "NATS is not reachable (DYR0103)"


def _publishes_events(facts: CheckFacts) -> Skipped | None:
    """At least one rank has an event source."""
    return None if planes_of(facts).ranks else Skipped("no worker publishes KV events (DYR0301)")


def _channels_connect(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    with_channel = [rank for rank in planes.ranks if rank.channel is not None]
    if not with_channel:
        return Skipped("no worker registers a channel of KV events (DYR0301)")
    seconds = f"{planes.waited_s:g}"
    lost = [NATS_LOST] if nats_is_lost(facts) else []
    findings = [
        found(
            rank.name,
            address=rank.channel,
            why=rank.disconnected or "no connection",
            seconds=seconds,
        )
        for rank in with_channel
        if not rank.state.connected and not (lost and rank.channel == NATS)
    ]
    return outcome(findings, lost, count(len(with_channel), "channel"))


def _indexers_answer(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    queried = [rank for rank in planes.ranks if rank.indexer is not None]
    if not queried:
        return Skipped("no worker has a local indexer (DYR0304)")
    if all(rank.called_back is False for rank in queried):
        return Skipped("no worker calls back (DYR0104)", unread=True)
    findings = [
        found(rank.name, why=rank.refusal or "", seconds=f"{planes.query_timeout_s:g}")
        for rank in queried
        if rank.newest is None
    ]
    return outcome(findings, summary=f"{len(queried)} of {count(len(queried), 'rank')}")


def _has_indexer(facts: CheckFacts) -> Outcome:
    ranks = planes_of(facts).ranks
    return outcome([found(rank.name) for rank in ranks if rank.indexer is None])


def _events_are_contiguous(facts: CheckFacts) -> Outcome:
    findings: list[Found] = []
    unread: list[str] = []
    ranks = planes_of(facts).ranks
    for rank in ranks:
        why = _unknown_events(rank, facts)
        if why is not None:
            unread.append(why)
        elif rank.state.lost or rank.state.missing:
            findings.append(found(rank.name, why=rank.incomplete or _lost_events(rank)))
        elif not rank.current:
            waited = f"{planes_of(facts).waited_s:g}"
            unread.append(f"{rank.name}: not read completely within {waited} s (--wait)")
    events = sum(rank.state.last_seq or 0 for rank in ranks)
    healed = sum(rank.state.gaps for rank in ranks)
    summary = count(events, "event") + (f", {count(healed, 'gap')} healed" if healed else "")
    return outcome(findings, unread, summary, nothing=_no_events(ranks))


def _no_events(ranks: Sequence[RankFacts]) -> str:
    """That no rank has published an event yet; empty where one has."""
    there = any(rank.state.last_seq is not None or rank.state.batches for rank in ranks)
    return "" if there else "no worker has published a KV event: send a request during the check"


def _unknown_events(rank: RankFacts, facts: CheckFacts) -> str | None:
    """Why a rank's events are unknown; None where they are known. Another check reports this."""
    if rank.channel is None:
        return f"{rank.name} registers no channel (DYR0301)"
    if not rank.state.connected:
        return _why_disconnected(rank, facts)
    if rank.indexer is None:
        return f"{rank.name} has no indexer (DYR0304)"
    if rank.newest is None:
        return f"{rank.name} does not answer queries (DYR0303)"
    return None


def _lost_events(rank: RankFacts) -> str:
    return f"{count(max(rank.state.lost, rank.state.missing), 'event')} lost"


def _events_flow(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    findings: list[Found] = []
    unread: list[str] = []
    arrived = 0
    for rank in planes.ranks:
        seen = rank.state.last_seq
        why = _unknown_events(rank, facts)
        if why is not None:
            unread.append(why)
        elif rank.newest == UNNUMBERED:
            unread.append(f"{rank.name} does not report the number of its last event (Dynamo 1.0)")
        elif not rank.current or seen is None or rank.newest is None:
            unread.append(f"{rank.name} was not read completely (DYR0305)")
        elif rank.newest > seen:
            findings.append(
                found(
                    rank.name,
                    newest=f"{rank.newest:,}",
                    seen=f"{seen:,}",
                    seconds=f"{planes.listened_s:g}",
                )
            )
        arrived += rank.state.batches
    if not findings and not unread and not arrived:
        return Skipped(f"no KV events in {planes.listened_s:g} s: send a request during the check")
    summary = f"{arrived:,} message{'' if arrived == 1 else 's'} in {planes.listened_s:g} s"
    return outcome(findings, unread, summary)


def _own_channel(facts: CheckFacts) -> Outcome:
    ranks = planes_of(facts).ranks
    unread = [_why_disconnected(rank, facts) for rank in ranks if not rank.state.connected]
    return outcome([found(r.name, why=r.foreign) for r in ranks if r.foreign], unread)


def _events_are_readable(facts: CheckFacts) -> Outcome:
    findings: list[Found] = []
    ranks = planes_of(facts).ranks
    for rank in ranks:
        state = rank.state
        if state.malformed or state.unknown_events:
            bad, odd = count(state.malformed, "message"), count(state.unknown_events, "event")
            example = f": {rank.unreadable}" if rank.unreadable else ""
            why = f"{bad} unreadable, {odd} of an unknown kind{example}"
            findings.append(found(rank.name, why=why))
    unread = [_why_disconnected(rank, facts) for rank in ranks if not rank.state.connected]
    return outcome(findings, unread, nothing=_no_events(ranks))


def _why_disconnected(rank: RankFacts, facts: CheckFacts) -> str:
    if rank.channel is None:
        return f"{rank.name} registers no channel (DYR0301)"
    if rank.channel == NATS and nats_is_lost(facts):
        return NATS_LOST
    return f"{rank.name} is not connected (DYR0302)"


def _names_agree(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    findings = [
        found(rank.name, blocks=f"{rank.own_names:,}") for rank in planes.ranks if rank.own_names
    ]
    if findings:
        return outcome(findings)
    if len(planes.ranks) < 2:
        return Skipped("only one rank publishes events: no other rank to compare it with")
    unread = [why for rank in planes.ranks if (why := _unknown_events(rank, facts)) is not None]
    if not planes.comparable and not unread:
        return Skipped("no two workers cache the same block: send one prompt to both, then check")
    return outcome((), unread)


_SOURCES: Final = (entries_known, has_workers, _publishes_events)
_EVENTS: Final = (*_SOURCES, reachable)

EVENT_CHECKS: Final[Sequence[Check[CheckFacts]]] = (
    Check("DYR0301", problems(ProblemCode.EVENTS_MISSING), (entries_known, has_workers)),
    Check("DYR0302", _channels_connect, _EVENTS),
    Check("DYR0303", _indexers_answer, _EVENTS),
    Check("DYR0304", _has_indexer, _SOURCES),
    Check("DYR0305", _events_are_contiguous, _EVENTS),
    Check("DYR0306", _events_flow, _EVENTS),
    Check("DYR0307", _own_channel, _EVENTS),
    Check("DYR0308", _events_are_readable, _EVENTS),
    Check("DYR0309", _names_agree, _EVENTS),
)

"""Checks of what routers believe about caches: channels, indexers, holes, names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.health.checks.planes import (
    count,
    discovered,
    listed,
    planes_of,
    populated,
    reachable,
)
from dynctl.health.deployment import ProblemCode
from dynctl.health.facts import CheckFacts, RankFacts


def _published(facts: CheckFacts) -> Skipped | None:
    """Some rank has an event source."""
    return None if planes_of(facts).ranks else Skipped("no worker publishes KV events (DYR0301)")


def _connected(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    heard = [rank for rank in planes.ranks if rank.channel is not None]
    if not heard:
        return Skipped("no worker announces a channel of KV events (DYR0301)")
    seconds = f"{planes.waited_s:g}"
    findings = [
        found(
            rank.name,
            address=rank.channel,
            why=rank.disconnected or "does not connect",
            seconds=seconds,
        )
        for rank in heard
        if not rank.state.connected
    ]
    return outcome(findings, summary=count(len(heard), "channel"))


def _indexers(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    asked = [rank for rank in planes.ranks if rank.indexer is not None]
    if not asked:
        return Skipped("no worker has a local indexer (DYR0304)")
    if all(rank.called_back is False for rank in asked):
        return Skipped("no worker calls back (DYR0104)", unread=True)
    findings = [
        found(rank.name, why=rank.refusal or "", seconds=f"{planes.asked_s:g}")
        for rank in asked
        if rank.newest is None
    ]
    return outcome(findings, summary=f"{len(asked)} of {count(len(asked), 'rank')}")


def _has_indexer(facts: CheckFacts) -> Outcome:
    ranks = planes_of(facts).ranks
    return outcome([found(rank.name) for rank in ranks if rank.indexer is None])


def _contiguous(facts: CheckFacts) -> Outcome:
    findings: list[Found] = []
    unread: list[str] = []
    ranks = planes_of(facts).ranks
    for rank in ranks:
        why = _unheard(rank)
        if why is not None:
            unread.append(why)
        elif rank.state.lost or rank.state.missing:
            findings.append(found(rank.name, why=rank.incomplete or _lost(rank)))
        elif not rank.current:
            waited = f"{planes_of(facts).waited_s:g}"
            unread.append(f"{rank.name}: not read to the end within {waited} s (--wait)")
    events = sum(rank.state.last_seq or 0 for rank in ranks)
    healed = sum(rank.state.gaps for rank in ranks)
    says = count(events, "event") + (f", {count(healed, 'gap')} healed" if healed else "")
    return outcome(findings, unread, says)


def _unheard(rank: RankFacts) -> str | None:
    """Why nothing can be said of a rank's events that another check does not say."""
    if rank.channel is None:
        return f"{rank.name} announces no channel (DYR0301)"
    if not rank.state.connected:
        return f"{rank.name} cannot be heard (DYR0302)"
    if rank.indexer is None:
        return f"{rank.name} has no indexer (DYR0304)"
    if rank.newest is None:
        return f"{rank.name} cannot be asked (DYR0303)"
    return None


def _lost(rank: RankFacts) -> str:
    return f"{count(max(rank.state.lost, rank.state.missing), 'event')} lost"


def _flowing(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    findings: list[Found] = []
    unread: list[str] = []
    arrived = 0
    for rank in planes.ranks:
        seen = rank.state.last_seq
        why = _unheard(rank)
        if why is not None:
            unread.append(why)
        elif not rank.current or seen is None or rank.newest is None:
            unread.append(f"{rank.name} was not read to the end (DYR0305)")
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
        return Skipped(
            f"nobody published anything in {planes.listened_s:g} s: send a request meanwhile"
        )
    says = f"{arrived:,} message{'' if arrived == 1 else 's'} in {planes.listened_s:g} s"
    return outcome(findings, unread, says)


def _own_channel(facts: CheckFacts) -> Outcome:
    ranks = planes_of(facts).ranks
    unread = [_deaf(rank) for rank in ranks if not rank.state.connected]
    return outcome([found(r.name, why=r.foreign) for r in ranks if r.foreign], unread)


def _understood(facts: CheckFacts) -> Outcome:
    findings: list[Found] = []
    ranks = planes_of(facts).ranks
    for rank in ranks:
        state = rank.state
        if state.malformed or state.unknown_events:
            bad, odd = count(state.malformed, "message"), count(state.unknown_events, "event")
            told = f": {rank.strange}" if rank.strange else ""
            why = f"{bad} unreadable, {odd} of an unknown kind{told}"
            findings.append(found(rank.name, why=why))
    return outcome(findings, [_deaf(rank) for rank in ranks if not rank.state.connected])


def _deaf(rank: RankFacts) -> str:
    if rank.channel is None:
        return f"{rank.name} announces no channel (DYR0301)"
    return f"{rank.name} cannot be heard (DYR0302)"


def _names_agree(facts: CheckFacts) -> Outcome:
    planes = planes_of(facts)
    findings = [
        found(rank.name, blocks=f"{rank.own_names:,}") for rank in planes.ranks if rank.own_names
    ]
    if findings:
        return outcome(findings)
    if len(planes.ranks) < 2:
        return Skipped("only one rank publishes events: there is nobody to compare it with")
    unread = [why for rank in planes.ranks if (why := _unheard(rank)) is not None]
    if not planes.comparable and not unread:
        return Skipped("no block is cached by two workers: send one prompt to both, then check")
    return outcome((), unread)


_SOURCES: Final = (discovered, populated, _published)
_EVENTS: Final = (*_SOURCES, reachable)

EVENT_CHECKS: Final[Sequence[Check[CheckFacts]]] = (
    Check("DYR0301", listed(ProblemCode.EVENTS_MISSING), (discovered, populated)),
    Check("DYR0302", _connected, _EVENTS),
    Check("DYR0303", _indexers, _EVENTS),
    Check("DYR0304", _has_indexer, _SOURCES),
    Check("DYR0305", _contiguous, _EVENTS),
    Check("DYR0306", _flowing, _EVENTS),
    Check("DYR0307", _own_channel, _EVENTS),
    Check("DYR0308", _understood, _EVENTS),
    Check("DYR0309", _names_agree, _EVENTS),
)

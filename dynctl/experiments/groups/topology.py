"""Group "topology": hand-offs from prefill to decode workers keep to their domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.base.quantities import percent
from dynctl.documents.workers import WorkerRow
from dynctl.experiments.canary import Reply
from dynctl.experiments.groups.group import NO_NAMES, Bench, TrialGroup, refusal
from dynctl.experiments.operator import FleetFacts
from dynctl.experiments.shares import share_interval
from dynctl.findings.runner import Check, Found, Outcome, Passed, Skipped, Wrong, found
from dynctl.planning.domain_capacity import derive_constraints
from router_core import Role, TaintConstraint, topology_of

_AT_ONCE: Final = 4
_LEAST: Final = 24
_MOST: Final = 48
"""While prefill workers of a domain got no request, up to so many are sent."""
_WORDS: Final = 60


@dataclass(frozen=True, slots=True)
class HandOff:
    """One request: its workers, and what the prefill worker's policy wants of the decode worker.

    ``chance``: the share of decode workers that have the wanted taint.
    """

    prefill: WorkerRow
    decode: WorkerRow
    wanted: TaintConstraint | None
    chance: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether the decode worker has the wanted taint."""
        return self.wanted is not None and self.wanted.taint in self.decode.taints

    @property
    def places(self) -> tuple[str, str]:
        """Both workers' values of the policy's domain, ``?`` where one has none."""
        domain = self.domain
        return self.prefill.domains.get(domain, "?"), self.decode.domains.get(domain, "?")

    @property
    def domain(self) -> str:
        place = None if self.wanted is None else topology_of(self.wanted.taint)
        return "" if place is None else place[0]


@dataclass(frozen=True, slots=True)
class TopologyFacts:
    """``skipped``: why nothing was sent. ``unseen``: domains whose prefill workers got none."""

    replies: Sequence[Reply] = ()
    hand_offs: Sequence[HandOff] = ()
    unseen: Sequence[str] = ()
    skipped: Skipped | None = None


async def _gather(bench: Bench) -> TopologyFacts:
    fleet = bench.subject.fleet
    skipped = _untestable(bench, fleet)
    if fleet is None or skipped is not None:
        return TopologyFacts(skipped=skipped)
    replies: list[Reply] = []
    wanted, seen = _places(_prefill_workers(fleet)), set[str]()
    while len(replies) < _LEAST or (len(replies) < _MOST and wanted - seen):
        chats = [bench.chat(bench.prompts.fresh(_WORDS)) for _ in range(_AT_ONCE)]
        sent = await bench.client.chats(*chats)
        replies += sent
        seen |= _places(filter(None, (fleet.worker(reply.prefill) for reply in sent)))
        if not any(reply.answered for reply in sent):
            break
    hand_offs = [pair for reply in replies if (pair := _hand_off(fleet, reply)) is not None]
    return TopologyFacts(replies, hand_offs, sorted(wanted - seen))


def _untestable(bench: Bench, fleet: FleetFacts | None) -> Skipped | None:
    if not bench.subject.names_workers:
        return NO_NAMES
    if fleet is None:
        return bench.operator.unreadable("the workers' domains are unknown")
    if not _prefill_workers(fleet):
        return Skipped("no prefill worker serves this model: no hand-offs")
    return None


def _prefill_workers(fleet: FleetFacts) -> list[WorkerRow]:
    return [row for row in fleet.workers if row.role == Role.PREFILL and row.gets_requests]


def _places(rows: Iterable[WorkerRow]) -> set[str]:
    """The values of the domains of the workers, for example ``zone=a``."""
    return {f"{domain}={value}" for row in rows for domain, value in row.domains.items()}


def _hand_off(fleet: FleetFacts, reply: Reply) -> HandOff | None:
    """None where one worker served the request, or where a worker is unknown."""
    prefill, decode = fleet.worker(reply.prefill), fleet.worker(reply.decode)
    if prefill is None or decode is None or prefill is decode or prefill.role != Role.PREFILL:
        return None
    derived = derive_constraints(prefill, fleet.policy)
    if isinstance(derived, str) or not derived.constraints or derived.relaxable:
        return HandOff(prefill, decode, None)
    wanted = derived.constraints[0]
    takers = fleet.answering()
    fitting = sum(wanted.taint in row.taints for row in takers)
    return HandOff(prefill, decode, wanted, fitting / len(takers) if takers else 0.0)


def _judged(facts: TopologyFacts, kind: str) -> Skipped | list[HandOff]:
    """The hand-offs under a policy of this kind, or why there are none."""
    if facts.skipped is not None:
        return facts.skipped
    pairs = [pair for pair in facts.hand_offs if pair.wanted is not None]
    pairs = [pair for pair in pairs if pair.wanted is not None and pair.wanted.kind == kind]
    if pairs:
        return pairs
    if refused := refusal(facts.replies):
        return refused
    if not facts.hand_offs:
        return Skipped(f"no hand-off in {len(facts.replies)} requests")
    return Skipped(f"no prefill worker that got a request has a {kind} policy")


def _stays(facts: TopologyFacts) -> Outcome:
    pairs = _judged(facts, "required")
    if isinstance(pairs, Skipped):
        return pairs
    crossing = [pair for pair in pairs if not pair.kept]
    if crossing:
        return Wrong(tuple(_crossings(pairs, crossing)))
    if refused := refusal(facts.replies):
        return refused
    unseen = f"; no request in {', '.join(facts.unseen)}" if facts.unseen else ""
    return Passed(f"{len(pairs)} hand-offs: {_pairs_of_places(pairs)}{unseen}")


def _crossings(pairs: Sequence[HandOff], crossing: Sequence[HandOff]) -> Iterable[Found]:
    for name in sorted({pair.prefill.name for pair in crossing}):
        own = [pair for pair in pairs if pair.prefill.name == name]
        away = [pair for pair in own if not pair.kept]
        first = away[0]
        yield found(
            name,
            count=str(len(away)),
            requests=str(len(own)),
            decode=first.decode.name,
            place=f"{first.domain} {first.places[1]}",
            own=f"{first.domain} {first.places[0]}",
        )


def _follows(facts: TopologyFacts) -> Outcome:
    pairs = _judged(facts, "preferred")
    if isinstance(pairs, Skipped):
        return pairs
    pairs = [pair for pair in pairs if 0.0 < pair.chance < 1.0]
    if not pairs:
        return Skipped("all decode workers are in the preferred domain, or none is")
    kept = sum(pair.kept for pair in pairs)
    chance = sum(pair.chance for pair in pairs) / len(pairs)
    low, high = share_interval(kept, len(pairs))
    text = (
        f"{kept} of {len(pairs)} stay, {_pairs_of_places(pairs)}; 95 % interval {percent(low)} to "
        f"{percent(high)}, by chance {percent(chance)}"
    )
    if high < chance:
        name = pairs[0].domain
        return Wrong((found(name, kept=str(kept), requests=str(len(pairs)), shares=text),))
    if low > chance:
        return Passed(text)
    return Skipped(f"{text}: not decided, load may weigh more than the preference")


def _pairs_of_places(pairs: Sequence[HandOff]) -> str:
    """For example ``a to a 13, b to b 11``."""
    counts = Counter(pair.places for pair in pairs)
    listed = [f"{own} to {other} {count}" for (own, other), count in sorted(counts.items())]
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return ", ".join(listed[:8]) + more


TOPOLOGY: Final = TrialGroup(
    "topology",
    "topology",
    requests=_MOST,
    generated=_MOST,
    gather=_gather,
    checks=(Check("DYE0701", _stays), Check("DYE0702", _follows)),
)

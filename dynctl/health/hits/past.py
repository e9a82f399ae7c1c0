"""What is remembered of the past: of routers, ranks, blocks, and requests until they are judged."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from dynctl.documents.hits import UNEXPLAINED, HitsBreak
from dynctl.documents.recording import Arrived, Decided, Finished, Start
from dynctl.health.hits.breaks import Texts
from dynctl.health.hits.tiers import LowerBlocks
from dynctl.health.hits.trials import Change
from router_core import Router, RouterConfig, Worker

RankKey = tuple[int, int]

#: The condition of a worker whose blocks have another size than those of its router.
OTHER_BLOCK_SIZE: Final = "BLOCK_SIZE_MISMATCH"
#: Times of clears and of troubles that are kept for each rank.
_MOST_TIMES: Final = 64
#: Removals that are kept for each block: the copies of a hot one are removed from many ranks.
_MOST_REMOVALS: Final = 8


@dataclass(slots=True, eq=False)
class RecordedRouter:
    """One recorded router: its replay, and what its recording contains."""

    number: int
    start: Start | None = None
    router: Router | None = None
    config: RouterConfig = field(default_factory=RouterConfig)
    pending: dict[str, Request] = field(default_factory=dict)
    #: Names of workers -> codes of conditions that were in force, at the start or later.
    codes: dict[str, set[str]] = field(default_factory=dict)
    incomplete: bool = False
    #: Requests, and those of them that are under way in another recording too.
    arrived: int = 0
    shared: int = 0

    def misses_blocks_of(self, worker: Worker) -> bool:
        """Whether a worker has blocks of another size, so that the router cannot match them."""
        return OTHER_BLOCK_SIZE in self.codes.get(worker.name, ())

    def gives(self, kind: str) -> bool:
        return self.start is None or kind in self.start.complete

    @property
    def mode(self) -> str:
        return str(self.config.router_mode)


@dataclass(slots=True, eq=False)
class RankHistory:
    """What happened to one rank: clears and losses of events, what it stored and reported."""

    key: RankKey
    epoch: int = 0
    stored: bool = False
    clears: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    troubles: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    reports: int = 0
    granularity: int = 0
    #: What it has below the device; None where no event shows a block there.
    lower: LowerBlocks | None = None


@dataclass(slots=True, eq=False)
class Fate:
    """What happened to one block last. ``by`` sent it; times are wall clock, -inf: never.

    ``first_at``: when a request or an event first had it. ``depth``: blocks before it, -1: unknown.
    ``local``: the hash of its tokens alone, 0: no event showed it.
    """

    by: Request | None = None
    sent_at: float = -math.inf
    rank: RankHistory | None = None
    epoch: int = 0
    stored_at: float = -math.inf
    removed_at: float = -math.inf
    #: The last removals: when, and from which rank.
    removals: list[tuple[float, RankHistory]] = field(default_factory=list)
    content: int = 0
    #: Tenant, whether salted, and time of the first block with the same content.
    twin: tuple[str, bool, float] | None = None
    foreign: bool = False
    waiting: list[Gap] | None = None
    first_at: float = math.inf
    depth: int = -1
    local: int = 0

    def note_removal(self, at: float, rank: RankHistory) -> None:
        self.removed_at = at
        self.removals.append((at, rank))
        if len(self.removals) > _MOST_REMOVALS:
            del self.removals[0]

    def removed_between(self, since: float, until: float, rank: RankHistory) -> float | None:
        """When it was first removed from a rank after ``since``, until then."""
        times = (at for at, other in self.removals if other is rank and since < at <= until)
        return next(times, None)


@dataclass(slots=True, eq=False)
class Gap:
    """Blocks that no worker had although ``sender`` had sent them to a rank.

    ``state``: of that rank's index at the decision. ``stored_at``: when the event came after all.
    """

    tokens: int
    sender: Request
    rank: RankHistory
    state: str
    since: float
    stored_at: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One request from its arrival until it is judged."""

    arrived: Arrived
    source: RecordedRouter
    group: str = ""
    hashes: tuple[int, ...] = ()
    decided: Decided | None = None
    #: When it was sent, and the hop that computes the prompt.
    decided_at: float = math.inf
    hop: str = ""
    refused: bool = False
    rank: RankHistory | None = None
    worker: str = ""
    state: str = ""
    #: Leading blocks that the chosen rank has, with those below the device, and without them.
    depth: int | None = None
    device: int | None = None
    #: Whether a rank that may compute the prompt has blocks below the device.
    tiered: bool = False
    #: Why the workers with the most blocks were not candidates, if they were not.
    excluded: str = UNEXPLAINED
    rungs: dict[str, int | None] = field(default_factory=dict)
    twice: int = 0
    parts: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Of the parts whose gain can be computed: tokens, at most those of the part.
    gains: dict[tuple[str, str], int] = field(default_factory=dict)
    #: What other settings would have chosen (Trials.of_choice); None where none was tried.
    trials: dict[Change, int | None] | None = None
    delays: list[float] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    #: Who sent the blocks before: (cause, blocks) from the start, where no index shows the caches.
    senders: list[tuple[str, int]] = field(default_factory=list)
    #: The texts of the model's prompts, and leading blocks of this one that an engine may reuse.
    texts: Texts | None = None
    usable: int = 0
    #: By cause, where it leaves earlier prompts.
    breaks: dict[str, HitsBreak] = field(default_factory=dict)
    #: By cause, tokens by the part of the prompt: where it broke, of other causes where they are.
    segments: dict[str, Counter[str]] = field(default_factory=dict)
    #: New text of turns behind a change in front of them: it may be equal text that moved.
    moved: int = 0
    prefilled_at: float | None = None
    finished: Finished | None = None
    done: bool = False

    @property
    def router(self) -> tuple[int, int]:
        """The router that took it."""
        return self.source.number, self.arrived.router

    @property
    def computed_at(self) -> float | None:
        """When its prompt was computed, as far as it is known."""
        if self.prefilled_at is not None:
            return self.prefilled_at
        end = self.finished
        if end is None:
            return None
        if end.ttft_s is not None:
            return min(end.at, self.arrived.at + end.ttft_s)
        return end.at

    @property
    def failed(self) -> bool:
        end = self.finished
        if end is None or end.outcome in ("completed", "success", ""):
            return False
        return end.ttft_s is None and not end.output_tokens

"""What a choice reads: the request, and the state of the router at one moment.

A profile is how one hop chooses: filters and a scorer, for which the types are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, Protocol

from router_core.busy import BusyTracker
from router_core.changes import Stage
from router_core.config import RouterConfig
from router_core.cost import (
    CostInputs,
    CostParameters,
    TermColumn,
)
from router_core.freshness import FreshnessTable
from router_core.frozen import quick_init
from router_core.hashing import hash_prompt
from router_core.index import PrefixIndex
from router_core.learned import LearnedIndex
from router_core.load import ActiveSequences
from router_core.lower_tiers import LowerTiers
from router_core.policy_classes import NO_CLASSES, PolicyClasses
from router_core.reasons import Reason
from router_core.registry import CandidateSet, WorkerRegistry
from router_core.router_queue import RouterQueue
from router_core.sessions import Session, SessionTable
from router_core.taints import NO_CONSTRAINTS, RoutingConstraints
from router_core.topology import PairGroups, RouterPolicy, TransferGroupsCache
from router_core.transfer import (
    Place,
    TransferClasses,
    TransferTable,
)
from router_core.workers import WorkerWithDpRank


@dataclass(frozen=True, slots=True)
class Pin:
    """The worker that the client chose; any of its ranks if ``dp_rank`` is None."""

    worker_id: int
    dp_rank: int | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What routing reads of a request; never its text.

    ``isl_tokens`` is the prompt length in tokens. ``sequence_hashes`` are the chained hashes of
    its complete blocks of ``block_size`` tokens; without a tokenizer they are empty and
    ``overlap_modelled`` is False. Without ``local_hashes`` of these blocks, those cached in host
    memory or on disk are not found. In a batch of prompts ``isl_tokens`` is their sum,
    ``lengths`` has the tokens of each prompt and ``more_hashes`` the hashes of each after the
    first. ``worker_set``: only workers of
    this set, chosen before. ``served_name``: the name in the request where it is another name of
    ``model`` (an alias, a LoRA adapter): only workers that serve it. ``is_eagle``: the workers
    decode speculatively, so that a block is complete only with the token behind it. ``lora_name``
    is the adapter, ``salted`` whether there is a cache salt; both are part of the hashes already,
    and the salt itself is not kept.
    ``notes`` are copied into every decision on the request. ``policy_class``, ``priority``,
    ``strict_priority`` and ``arrived_at`` (seconds of the clock of all changes) decide its place in
    the router queue. ``session``: the session of the request, where the client named one.
    ``chained``: the hashes are known to be chains, because this program made them of tokens.
    ``streams``: its first output is seen, which ends its prefill load; the response of a request
    that does not stream comes as a whole.
    ``excluded``: workers that a further attempt leaves out of ``allowed_worker_ids``, by id, each
    with the reason that a rejection shows.
    """

    id: str
    model: str
    isl_tokens: int
    block_size: int
    sequence_hashes: Sequence[int] = ()
    constraints: RoutingConstraints = NO_CONSTRAINTS
    pin_prefill: Pin | None = None
    pin_decode: Pin | None = None
    allowed_worker_ids: frozenset[int] | None = None
    worker_set: str | None = None
    is_eagle: bool = False
    overlap_modelled: bool = True
    notes: tuple[str, ...] = ()
    lora_name: str | None = None
    salted: bool = False
    local_hashes: Sequence[int] = ()
    more_hashes: tuple[Sequence[int], ...] = ()
    lengths: tuple[int, ...] = ()
    policy_class: str | None = None
    priority: int = 0
    strict_priority: int = 0
    arrived_at: float = 0.0
    session: Session | None = None
    chained: bool = False
    served_name: str | None = None
    streams: bool = True
    excluded: tuple[tuple[int, str], ...] = ()

    @classmethod
    def from_tokens(
        cls,
        id: str,
        model: str,
        tokens: Sequence[int],
        block_size: int,
        *,
        constraints: RoutingConstraints = NO_CONSTRAINTS,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
        cache_salt: str | None = None,
        is_eagle: bool = False,
    ) -> RoutingRequest:
        """The request of a prompt of token ids; ``block_size`` is that of the model's workers.

        ``lora_name``, ``cache_namespace`` and ``cache_salt`` are mixed into the hashes, and
        ``is_eagle`` is meant, as in :func:`hash_prompt`. Raises HashingError.
        """
        hashes = hash_prompt(
            tokens,
            block_size,
            lora_name=lora_name,
            cache_namespace=cache_namespace,
            cache_salt=cache_salt,
            is_eagle=is_eagle,
        )
        return cls(
            id,
            model,
            len(tokens),
            block_size,
            tuple(hashes.sequence),
            constraints=constraints,
            is_eagle=is_eagle,
            lora_name=lora_name or None,
            salted=bool(cache_namespace or cache_salt),
            local_hashes=tuple(hashes.local),
            chained=True,
        )

    @property
    def queue_fields(self) -> str:
        """The fields that are set for its place in the router queue, as text."""
        if not (self.priority or self.strict_priority or self.policy_class):
            return ""
        names = ("priority", "strict_priority", "policy_class")
        return ", ".join(name for name in names if getattr(self, name))

    @property
    def prompt_blocks(self) -> int:
        """Complete blocks of the prompt."""
        return max(0, self.isl_tokens - self.is_eagle) // self.block_size

    @property
    def all_hashes(self) -> Sequence[int]:
        """The hashes of all prompts; a block that several prompts begin with occurs once."""
        if not self.more_hashes:
            return self.sequence_hashes
        return tuple(dict.fromkeys(chain(self.sequence_hashes, *self.more_hashes)))

    @property
    def chains(self) -> tuple[int, ...]:
        """The lengths of the chains that ``all_hashes`` consist of; empty: not known. Of a prompt
        only what no earlier one begins with is there."""
        if not self.chained or not (self.sequence_hashes or self.more_hashes):
            return ()
        if not self.more_hashes:
            return (len(self.sequence_hashes),)
        lengths = [len(self.sequence_hashes)]
        known = set(self.sequence_hashes)
        for hashes in self.more_hashes:
            before = len(known)
            known.update(hashes)
            lengths.append(len(known) - before)
        return tuple([length for length in lengths if length])

    @property
    def most_reusable(self) -> int:
        """Blocks of the (first) prompt that an engine can reuse at most; see `most_reusable_of`."""
        tokens = self.lengths[0] if self.lengths else self.isl_tokens
        return max(0, tokens - 1) // self.block_size

    def most_reusable_of(self, prompt: int) -> int:
        """Blocks of a prompt of the batch that an engine can reuse at most: it always computes the
        last token."""
        tokens = self.lengths[prompt] if self.lengths else self.isl_tokens
        return max(0, tokens - 1) // self.block_size


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Pretended load of a dry run: slot -> tokens, blocks or requests to add (negative: to
    subtract)."""

    prefill_tokens: Mapping[int, int] = field(default_factory=dict)
    decode_blocks: Mapping[int, int] = field(default_factory=dict)
    active_requests: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutingView:
    """The state that a decision may read.

    ``rotation``: requests booked so far, by (model, stage). ``parameters`` and ``policy`` follow
    from ``config``; ``profile`` too, unless the router has its own. ``learned``: what ranks without
    KV events are expected to have; ``predicted``: what those with events are, until these arrive.
    ``queue``: None while requests never wait. ``transfer``: the table of links, where distances
    cost; ``own_place``: that of the frontend, where it is known. ``sessions``: None without
    session affinity.
    """

    registry: WorkerRegistry
    index: PrefixIndex
    load: ActiveSequences
    busy: BusyTracker
    config: RouterConfig
    rotation: Mapping[tuple[str, Stage], int]
    groups: TransferGroupsCache
    parameters: Mapping[Stage, CostParameters]
    policy: RouterPolicy | None
    profile: Profile
    what_if: WhatIf | None = None
    tiers: LowerTiers = field(default_factory=LowerTiers)
    freshness: FreshnessTable = field(default_factory=FreshnessTable)
    learned: tuple[LearnedIndex, ...] = ()
    queue: RouterQueue | None = None
    policy_classes: PolicyClasses = NO_CLASSES
    transfer: TransferTable | None = None
    own_place: Place | None = None
    classes: TransferClasses = field(default_factory=TransferClasses)
    pairs: PairGroups = field(default_factory=PairGroups)
    predicted: LearnedIndex = field(default_factory=LearnedIndex)
    sessions: SessionTable | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class SelectionContext:
    """One hop of one request. ``role_mask``: slots whose role can serve the hop.

    ``capacity_mask``: on a prefill hop with the decode-capacity guard, the slots whose transfer
    domain has an eligible decode rank. ``domain``: the domain that a required router policy needs.
    ``source``: the topology domains of the worker that sends the KV cache. ``following``: computes
    the lowest cost of the decode hop after each candidate.
    """

    request: RoutingRequest
    stage: Stage
    role_mask: int
    constraints: RoutingConstraints
    pin: Pin | None = None
    capacity_mask: int | None = None
    domain: str | None = None
    source: Mapping[str, str] | None = None
    following: Callable[[Sequence[int]], list[float] | None] | None = None


@dataclass(frozen=True, slots=True)
class BoundRank:
    """The rank that a session is bound to, for ``left_s`` more seconds."""

    slot: int
    ref: WorkerWithDpRank
    left_s: float


def bound_rank(view: RoutingView, context: SelectionContext) -> BoundRank | None:
    """The rank of the request's session; None without one, and where a pin chooses already."""
    session, sessions = context.request.session, view.sessions
    if session is None or sessions is None or context.pin is not None:
        return None
    binding = sessions.find(session, view.registry.model_of(context.request.model), context.stage)
    if binding is None:
        return None
    ref, left_s = binding
    slot = view.registry.slot(*ref)
    # A worker that left: the session starts again.
    return None if slot is None else BoundRank(slot, ref, left_s)


def compares_sessions(view: RoutingView) -> bool:
    """Whether the worker of a session is compared with the others by cost."""
    return view.config.router_session_affinity_mode == "soft" and view.profile.mode == "kv"


class Filter(Protocol):
    """Excludes ranks. ``name`` is its name in the funnel."""

    @property
    def name(self) -> str: ...

    def mask(self, view: RoutingView, context: SelectionContext) -> int | None:
        """Slots that pass; None if the filter does not apply to this hop."""

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        """Why ``slot`` does not pass; called only for slots that do not."""


class Scorer(Protocol):
    """Computes the cost terms of the candidates; ``turn``: requests booked so far on this hop."""

    def __call__(
        self,
        inputs: CostInputs,
        parameters: CostParameters,
        candidates: CandidateSet,
        turn: int,
    ) -> tuple[TermColumn, ...]: ...


@dataclass(frozen=True, slots=True)
class Profile:
    """A router mode: its filters, its scorer, and whether the temperature applies.

    ``among``: the candidates of which the cheapest wins: ``all``, ``two`` that are drawn, or those
    of one ``device`` class (:mod:`router_core.devices`).
    A profile with a scorer of its own needs a ``mode`` name of its own, because decisions are
    replayed by their mode.
    """

    mode: str
    filters: tuple[Filter, ...]
    scorer: Scorer
    sampled: bool = False
    among: Literal["all", "two", "device"] = "all"

    def with_filters(self, *filters: Filter) -> Profile:
        """A copy with ``filters`` added before the filters that read load (capacity and busy)."""
        names = [filter_.name for filter_ in self.filters]
        places = [names.index(name) for name in ("decode_capacity", "busy") if name in names]
        at = min(places, default=len(names))
        return replace(self, filters=(*self.filters[:at], *filters, *self.filters[at:]))

"""``RouteResult``: a routing decision as JSON.

The command line prints it, `POST /v1/route` returns it and `why` reads it. Use ``worker`` as the
key of a worker: ids exceed 2^53, the largest integer that JSON readers keep exactly.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.documents.doubts import Doubt

SCHEMA = 1

#: The load source where no source reports load.
UNKNOWN_LOAD = "unknown"


class Ref(msgspec.Struct, frozen=True):
    """One data-parallel rank of one worker."""

    worker: str
    worker_id: int
    dp_rank: int = 0


class Term(msgspec.Struct, frozen=True):
    """One term of the cost formula. ``unit``: blocks, for example."""

    name: str
    unit: str
    weight: float


class Constraint(msgspec.Struct, frozen=True):
    """One taint that the request requires or prefers. ``origin``: request, or a worker's policy."""

    taint: str
    kind: str
    weight: float | None = None
    origin: str = "request"


class RejectedRow(msgspec.Struct, frozen=True):
    """One rank that a filter rejected: its ``value`` and the ``limit``."""

    worker: str
    worker_id: int
    code: str
    message: str
    dp_rank: int = 0
    domains: dict[str, str] = {}
    value: str | int | float | None = None
    limit: str | int | float | None = None


class FunnelRow(msgspec.Struct, frozen=True):
    filter: str
    entered: int
    left: int
    skipped: str | None = None
    rejected: list[RejectedRow] = []


class CandidateRow(msgspec.Struct, frozen=True):
    """One scored rank. ``host_blocks``: prompt blocks in host memory after the cached ones
    (``overlap_blocks``; None where the decision's ``overlap_modelled`` is False: unknown, and
    counted as none), ``disk_blocks``: those after them on disk. ``usable_blocks``: the cached
    ones that the engine reuses; it always computes the prompt's last token. ``index``: whether the
    rank's index is ``exact``, ``degraded``, ``estimated`` or ``none``; of its ``indexed_blocks``
    those in ``overlap_blocks`` count. ``booked_prefill_tokens``: the active prefill tokens before
    the prefill load model let them fall; absent where none fall. ``device``: ``cpu`` or an
    accelerator; absent where unknown. ``predicted_blocks``: those of ``overlap_blocks`` that were
    sent there just now, and that no event has shown yet; absent without any. ``transfer_level``:
    the narrowest level of --router-kv-transfer-qos on which both workers of the pair agree;
    ``following``: the cost of the best decode hop after this prefill worker. Both absent where off.
    """

    worker: str
    worker_id: int
    cost: float
    dp_rank: int = 0
    domains: dict[str, str] = {}
    overlap_blocks: int | None = 0
    prefill_blocks: float | None = None
    decode_blocks: float | None = None
    active_requests: int = 0
    active_prefill_tokens: int = 0
    terms: dict[str, float] = {}
    multiplier: float = 1.0
    probability: float = 0.0
    host_blocks: int = 0
    disk_blocks: int = 0
    usable_blocks: int = 0
    indexed_blocks: int = 0
    index: str = "exact"
    booked_prefill_tokens: int | UnsetType = UNSET
    device: str | UnsetType = UNSET
    predicted_blocks: int | UnsetType = UNSET
    #: The class of the distance to there, by the table of links: a level, or ``beyond``.
    transfer_level: str | UnsetType = UNSET
    #: The part of the cost that is the lowest cost of a decode worker after this one.
    following: float | UnsetType = UNSET


class PrefillPrediction(msgspec.Struct, frozen=True):
    """How long the winner's prefill is expected to take, and the model that predicts it.

    It computes ``tokens`` of the prompt, after ``cached`` ones, in ``seconds``.
    """

    model: str
    tokens: int
    cached: int
    seconds: float


class SessionRow(msgspec.Struct, frozen=True):
    """The worker that the request's session is bound to, for ``left_s`` more seconds.

    ``kept``: it was chosen. Else ``excluded`` is the filter that excludes it, or ``extra_cost`` the
    cost above that of the winner, more than a session may cost.
    """

    worker: str
    worker_id: int
    dp_rank: int
    left_s: float
    kept: bool
    excluded: str | UnsetType = UNSET
    extra_cost: float | UnsetType = UNSET


class FlipRow(msgspec.Struct, frozen=True):
    """``worker`` None: ``change`` is a weight."""

    worker: str | None
    change: str
    by: float


class PreferenceRow(msgspec.Struct, frozen=True):
    """How near a preferred taint is to losing: it loses where ``now`` exceeds ``crossover``."""

    taint: str
    weight: float
    crossover: float
    now: float | None
    smallest_weight: float | None
    verdict: str


class IndexFreshness(msgspec.Struct, frozen=True):
    """``publishers``: ranks that publish KV events; ``current``: those whose index is current.
    ``estimated``: ranks whose cache is estimated from requests sent there.
    """

    publishers: int = 0
    current: int = 0
    gaps: int = 0
    oldest_s: float | None = None
    estimated: int = 0


class LoadFreshness(msgspec.Struct, frozen=True):
    source: str = "unknown"
    oldest_s: float | None = None


class FreshnessRow(msgspec.Struct, frozen=True):
    index: IndexFreshness = IndexFreshness()
    load: LoadFreshness = LoadFreshness()


class DeviceBudgetRow(msgspec.Struct, frozen=True):
    """What mode device-aware-weighted compares: workers and running requests of both classes.

    The ``next`` class is ``cpu`` while ``cpu_requests`` is below ``allowed_cpu``, which is
    accelerator_requests * cpu_workers / (ratio * accelerators), rounded down.
    """

    next: str
    ratio: float
    cpu_workers: int
    cpu_requests: int
    accelerators: int
    accelerator_requests: int
    allowed_cpu: int


class QueueLimit(msgspec.Struct, frozen=True):
    """The limit of the router queue for which a request may not wait (any more)."""

    policy_class: str
    limit_kind: str
    current: int
    limit: int


class QueueRow(msgspec.Struct, frozen=True):
    """What the router queue does with a request, or did.

    ``waits``: it has to wait now. ``all_busy``: all ``ranks`` that could take it hold more active
    prefill tokens than its class allows; ``needs`` tokens have to finish on ``nearest``.
    ``backlog`` requests of the class waited already, ``ahead`` of them go first; None: not known.
    ``waited_s``: seconds that it waited.
    """

    policy_class: str
    queue_policy: str
    waits: bool
    uncached_tokens: int
    ranks: int
    all_busy: bool = False
    needs: int = 0
    nearest: str | None = None
    backlog: int | None = 0
    ahead: int | None = 0
    priority: int = 0
    strict_priority: int = 0
    prefill_busy_threshold: int | None = None
    prefill_busy_threshold_frac: float | None = None
    waited_s: float | None = None
    refused: QueueLimit | None = None


class DecisionResult(msgspec.Struct, frozen=True):
    """One hop. ``outcome`` is ``selected`` or the reason of a refusal."""

    id: str
    stage: str
    mode: str
    outcome: str
    winner: Ref | None = None
    margin: float | None = None
    tied: list[Ref] = []
    temperature: float = 0.0
    parameters: dict[str, Any] = {}
    terms: list[Term] = []
    constraints: list[Constraint] = []
    funnel: list[FunnelRow] = []
    candidates: list[CandidateRow] = []
    overlap_modelled: bool = True
    notes: list[str] = []
    message: str | None = None
    #: The LoRA adapter, and whether the request has a cache salt: both separate cached blocks.
    lora: str | None = None
    salted: bool = False
    flip: FlipRow | None = None
    preference: PreferenceRow | None = None
    #: None for a past decision: the age of its data is not recorded.
    freshness: FreshnessRow | None = None
    #: Absent without a prefill load model.
    prefill_load: PrefillPrediction | UnsetType = UNSET
    #: Mode power-of-two: the two ranks that were drawn, in this order, and the number from 0 to 1
    #: that drew them. The one with fewer active requests wins, and the first of equals.
    drawn: list[Ref] | UnsetType = UNSET
    sample: float | UnsetType = UNSET
    #: Mode device-aware-weighted: why this class of devices gets the request.
    devices: DeviceBudgetRow | UnsetType = UNSET
    #: The worker of the request's session, where it is bound to one.
    session: SessionRow | UnsetType = UNSET
    #: Absent without a router queue, and on the decode hop.
    queue: QueueRow | UnsetType = UNSET


class Winner(msgspec.Struct, frozen=True):
    prefill: Ref | None = None
    decode: Ref | None = None


class ByPrefill(msgspec.Struct, frozen=True):
    prefill: Ref
    decode: DecisionResult | None


class PairRow(msgspec.Struct, frozen=True):
    """A prefill and a decode worker; ``cost`` is the sum of both hops. ``decode`` None: not known
    for a past decision."""

    prefill: Ref
    decode: Ref | None
    cost: float


class PairChoice(msgspec.Struct, frozen=True):
    """The pair that was chosen, and the one that choosing hop by hop would have found."""

    best: PairRow
    greedy: PairRow


class WorkerSetRow(msgspec.Struct, frozen=True):
    """One set of workers that a frontend can draw before it chooses a worker in it.

    ``available`` of its ``workers`` can be chosen; the ``share`` of requests that the set gets
    follows from that. ``prefill`` and ``decode``: the decision within the set.
    """

    name: str
    workers: int
    available: int
    share: float
    winner: Winner
    prefill: DecisionResult | None
    decode: DecisionResult | None


class BusyRow(msgspec.Struct, frozen=True):
    """A worker's load in tokens or blocks, and the line above which it is busy (None: unknown)."""

    worker: str
    value: float
    limit: float | None = None


class BypassRow(msgspec.Struct, frozen=True):
    """The verdict of conditional disaggregation: whether the prefill hop is left out, and why.

    ``decode`` is the worker that would do everything; it has ``cached_tokens`` of the prompt and
    would compute ``eff_isl``. ``drawn``: another one was as likely, with the other verdict.
    """

    bypassed: bool
    reason: str
    message: str
    policy: str
    eff_isl_threshold: int
    eff_isl_ratio_threshold: float
    cached_tokens: int = 0
    eff_isl: int = 0
    decode: str | None = None
    prefill_load: BusyRow | None = None
    decode_load: BusyRow | None = None
    drawn: bool = False


class ObservedChoice(msgspec.Struct, frozen=True):
    """A choice of a Dynamo frontend that dynctl observed; what else a result has is a prediction.

    ``source``: where it was read; ``router``: the frontend's id in hex, empty where the source does
    not have it. ``predicted``: the worker of the final hop that dynctl would have chosen;
    ``as_predicted``: whether the chosen one costs as little. Both are None without a prediction,
    with the reason in ``unpredicted``. ``cost``: the frontend's own, in blocks, where its log has
    it. ``refused``: the frontend's message; then nothing was chosen.
    """

    source: str
    router: str = ""
    prefill: Ref | None = None
    decode: Ref | None = None
    predicted: Ref | None = None
    as_predicted: bool | None = None
    unpredicted: str = ""
    cost: float | None = None
    refused: str = ""


class RouteResult(msgspec.Struct, frozen=True):
    """The answer to "where would this request go, and why".

    ``doubts``: what is unknown, those that can change the winner first. ``certain``: none of them
    can; False too where it is not known, as from a frontend that reports no doubts.
    ``worker_sets``: where the workers of the model form several sets, the decision in each; the
    answer itself is that of ``worker_set``, the most likely one. ``status``: the HTTP status with
    which a Dynamo frontend refuses the request, where it is known. ``bypass``: only with
    conditional disaggregation. ``observed``: what a Dynamo frontend chose, only in past decisions
    of ``serve observe``; ``winner`` and the hops are then predictions. ``tokens_estimated``: the
    prompt was not tokenized, so ``tokens`` and ``blocks`` are estimates from its characters.
    """

    model: str
    mode: str
    tokens: int
    block_size: int
    blocks: int
    winner: Winner
    prefill: DecisionResult | None
    decode: DecisionResult | None
    id: str = ""
    preset: str | None = None
    assumptions: list[str] = []
    doubts: list[Doubt] = []
    certain: bool = False
    relaxed: bool = False
    decode_by_prefill: list[ByPrefill] = []
    worker_set: str | None = None
    worker_sets: list[WorkerSetRow] = []
    status: int | None = None
    bypass: BypassRow | UnsetType = UNSET
    #: Where prefill and decode are chosen as a pair, at temperature 0.
    pairs: PairChoice | UnsetType = UNSET
    observed: ObservedChoice | UnsetType = UNSET
    tokens_estimated: bool = False
    kind: str = "RouteResult"
    schema: int = SCHEMA

    @property
    def hops(self) -> list[DecisionResult]:
        """The hops that were decided, in order."""
        return [hop for hop in (self.prefill, self.decode) if hop is not None]

    @property
    def ok(self) -> bool:
        """Whether every hop has a winner; of an observed choice, whether there was one."""
        if not isinstance(self.observed, UnsetType):
            return not self.observed.refused
        return bool(self.hops) and all(hop.winner is not None for hop in self.hops)


def waiting_text(queue: QueueRow) -> str:
    """That a request waits in the router queue, or waited: behind how many others, and why."""
    past = queue.waited_s is not None
    why = [_all_busy_text(queue, past=past)] if queue.all_busy else []
    if queue.backlog:
        verb = "waited" if past else "waits" if queue.backlog == 1 else "wait"
        why.append(f"{queue.backlog:,} of its class {verb} already")
    behind = "behind an unknown number of others"
    if queue.ahead is not None:
        others = f"{queue.ahead:,} other{'' if queue.ahead == 1 else 's'}"
        behind = f"behind {others}" if queue.ahead else "first in line"
    verb = f"waited {queue.waited_s:,.3f} s" if past else "waits"
    return (
        f"the request {verb} in the router queue, class {queue.policy_class}, {behind}: "
        + " and ".join(why or ["it was tried again"])
    )


def _all_busy_text(queue: QueueRow, *, past: bool) -> str:
    limits = []
    if queue.prefill_busy_threshold is not None:
        limits.append(f"{queue.prefill_busy_threshold:,}")
    if queue.prefill_busy_threshold_frac is not None:
        limits.append(f"{queue.prefill_busy_threshold_frac:g} x max_num_batched_tokens")
    which = "the eligible rank" if queue.ranks == 1 else f"all {queue.ranks:,} eligible ranks"
    verb = "held" if past else "holds" if queue.ranks == 1 else "hold"
    text = f"{which} {verb} more active prefill tokens than {' or '.join(limits)}"
    return text if past else f"{text} ({queue.nearest} has {queue.needs:,} too many)"

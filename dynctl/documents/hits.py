"""`hits`: why the prefix hit rate is what it is, as a ladder of rates and the causes of each loss.

The rungs, from what was reachable to what the engines reused, count tokens of the same prompts.
The causes of a step add up to what the step lost; a cause with negative tokens is a gain.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from dynctl.documents.doubts import Doubt

SCHEMA = 1

#: The rungs, highest first, and what each one assumes.
RUNGS: Final = {
    "shared": "as reachable, if equal prompts had one salt",
    "reachable": "reachable, one cache without limit",
    "capacity": "one cache with the fleet's capacity",
    "best": "perfect routing on what was cached",
    "expected": "as the router expected",
    "reused": "as the engines reused",
}
#: What requests can be grouped by.
BY: Final = ("model", "domain", "tenant", "hour", "worker")
UNEXPLAINED: Final = "unexplained"


class CauseText(NamedTuple):
    """What a cause is called, in short and in whole, what changes it, the codes of `dynctl explain`
    about it, and the condition under which its gain is computed (empty: it is not)."""

    label: str
    title: str
    act: str = ""
    codes: tuple[str, ...] = ()
    gain_if: str = ""


#: Under which condition a choice would have reused more.
_CHOSEN: Final = "if the worker that had most of each prompt had been chosen"


CAUSES: Final = {
    "salts": CauseText(
        "salts",
        "equal from the second block on, another cache salt",
        "give tenants that may share a prefix one cache_salt",
    ),
    "first_block": CauseText(
        "another first block",
        "equal from the second block on, another first block",
        "move what changes (a date, an id) from the start of the prompt to its end",
    ),
    "capacity": CauseText(
        "evicted before reuse",
        "evicted before reuse",
        "more KV blocks: more memory for the engines' caches, more workers, or a host tier",
        gain_if="with twice the blocks",
    ),
    "split": CauseText(
        "prefixes split over workers",
        "evicted from its worker, while one shared cache would have kept it",
        "keep equal prefixes together: raise --router-prefill-load-scale (with sessions: "
        "--router-session-affinity-ttl-secs)",
    ),
    "spread": CauseText(
        "spread by the router mode",
        "the router mode does not read caches, so prefixes are spread over workers",
        "--router-mode kv",
        gain_if=_CHOSEN,
    ),
    "in_flight": CauseText(
        "still being computed",
        "the prefix was still being computed",
        "--router-predicted-ttl-secs 5 counts a prompt where it was just sent",
    ),
    "blind": CauseText(
        "another router",
        "another router had sent the prefix, this router did not see it",
        "KV events on all engines (kv-events= of --worker), or one router for equal prefixes: "
        "replica sync shares loads, not prompts",
    ),
    "events_lost": CauseText(
        "events lost",
        "KV events were lost, so the index was incomplete",
        "restore the worker's KV event stream: dynctl check; a larger replay buffer on the engine",
        ("EVENTS_LOST", "STREAM_DISCONNECTED"),
    ),
    "no_events": CauseText(
        "no KV events",
        "the worker reports no KV events",
        "start the engine with KV events and name them: kv-events= of --worker",
        ("DYR0762",),
    ),
    "block_size": CauseText(
        "block size differs",
        "the engine and the router have different block sizes",
        "the same --block-size on all engines and in the router",
        ("BLOCK_SIZE_MISMATCH",),
    ),
    "stale": CauseText(
        "events late",
        "KV events arrived late, so the index was behind the engine",
        "shorten the way of the events: dynctl events tail; --router-predicted-ttl-secs 5 bridges "
        "new blocks",
    ),
    "restart": CauseText(
        "restart or clear",
        "the engine restarted, was lost, or its cache was cleared",
        "find out why it restarts: the engine's log; drain a worker before it stops",
        ("ENGINE_RESTARTED",),
    ),
    "not_computed": CauseText(
        "earlier request failed",
        "the earlier request with this prefix was not computed: it failed or was cancelled",
        "see the outcomes of those requests: dynctl why ID",
    ),
    "load": CauseText(
        "load beat cache",
        "load beat cache",
        "raise --router-prefill-load-scale, or add workers where the prefix is hot; "
        "dynctl why ID shows both costs",
        gain_if=_CHOSEN,
    ),
    "no_credit": CauseText(
        "cache has no weight",
        "the settings of the router give cached blocks no weight",
        "--router-kv-overlap-score-credit 1 --router-prefill-load-scale 1 "
        "--router-track-prefill-tokens",
        gain_if=_CHOSEN,
    ),
    "tier_weight": CauseText(
        "lower tiers count less",
        "more of the prefix was in a worker's host memory or on its disk, which count less",
        "raise --router-host-cache-hit-weight and --router-disk-cache-hit-weight where loading is "
        "faster than computing",
        gain_if=_CHOSEN,
    ),
    "topology": CauseText(
        "topology",
        "the topology policy kept the request away from its prefix",
        "add capacity in the request's domain, or --kv-transfer-enforcement preferred",
    ),
    "busy": CauseText(
        "busy",
        "the worker with the prefix was busy",
        "raise the busy thresholds: dynctl thresholds set, or add workers",
        ("WORKERS_BUSY",),
    ),
    "unavailable": CauseText(
        "unavailable",
        "the worker with the prefix was unavailable (cordoned, drained, ejected, failed)",
        "dynctl workers list shows why",
    ),
    "constraints": CauseText(
        "taints, pins",
        "a taint, a pin or a list of workers excluded the worker with the prefix",
        "see the request's constraints: dynctl why ID",
    ),
    "session": CauseText(
        "session",
        "the session stayed on its worker",
        "--router-session-affinity-yield-blocks lets a session move to a longer prefix",
        gain_if=_CHOSEN,
    ),
    "temperature": CauseText(
        "temperature",
        "the temperature drew a worker with a shorter prefix",
        "--router-temperature 0",
        gain_if=_CHOSEN,
    ),
    "estimate": CauseText(
        "estimate forgot",
        "the estimate of the caches had forgotten the prefix",
        "start the engines with KV events, or raise --router-ttl-secs",
        ("DYR0762",),
    ),
    "evicted_waiting": CauseText(
        "evicted while waiting",
        "evicted after the decision, before the engine computed the prompt",
        "more KV blocks, or fewer requests that wait in the engine: dynctl thresholds set",
    ),
    "alignment": CauseText(
        "block alignment",
        "the engine reuses whole blocks of its own and always computes the last token",
        "a smaller --block-size",
        gain_if="if the engines had the block size of the router",
    ),
    "tokens": CauseText(
        "other tokens",
        "the engine counts other prompt tokens than the router",
        "the same tokenizer and chat template in the router and the engine: --model-path",
        ("TOKENIZER_DIFFERS",),
    ),
    "other_salt": CauseText(
        "salt not hashed",
        "the router counted blocks of another salt, which the engine does not reuse",
        "a router that hashes the cache salt, as dynctl serve frontend does",
    ),
    "predicted": CauseText(
        "counted before events", "the router counted blocks before their KV events arrived"
    ),
    "more": CauseText(
        "reused beyond the index", "the engines reused more than the router expected"
    ),
    "kept": CauseText(
        "workers kept more", "the workers kept more than one cache of that size would"
    ),
    UNEXPLAINED: CauseText("unexplained", "unexplained"),
}


class HitsCause(msgspec.Struct, frozen=True):
    """A part of a step: ``tokens`` lost (negative: gained) by ``requests`` requests.

    ``share``: of all prompt tokens. ``examples``: ids of requests, the largest losses first.
    ``workers``: those that lost most by it. ``act``: the setting or the act that would change it.
    ``codes``: for `dynctl explain`. ``after``, in seconds: the median delay of late events.
    ``gain``: the largest share of all prompt tokens that these requests would have reused in
    addition under the condition ``gain_if``, with caches as they were; at most ``share``. None
    where the records do not have what it is computed from. ``replay``: command lines that simulate
    the same requests as they were and with the change; empty where `dynctl replay` cannot.
    """

    cause: str
    label: str
    title: str
    tokens: int
    share: float
    requests: int
    act: str = ""
    examples: list[str] = []
    workers: list[str] = []
    codes: list[str] = []
    after: float | None = None
    gain: float | None = None
    gain_if: str = ""
    replay: list[str] = []


class HitsRung(msgspec.Struct, frozen=True):
    """One rung: ``rate`` of the prompt tokens, None where ``unknown`` names the missing input.

    ``lost``: tokens fewer than on the known rung before; ``causes`` add up to it.
    """

    rung: str
    title: str
    tokens: int | None = None
    rate: float | None = None
    lost: int | None = None
    causes: list[HitsCause] = []
    unknown: str = ""


class HitsGroup(msgspec.Struct, frozen=True):
    """The ladder of one model, domain, tenant, hour or worker; ``rates`` by rung."""

    name: str
    requests: int
    prompt_tokens: int
    rates: dict[str, float | None]
    largest: str = ""
    largest_share: float = 0.0


class HitsReport(msgspec.Struct, frozen=True):
    """Why the hit rate of ``requests`` requests is what it is.

    ``start`` and ``end``: wall-clock seconds of the first and the last of them. ``skipped``: other
    requests by reason. ``capacity_blocks``: of the fleet at the end, with the most blocks that each
    rank had in host memory and on disk; None where a worker does not declare those of its device.
    ``with_twice``: the rate of one shared cache of twice that capacity.
    ``largest``: the causes that an act can change, the largest loss first, over all steps and net:
    without what was gained back on a later rung.
    ``left_out``: what the bounds of memory left out of the judgement, by kind.
    ``foreign_blocks``: blocks that workers stored for prompts that no recorded router sent.
    """

    source: str
    start: float | None
    end: float | None
    requests: int
    prompt_tokens: int
    workers: int
    models: list[str]
    rungs: list[HitsRung]
    largest: list[HitsCause]
    capacity_blocks: int | None = None
    with_twice: float | None = None
    by: str = ""
    groups: list[HitsGroup] = []
    skipped: dict[str, int] = {}
    left_out: dict[str, int] = {}
    foreign_blocks: int = 0
    stored_blocks: int = 0
    doubts: list[Doubt] = []
    kind: str = "HitsReport"
    schema: int = SCHEMA

    def rung(self, name: str) -> HitsRung | None:
        """The rung of that name, None where it is not in the ladder."""
        return next((one for one in self.rungs if one.rung == name), None)

"""`hits`: why the prefix hit rate is what it is, as a ladder of rates and the causes of each loss.

The rungs, from the whole prompts to what the engines reused, count tokens of the same prompts.
The causes of a step add up to what the step lost; a cause with negative tokens is a gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from dynctl.documents.doubts import Doubt

SCHEMA = 1

#: The rungs, highest first, and what each one assumes.
RUNGS: Final = {
    "prompt": "all tokens of the prompts",
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
    about it, and the condition under which its gain is computed (empty: it is not).

    ``setting``: a setting may change it too, which is tried on the recorded choices."""

    label: str
    title: str
    act: str = ""
    codes: tuple[str, ...] = ()
    gain_if: str = ""
    setting: bool = False


#: Under which condition a choice would have reused more.
_CHOSEN: Final = "if the worker that had most of each prompt had been chosen"


CAUSES: Final = {
    "salts": CauseText(
        "salts",
        "equal from the second block on, another cache salt",
        "give tenants that may share a prefix one cache_salt",
    ),
    "front": CauseText(
        "behind a changed part",
        "equal to text of an earlier prompt, behind a part that changed",
        "move what changes (a date, an id, tools in another order) behind the text that stays",
    ),
    "edited": CauseText(
        "behind an edited turn",
        "equal to text of an earlier prompt, behind a turn that was sent in another form",
        "send earlier turns as they were: without their reasoning, or with other ids, they are "
        "other text",
    ),
    "truncated": CauseText(
        "truncated history",
        "equal to text of an earlier prompt, whose part in front of it is left out now",
        "shorten histories rarely and by much, so that prompts in between begin with equal text",
    ),
    "new": CauseText("new text", "in no earlier prompt of the tenant"),
    "contents": CauseText(
        "contents unknown",
        "new, or equal text behind a change: no KV event shows the contents of these blocks",
    ),
    "tail": CauseText(
        "end of the prompt",
        "the end of each prompt: engines reuse whole blocks, and always compute the last token",
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
        "more KV blocks keep the copies of a prefix",
        setting=True,
    ),
    "spread": CauseText(
        "spread by the router mode",
        "the router mode does not read caches, so prefixes are spread over workers",
        "--router-mode kv",
        gain_if=_CHOSEN,
        setting=True,
    ),
    "in_flight": CauseText(
        "still being computed",
        "the prefix was still being computed",
        "requests that begin with the same prefix at the same moment compute it several times",
        setting=True,
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
        "start the engine with KV events and name them: kv-events= of --worker; if it never reuses "
        "anything, its prefix cache may be off: dynctl test ENGINE --only reuse",
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
        "shorten the way of the events: dynctl events tail",
        setting=True,
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
        "add workers where the prefix is hot; dynctl why ID shows both costs",
        gain_if=_CHOSEN,
        setting=True,
    ),
    "no_credit": CauseText(
        "cache has no weight",
        "the settings of the router give cached blocks no weight",
        "dynctl why ID shows the terms of the cost",
        gain_if=_CHOSEN,
        setting=True,
    ),
    "tier_weight": CauseText(
        "lower tiers count less",
        "more of the prefix was in a worker's host memory or on its disk, which count less",
        "blocks below the device are worth their weight where loading is faster than computing",
        gain_if=_CHOSEN,
        setting=True,
    ),
    "topology": CauseText(
        "topology",
        "the topology policy kept the request away from its prefix",
        "add capacity in the request's domain",
        setting=True,
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
        "a session that stays keeps its own prefix: dynctl why ID",
        gain_if=_CHOSEN,
        setting=True,
    ),
    "temperature": CauseText(
        "temperature",
        "the temperature drew a worker with a shorter prefix",
        "a temperature above 0 draws dearer workers too: dynctl why ID",
        gain_if=_CHOSEN,
        setting=True,
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


class HitsTrial(msgspec.Struct, frozen=True):
    """Settings that were tried on recorded choices, each on the state that its router had.

    ``changed`` choices would have been others, whose workers had ``tokens`` more of the prompts
    cached (negative: fewer). ``flags``: the settings as options.
    """

    settings: dict[str, Any]
    flags: str
    changed: int
    tokens: int


def best_trial(trials: Sequence[HitsTrial]) -> HitsTrial | None:
    """The settings that gain most; None where none changes a choice for the better."""
    helpful = [trial for trial in trials if trial.changed and trial.tokens > 0]
    return max(helpful, key=lambda trial: trial.tokens, default=None)


class HitsBreak(msgspec.Struct, frozen=True):
    """Where a request leaves the prompts before it.

    ``block`` is the first that differs, at ``token``. ``segment``: the part of the prompt that
    changed, empty where the recording does not have the parts. Its blocks from ``equal_from`` to
    ``equal_to`` (not included) are equal to text of the request ``earlier`` (empty: unknown), which
    had them from block ``was_at`` on.
    """

    request: str
    block: int
    token: int
    equal_from: int
    equal_to: int
    was_at: int
    earlier: str = ""
    segment: str = ""


class HitsCause(msgspec.Struct, frozen=True):
    """A part of a step: ``tokens`` lost (negative: gained) by ``requests`` requests.

    ``share``: of all prompt tokens. ``examples``: ids of requests, the largest losses first.
    ``workers``: those that lost most by it. ``act``: the setting or the act that would change it.
    ``codes``: for `dynctl explain`. ``after``, in seconds: the median delay of late events.
    ``gain``: the largest share of all prompt tokens that these requests would have reused in
    addition under the condition ``gain_if``, with caches as they were; at most ``share``. None
    where the records do not have what it is computed from. ``replay``: command lines that simulate
    the same requests as they were and with the change; empty where `dynctl replay` cannot.
    ``trials``: what settings that may reduce it do to ``tried`` recorded choices, the best first.
    ``breaks``: of equal text that was not reachable, where examples leave earlier prompts.
    ``segments``: its tokens by the part of the prompt that changed, those of new text by the part
    that has it; empty where the recording does not have the parts.
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
    tried: int = 0
    trials: list[HitsTrial] = []
    breaks: list[HitsBreak] = []
    segments: dict[str, int] = {}


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
        return next((rung_row for rung_row in self.rungs if rung_row.rung == name), None)

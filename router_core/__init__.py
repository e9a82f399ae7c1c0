"""Route LLM requests to the workers that have the prompt cached, are not loaded and are near.

A pure library: no IO, no clock, no randomness. Callers pass times and samples, and put every
change of the fleet into :meth:`Router.apply`; :meth:`Router.plan` chooses the workers of a request.
``README.md`` in this folder has an example, ``docs/router-api.md`` describes every public name.

Import public names from here; each is loaded from its module at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# fmt: off
# isort: off
if TYPE_CHECKING:
    from router_core.router import Captured, Router
    from router_core.freshness import TRUST, Freshness, Trust
    from router_core.changes import (
        OK, STAGES, Applied, Booked, Change, ConfigSet, Dequeued, Enqueued, Expired, Freed,
        IndexConnected, IndexMarked, KvEvent, LoadReported, OutputBlock, PrefillDone, Progressed,
        Stage, ThresholdsSet, TransferTableSet, WorkerAvailability, WorkerLost, WorkerUpserted,
    )
    from router_core.events import (
        DEVICE, BlocksRemoved, BlocksStored, CacheEvent, Cleared, WindowStored,
    )
    from router_core.workers import (
        MAX_RANKS, UNKNOWN_BATCHED_TOKENS, ModelRuntimeConfig, Role, Worker, WorkerWithDpRank,
    )
    from router_core.registry import CandidateSet, WorkerRegistry
    from router_core.routing_view import (
        Filter, Pin, Profile, RoutingRequest, RoutingView, Scorer, SelectionContext, WhatIf,
    )
    from router_core.policies import FILTERS, PROFILES, WorkerFilter
    from router_core.conditional_disagg import LOAD_POLICIES, BusyLine, Bypass, BypassRule
    from router_core.decision import (
        AllWorkersBusy, Candidate, Decision, FunnelStep, NoEligibleWorker, Outcome,
        PredictedPrefill, Queueing, Rejection, RoutingPlan, RoutingRefused,
    )
    from router_core.reasons import QueueFull, Reason
    from router_core.counterfactual import Flip, Preference, flip, flips, preference
    from router_core.sensitivity import (
        Consequence, LoadRange, PlanQuestion, Unknown, certain, consequences, waits,
    )
    from router_core.cost import (
        AddedColumn, CostInputs, CostParameters, TermColumn, probabilities,
    )
    from router_core.terms import TERM_BY_NAME, TERMS, Term, kv_terms
    from router_core.devices import DeviceBudget
    from router_core.taints import (
        NO_CONSTRAINTS, TOPOLOGY_PREFIX, RoutingConstraints, TaintConstraint, canonical_taint,
        constraints, parse_domains, topology_of,
    )
    from router_core.topology import (
        UNCONSTRAINED, ImpliedConstraints, RouterPolicy, implied_constraints, policy_conflict,
    )
    from router_core.transfer import BEYOND, Link, TransferTable
    from router_core.busy import REPORTED_TOKENS, THRESHOLD_SETTINGS, ThresholdSignal, Thresholds
    from router_core.config import (
        DEFAULT_PRESET, PRESETS, SETTINGS, Only, RouterConfig, Setting, find_setting,
        legacy_overlap_weight, preset,
    )
    from router_core.frozen import quick_init
    from router_core.hashing import (
        BlockHashes, hash_prompt, local_block_hashes, sequence_hashes, to_signed, to_unsigned,
    )
    from router_core.prompt_hasher import PromptHasher
    from router_core.index import IndexBound, PrefixIndex
    from router_core.learned import LearnedIndex
    from router_core.lower_tiers import TIERS, LowerTiers
    from router_core.worker_sets import Overlaps, slots_of
    from router_core.lean import LeanBooking, LeanIndex, LeanRouter
    from router_core.errors import (
        ConfigError, ConstraintError, HashingError, PolicyUnderivable, RouterCoreError,
        SnapshotError, WorkerError,
    )
    from router_core.load import ActiveRequest, ActiveSequences, PotentialLoad, decay_fraction
    from router_core.sessions import BoundWorker, Session, SessionTable
    from router_core.policy_classes import (
        NO_CLASSES, PolicyClass, PolicyClasses, PolicyTable, read_policy_classes,
    )
    from router_core.router_queue import ClassStats, QueueEntry, RouterQueue, Turn

__all__ = [  # noqa: RUF022 - grouped by module
    "Captured", "Router",
    "TRUST", "Freshness", "Trust",
    "OK", "STAGES", "Applied", "Booked", "Change", "ConfigSet", "Dequeued", "Enqueued", "Expired",
    "Freed", "IndexConnected", "IndexMarked", "KvEvent", "LoadReported", "OutputBlock",
    "PrefillDone", "Progressed", "Stage", "ThresholdsSet", "TransferTableSet",
    "WorkerAvailability", "WorkerLost",
    "WorkerUpserted",
    "DEVICE", "BlocksRemoved", "BlocksStored", "CacheEvent", "Cleared", "WindowStored",
    "MAX_RANKS", "UNKNOWN_BATCHED_TOKENS", "ModelRuntimeConfig", "Role", "Worker",
    "WorkerWithDpRank",
    "CandidateSet", "WorkerRegistry",
    "Filter", "Pin", "Profile", "RoutingRequest", "RoutingView", "Scorer", "SelectionContext",
    "WhatIf",
    "FILTERS", "PROFILES", "WorkerFilter",
    "LOAD_POLICIES", "BusyLine", "Bypass", "BypassRule",
    "AllWorkersBusy", "Candidate", "Decision", "FunnelStep", "NoEligibleWorker", "Outcome",
    "PredictedPrefill", "QueueFull", "Queueing", "Reason", "Rejection", "RoutingPlan",
    "RoutingRefused",
    "Flip", "Preference", "flip", "flips", "preference",
    "Consequence", "LoadRange", "PlanQuestion", "Unknown", "certain", "consequences", "waits",
    "AddedColumn", "CostInputs", "CostParameters", "TermColumn", "probabilities",
    "TERMS", "TERM_BY_NAME", "Term", "kv_terms",
    "DeviceBudget",
    "NO_CONSTRAINTS", "TOPOLOGY_PREFIX", "RoutingConstraints", "TaintConstraint", "canonical_taint",
    "constraints", "parse_domains", "topology_of",
    "UNCONSTRAINED", "ImpliedConstraints", "RouterPolicy", "implied_constraints", "policy_conflict",
    "BEYOND", "Link", "TransferTable",
    "REPORTED_TOKENS", "THRESHOLD_SETTINGS", "ThresholdSignal", "Thresholds",
    "DEFAULT_PRESET", "PRESETS", "SETTINGS", "Only", "RouterConfig", "Setting", "find_setting",
    "legacy_overlap_weight", "preset",
    "quick_init",
    "BlockHashes", "hash_prompt", "local_block_hashes", "sequence_hashes", "to_signed",
    "to_unsigned",
    "PromptHasher",
    "IndexBound", "PrefixIndex",
    "LearnedIndex",
    "TIERS", "LowerTiers",
    "LeanBooking", "LeanIndex", "LeanRouter",
    "Overlaps", "slots_of",
    "ConfigError", "ConstraintError", "HashingError", "PolicyUnderivable", "RouterCoreError",
    "SnapshotError", "WorkerError",
    "ActiveRequest", "ActiveSequences", "PotentialLoad", "decay_fraction",
    "BoundWorker", "Session", "SessionTable",
    "NO_CLASSES", "PolicyClass", "PolicyClasses", "PolicyTable", "read_policy_classes",
    "ClassStats", "QueueEntry", "RouterQueue", "Turn",
]

_MODULES = {
    "router": "Captured Router",
    "freshness": "TRUST Freshness Trust",
    "changes":
        "OK STAGES Applied Booked Change ConfigSet Dequeued Enqueued Expired Freed "
        "IndexConnected IndexMarked "
        "KvEvent LoadReported OutputBlock PrefillDone Progressed Stage ThresholdsSet "
        "TransferTableSet WorkerAvailability WorkerLost WorkerUpserted",
    "events": "DEVICE BlocksRemoved BlocksStored CacheEvent Cleared WindowStored",
    "workers": "MAX_RANKS UNKNOWN_BATCHED_TOKENS ModelRuntimeConfig Role Worker WorkerWithDpRank",
    "registry": "CandidateSet WorkerRegistry",
    "routing_view": "Filter Pin Profile RoutingRequest RoutingView Scorer SelectionContext WhatIf",
    "policies": "FILTERS PROFILES WorkerFilter",
    "conditional_disagg": "LOAD_POLICIES BusyLine Bypass BypassRule",
    "decision":
        "AllWorkersBusy Candidate Decision FunnelStep NoEligibleWorker Outcome PredictedPrefill "
        "Queueing Rejection RoutingPlan RoutingRefused",
    "reasons": "QueueFull Reason",
    "counterfactual": "Flip Preference flip flips preference",
    "sensitivity": "Consequence LoadRange PlanQuestion Unknown certain consequences waits",
    "cost": "AddedColumn CostInputs CostParameters TermColumn probabilities",
    "terms": "TERMS TERM_BY_NAME Term kv_terms",
    "devices": "DeviceBudget",
    "taints":
        "NO_CONSTRAINTS TOPOLOGY_PREFIX RoutingConstraints TaintConstraint canonical_taint "
        "constraints parse_domains topology_of",
    "topology": "UNCONSTRAINED ImpliedConstraints RouterPolicy implied_constraints policy_conflict",
    "transfer": "BEYOND Link TransferTable",
    "busy": "REPORTED_TOKENS THRESHOLD_SETTINGS ThresholdSignal Thresholds",
    "config":
        "DEFAULT_PRESET PRESETS SETTINGS Only RouterConfig Setting find_setting "
        "legacy_overlap_weight preset",
    "frozen": "quick_init",
    "hashing": "BlockHashes hash_prompt local_block_hashes sequence_hashes to_signed to_unsigned",
    "prompt_hasher": "PromptHasher",
    "index": "IndexBound PrefixIndex",
    "learned": "LearnedIndex",
    "lower_tiers": "LowerTiers TIERS",
    "lean": "LeanBooking LeanIndex LeanRouter",
    "worker_sets": "Overlaps slots_of",
    "errors":
        "ConfigError ConstraintError HashingError PolicyUnderivable RouterCoreError SnapshotError "
        "WorkerError",
    "load": "ActiveRequest ActiveSequences PotentialLoad decay_fraction",
    "sessions": "BoundWorker Session SessionTable",
    "policy_classes": "NO_CLASSES PolicyClass PolicyClasses PolicyTable read_policy_classes",
    "router_queue": "ClassStats QueueEntry RouterQueue Turn",
}
# fmt: on
# isort: on
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"router_core.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

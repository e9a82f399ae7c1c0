"""Predicted against reported reuse: does the index show what the engines have?

An engine that reports ``usage.prompt_tokens_details.cached_tokens`` shows how many prompt tokens it
reused. The router predicted that number when it chose the worker. A lasting difference means that
the index is wrong: another block size, lost events, other hashes, other tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from dynctl.documents.audit import AuditRow
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from router_core import Decision, Router

#: Workers that are counted; a fleet of more counts the first ones.
MAX_WORKERS: Final = 4096
#: Reasons by which requests are counted that are not compared.
_MOST_REASONS: Final = 32
_UNKNOWN: Final = "cache overlap not modelled"
#: Index states of a worker whose index can be judged: one that is current, and one without events,
#: whose cache is estimated or unknown.
_JUDGED: Final = ("current", "absent", "estimated")


@dataclass(slots=True)
class _Counts:
    worker: str
    role: str
    requests: int = 0
    hits: int = 0
    predicted: int = 0
    reported: int = 0
    causes: Counter[str] = field(default_factory=Counter)


class ReuseAudit(ServiceObserver):
    """Counters by worker. Requests without a report of the engine are not counted."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._counts: dict[int, _Counts] = {}
        #: Requests whose engine reported reuse and that were not compared, by reason.
        self.skipped: Counter[str] = Counter()

    def on_finished(self, record: RequestRecord) -> None:
        plan, reported = record.plan, record.cached_tokens
        if plan is None or reported is None or record.prompts != 1 or plan.refusal is not None:
            return
        hop = plan.prefill or plan.decode
        if hop is None or hop.winner is None:
            return
        worker = hop.workers[hop.winner]
        if not hop.overlap_modelled:
            self._skip(hop.notes[0] if hop.notes else _UNKNOWN)
            return
        counts = self._counts.get(worker.worker_id)
        if counts is None:
            self._forget_lost()
            if len(self._counts) >= MAX_WORKERS:
                return
            counts = _Counts(worker.name, worker.role.value)
            self._counts[worker.worker_id] = counts
        # More than the prompt has: another tokenizer's count, or a wrong one.
        impossible = reported > hop.isl_tokens
        reported = min(reported, hop.isl_tokens)
        predicted = _predicted_tokens(hop)
        counts.requests += 1
        counts.predicted += predicted
        counts.reported += reported
        if impossible:
            counts.causes["tokens"] += 1
        elif predicted // hop.block_size == reported // hop.block_size:
            counts.hits += 1
        else:
            counts.causes[self._cause(hop, predicted, reported, record.prompt_tokens)] += 1

    def _skip(self, reason: str) -> None:
        if reason in self.skipped or len(self.skipped) < _MOST_REASONS:
            self.skipped[reason] += 1

    def rows(self) -> list[AuditRow]:
        """The counters of the registered workers."""
        self._forget_lost()
        return [
            AuditRow(
                worker=counts.worker,
                worker_id=worker_id,
                role=counts.role,
                requests=counts.requests,
                hits=counts.hits,
                predicted_tokens=counts.predicted,
                reported_tokens=counts.reported,
                causes=dict(counts.causes),
            )
            for worker_id, counts in self._counts.items()
        ]

    def _forget_lost(self) -> None:
        registry = self._router.registry
        for worker_id in [counted for counted in self._counts if registry.get(counted) is None]:
            del self._counts[worker_id]

    def _cause(self, hop: Decision, predicted: int, reported: int, tokens: int | None) -> str:
        """The likely cause of a difference (``dynctl.documents.audit.CAUSES``)."""
        if tokens is not None and tokens != hop.isl_tokens:
            return "tokens"
        ref = hop.require()
        slot = self._router.registry.slot(ref.worker_id, ref.dp_rank)
        fresh = None if slot is None else self._router.freshness.get(slot)
        if fresh is not None and fresh.state not in _JUDGED:
            return "index"
        if reported < predicted:
            return "not_reused"
        shared = None if hop.inputs is None else hop.inputs.shared_blocks
        running = 0 if shared is None or hop.winner is None else shared[hop.winner]
        return "running" if running * hop.block_size >= reported else "not_indexed"


def _predicted_tokens(hop: Decision) -> int:
    """Tokens that the index shows for the winner, in whole blocks.

    Also those that a doubtful index is not credited for in the cost, and those of lower tiers in
    full: their weights are for what loading costs, while an engine reports what it did not compute.
    """
    if hop.winner is None or hop.inputs is None:
        return 0
    winner, inputs = hop.winner, hop.inputs
    # The blocks of the index, whether they count in full or not.
    indexed = inputs.overlap_blocks if inputs.indexed_blocks is None else inputs.indexed_blocks
    blocks = indexed[winner]
    for tier in (inputs.host_blocks, inputs.disk_blocks):
        blocks += 0 if tier is None else tier[winner]
    return blocks * hop.block_size

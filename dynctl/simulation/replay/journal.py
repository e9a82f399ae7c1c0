"""What happens in a replay, as the records of a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynctl import __version__
from dynctl.documents.recording import KINDS, Arrived, Changed, Decided, Finished, Record, Start
from dynctl.simulation.replay.agenda import Agenda
from dynctl.simulation.replay.fleet import ReplayPolicy
from dynctl.simulation.replay.result import changed_settings
from dynctl.simulation.replay.state import LiveRequest
from router_core import Change, Decision, RoutingPlan

_STATUS = {"completed": 200, "refused": 503}


class Journal:
    """Passes records to ``write``, at the time of the agenda; without it, does nothing."""

    def __init__(self, agenda: Agenda, model: str, write: Callable[[Record], None] | None) -> None:
        self._agenda = agenda
        self._model = model
        self._write = write

    def note_start(self, policy: ReplayPolicy, block_size: int) -> None:
        if self._write is not None:
            self._write(
                Start(
                    at=self._agenda.seconds,
                    source="simulation",
                    router=f"replay of {policy.name}",
                    version=__version__,
                    settings=changed_settings(policy.config),
                    block_sizes={self._model: block_size},
                    exact_reuse=True,
                    learns=True,
                    complete=frozenset(KINDS),
                )
            )

    def note_arrival(self, live: LiveRequest, hashes: Sequence[int], block_size: int) -> None:
        if self._write is not None:
            trace = live.trace
            self._write(
                Arrived(
                    self._agenda.seconds,
                    trace.id,
                    self._model,
                    trace.input_tokens,
                    block_size,
                    tuple(hashes),
                    tenant=trace.tenant,
                    session=trace.session,
                    priority=trace.priority,
                    output_limit=trace.output_tokens,
                    router=live.frontend.number,
                )
            )

    def note_change(self, change: Change) -> None:
        if self._write is not None:
            self._write(Changed(self._agenda.seconds, change))

    def note_decision(self, live: LiveRequest, plan: RoutingPlan) -> None:
        if self._write is None:
            return
        first, final = plan.first, plan.final
        cached = best = None
        if first.inputs is not None and first.winner is not None:
            cached = float(first.overlap_blocks(first.winner))
            best = float(first.inputs.most_overlap)
        self._write(
            Decided(
                self._agenda.seconds,
                live.trace.id,
                plan.model,
                _rank_of(plan.prefill),
                _rank_of(plan.decode),
                cached,
                best,
                None if first.winner is None else first.costs[first.winner],
                first.margin,
                final.outcome,
                why="session" if first.session_kept else "",
            )
        )

    def note_end(
        self, live: LiveRequest, outcome: str, ttft: float | None, itl: float | None
    ) -> None:
        if self._write is not None:
            trace = live.trace
            self._write(
                Finished(
                    self._agenda.seconds,
                    trace.id,
                    _STATUS.get(outcome, 502),
                    outcome,
                    trace.input_tokens,
                    live.cached_tokens,
                    trace.output_tokens if outcome == "completed" else None,
                    ttft,
                    itl,
                    live.queued_s,
                )
            )


def _rank_of(decision: Decision | None) -> tuple[int, int] | None:
    if decision is None or decision.ref is None:
        return None
    return decision.ref.worker_id, decision.ref.dp_rank

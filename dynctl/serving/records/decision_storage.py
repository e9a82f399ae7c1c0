"""The two forms in which the decision memory keeps a hop: packed whole, or in brief.

Packing happens during a request, so it must be cheap and leave few objects for the garbage
collector: tens of thousands of decisions are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from router_core import (
    AddedColumn,
    BoundWorker,
    CostInputs,
    CostParameters,
    Decision,
    DeviceBudget,
    FunnelStep,
    PredictedPrefill,
    Queueing,
    RoutingConstraints,
    Stage,
    TermColumn,
    Worker,
)

# Bytes that CPython 3.11 allocates, measured with sys.getsizeof and rounded up: estimates on the
# large side. A test compares them with tracemalloc.
_WHOLE_HOP = 640
_BRIEF_HOP = 560
_STEP = 96
_REJECTION = 320
_NUMBER = 8
_ADDED = 280  # a column of a term, of one candidate
_CHOSEN_AMONG = 160  # a pair, or a device budget
CONSTRAINT_BYTES = 240

_COLUMNS = ("inputs", "terms", "costs")
_PLAIN = tuple(field.name for field in fields(Decision) if field.name not in _COLUMNS)
_plain_of = attrgetter(*_PLAIN)
_inputs_of = attrgetter(*(field.name for field in fields(CostInputs)))
#: The columns of the inputs, after three numbers of the request and before those of terms.
_INPUT_COLUMNS = tuple(field.name for field in fields(CostInputs))[3:-1]
_input_columns_of = attrgetter(*_INPUT_COLUMNS)
_term_of = attrgetter(*(field.name for field in fields(TermColumn)))
# A column may be any sequence; other types than MessagePack's are written as a list.
_encoder = msgspec.msgpack.Encoder(enc_hook=list)


class PackedHop(NamedTuple):
    """One hop with every candidate: its columns are one MessagePack value, without loss. Terms and
    costs that follow from the inputs are left out.

    ``plain`` holds the other fields of the Decision, in their order; four of them are repeated
    because the memory reads them without unpacking.
    """

    plain: tuple[Any, ...]
    workers: Sequence[Worker]
    winner: int | None
    funnel: tuple[FunnelStep, ...]
    constraints: RoutingConstraints
    columns: bytes

    @property
    def worker(self) -> Worker | None:
        return None if self.winner is None else self.workers[self.winner]

    def expand(self) -> Decision:
        """The original decision."""
        inputs, terms, costs = msgspec.msgpack.decode(self.columns)
        decision = Decision(
            **dict(zip(_PLAIN, self.plain, strict=True)),
            inputs=None if inputs is None else _inputs(inputs),
            terms=tuple(TermColumn(*term) for term in terms),
            costs=[0.0] * len(self.workers) if costs is None else costs,
        )
        return decision.replay() if costs is None else decision


class BriefHop(NamedTuple):
    """One hop without the candidates below the second.

    A row (``first`` is the winner's, ``second`` the runner-up's) is ``(worker, ref, cost, *inputs,
    added, *term values)``: the inputs in the order of the columns of CostInputs, None for a column
    that is not there, and the columns that terms added. ``counts`` are the funnel's (entered,
    left), flat; ``terms`` are (name, unit, weight).
    """

    id: str
    model: str
    stage: Stage
    mode: str
    isl_tokens: int
    block_size: int
    temperature: float
    sample: float
    parameters: CostParameters
    constraints: RoutingConstraints
    overlap_modelled: bool
    notes: tuple[str, ...]
    lora_name: str | None
    salted: bool
    candidates: int
    first: tuple[Any, ...]
    second: tuple[Any, ...] | None
    filters: tuple[str, ...]
    counts: tuple[int, ...]
    terms: tuple[tuple[str, str, float], ...]
    predicted: PredictedPrefill | None
    pair: tuple[int, int] | None
    budget: DeviceBudget | None
    session: BoundWorker | None
    queue: Queueing | None

    def expand(self) -> Decision:
        """A Decision over the kept rows; a note gives the number of all candidates."""
        rows = (self.first,) if self.second is None else (self.first, self.second)
        columns = list(zip(*rows, strict=True))
        counts = iter(self.counts)
        note = f"kept in brief: {len(rows)} of {self.candidates} scored candidates"
        prompt_blocks = self.isl_tokens // self.block_size
        inputs = None
        end = 3 + len(_INPUT_COLUMNS)
        if columns[3][0] is not None:
            kept = (None if column[0] is None else column for column in columns[3:end])
            named: dict[str, Any] = dict(zip(_INPUT_COLUMNS, kept, strict=True))
            added = None if columns[end][0] is None else tuple(map(_join_columns, *columns[end]))
            inputs = CostInputs(
                self.isl_tokens, self.block_size, prompt_blocks, **named, added=added
            )
        return Decision(
            id=self.id,
            stage=self.stage,
            mode=self.mode,
            model=self.model,
            outcome="selected",
            isl_tokens=self.isl_tokens,
            block_size=self.block_size,
            prompt_blocks=prompt_blocks,
            temperature=self.temperature,
            sample=self.sample,
            parameters=self.parameters,
            constraints=self.constraints,
            funnel=tuple(
                FunnelStep(name, entered, next(counts))
                for name, entered in zip(self.filters, counts, strict=False)
            ),
            workers=columns[0],
            refs=columns[1],
            costs=columns[2],
            inputs=inputs,
            terms=tuple(
                TermColumn(name, unit, weight, column)
                for (name, unit, weight), column in zip(self.terms, columns[end + 1 :], strict=True)
            ),
            winner=0,
            overlap_modelled=self.overlap_modelled,
            lora_name=self.lora_name,
            salted=self.salted,
            predicted=self.predicted,
            pair=self.pair,
            budget=self.budget,
            session=self.session,
            queue=self.queue,
            notes=(*self.notes, note) if len(rows) < self.candidates else self.notes,
        )


def pack(decision: Decision) -> PackedHop:
    """The whole decision with its columns in bytes: less memory than lists, and no objects."""
    inputs = decision.inputs
    follow = decision.costs_follow
    return PackedHop(
        _plain_of(decision),
        decision.workers,
        decision.winner,
        decision.funnel,
        decision.constraints,
        _encoder.encode(
            (
                None if inputs is None else _inputs_of(inputs),
                [] if follow else [_term_of(term) for term in decision.terms],
                None if follow else decision.costs,
            )
        ),
    )


def brief(decision: Decision) -> BriefHop:
    """The hop with only its winner and runner-up; the decision must have a winner."""
    winner = decision.winner
    if winner is None:
        raise ValueError(f"decision {decision.id} has no winner; keep refusals whole")
    other = decision.runner_up
    second = None if other is None else _row(decision, other)
    pair = None
    if decision.pair is not None:
        pair = (0, 1) if decision.pair[0] == winner else (1, 0)
    counts: list[int] = []
    for step in decision.funnel:
        counts += (step.entered, step.left)
    return BriefHop(
        decision.id,
        decision.model,
        decision.stage,
        decision.mode,
        decision.isl_tokens,
        decision.block_size,
        decision.temperature,
        decision.sample,
        decision.parameters,
        decision.constraints,
        decision.overlap_modelled,
        decision.notes,
        decision.lora_name,
        decision.salted,
        len(decision.costs),
        _row(decision, winner),
        second,
        tuple([step.filter for step in decision.funnel]),
        tuple(counts),
        tuple([(term.name, term.unit, term.weight) for term in decision.terms]),
        decision.predicted,
        pair,
        decision.budget,
        decision.session,
        decision.queue,
    )


def _row(decision: Decision, i: int) -> tuple[Any, ...]:
    inputs = decision.inputs
    read: Sequence[Any] = (None,) * (len(_INPUT_COLUMNS) + 1)
    if inputs is not None:
        read = [None if column is None else column[i] for column in _input_columns_of(inputs)]
        added = inputs.added
        read.append(None if added is None else tuple(column.at_position(i) for column in added))
    values = [term.values[i] for term in decision.terms]
    return (decision.workers[i], decision.refs[i], decision.costs[i], *read, *values)


def _inputs(packed: Sequence[Any]) -> CostInputs:
    """The inputs as they were encoded, in the order of their fields."""
    added = packed[-1]
    columns = None if added is None else tuple(AddedColumn(*column) for column in added)
    return CostInputs(*[*packed[:-1], columns])


def _join_columns(*parts: AddedColumn) -> AddedColumn:
    """One column of several, of a candidate each."""
    values = [value for part in parts for value in part.values]
    labels = [label for part in parts for label in part.labels or ()]
    return AddedColumn(parts[0].name, values, labels or None)


def packed_size(decision: Decision, packed: PackedHop) -> int:
    """Bytes of a hop kept whole, without its workers: cards and the columns of candidates."""
    size = _WHOLE_HOP + len(packed.columns)
    size += CONSTRAINT_BYTES * len(decision.constraints.items)
    size += _STEP * len(decision.funnel)
    for step in decision.funnel:
        if step.rejected:
            size += _REJECTION * len(step.rejected)
    if decision.pair is not None or decision.budget is not None:
        size += _CHOSEN_AMONG
    for note in decision.notes:
        size += 2 * len(note)
    return size + 2 * len(decision.message or "")


def brief_size(decision: Decision) -> int:
    """Bytes of a hop kept in brief, without the cards of its two workers."""
    added = 0
    if decision.inputs is not None and decision.inputs.added is not None:
        added = len(decision.inputs.added)
    numbers = len(_INPUT_COLUMNS) + len(decision.terms)
    size = _BRIEF_HOP + 2 * (40 + 3 * _NUMBER * numbers) + 48 * len(decision.terms)
    size += 3 * _NUMBER * len(decision.funnel) + 2 * _ADDED * added
    if decision.pair is not None or decision.budget is not None:
        size += _CHOSEN_AMONG
    return size + CONSTRAINT_BYTES * len(decision.constraints.items)

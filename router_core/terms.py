"""The terms of the cost: each is one value that says how it is computed, weighted, read and named.

Cost, counterfactuals, sensitivity, decision log and screens walk :data:`TERMS`. A new term is one
:class:`Term` in it, and where users set its weight a field of `RouterConfig` that ``weighs`` it.

The formula, lower is better::

    prefill_blocks = max(0, (active_prefill_tokens + isl) / block_size - credit)
    credit         = overlap_score_credit * decay * overlap_blocks
                     + host_cache_hit_weight * host_blocks + disk_cache_hit_weight * disk_blocks
    decay          = 1 / (1 + credit_decay * ((P - min P) / block_size) / ceil(isl / block_size))
    decode_blocks  = active blocks + complete prompt blocks that are not active there yet
    cost           = multiplier * (prefill_load_scale * prefill_blocks + decode_blocks
                                   + decode_active_request_weight * active_requests
                                   + session_affinity
                                   + kv_transfer_weight * transfer seconds) + following

Prefill blocks are fractional (34 tokens of 16 are 2.125 blocks), decode blocks count complete
blocks (34 tokens: 2). Cached blocks in host memory and on disk count by their weights, unless the
overlap_score_credit is 0. On the prefill hop decode blocks are not tracked; on the decode hop
neither prefill nor overlap counts. Where prefill is not tracked on an aggregated worker, and on the
decode hop with conditional disaggregation, the credit is taken from the decode blocks instead. The
session affinity, the transfer and ``following`` are terms of this router, off by default: a table
of links (:mod:`router_core.transfer`) gives the seconds, and where pairs are chosen
(:mod:`router_core.pairs`), ``following`` is the lowest cost of a decode worker after this prefill
worker. Source of the others: Dynamo 1.6.1, verified on its log to three digits; the 0.9 formula is
the same with prefill_load_scale = overlap_score_weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import add, sub, truediv
from typing import Final

from router_core.cost import AddedColumn, CostInputs, CostParameters, TermColumn
from router_core.registry import WorkerRegistry
from router_core.routing_view import (
    RoutingRequest,
    RoutingView,
    SelectionContext,
    bound_rank,
    compares_sessions,
)
from router_core.transfer import BEYOND, TransferTable, transfer_columns

#: Slots of the candidates and the mask of them -> a column of the term, None where it does not
#: count on this hop.
ColumnReader = Callable[[RoutingView, SelectionContext, Sequence[int], int], AddedColumn | None]


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the cost, in the order in which terms are added.

    ``unit``: of its values, before the weight. ``heading``: over its column; ``phrase``: in a
    formula. ``weight``: the parameter it is multiplied by; None: 1.
    A term is either computed from inputs that every decision has (``values``), and counts where the
    parameter ``switch`` is set; or it has a column of its own (``read``), and counts where that
    gives one. ``needs``: a part of the view without which it is not read.
    ``load``: the load that it rises with, as :class:`router_core.Flip` names it, and that load's
    input. ``flips``: parameters of which a smaller or larger one may change the winner, those that
    are its ``weight`` and others. ``prefill_only``: it counts on no decode hop.
    ``ordered``: a sum of what the order of load (:mod:`router_core.load_order`) orders by and of
    what the ranks of a class have in common; where another term counts, all columns decide.
    ``digits``: after the point in a log line; None: as many as it has.
    """

    name: str
    unit: str
    heading: str
    phrase: str
    weight: str | None = None
    switch: str | None = None
    values: Callable[[CostInputs, CostParameters], Sequence[float]] | None = None
    needs: str | None = None
    read: ColumnReader | None = None
    load: tuple[str, str] | None = None
    flips: tuple[str, ...] = ()
    prefill_only: bool = False
    ordered: bool = False
    digits: int | None = None

    def text(self, value: float) -> str:
        """A value as log lines show it."""
        return f"{value:.10g}" if self.digits is None else f"{value:.{self.digits}f}"


def _prefill_blocks(inputs: CostInputs, parameters: CostParameters) -> list[float]:
    tokens = map(add, inputs.prefill_tokens, repeat(inputs.isl_tokens))
    blocks = list(map(truediv, tokens, repeat(inputs.block_size)))
    _subtract_credit(blocks, inputs, parameters)
    return blocks


def _decode_blocks(inputs: CostInputs, parameters: CostParameters) -> list[float]:
    blocks: list[float] = list(map(add, inputs.active_blocks, repeat(inputs.prompt_blocks)))
    if inputs.shared_blocks is not None:
        blocks = list(map(sub, blocks, inputs.shared_blocks))
    if not parameters.track_prefill_tokens:
        _subtract_credit(blocks, inputs, parameters)
    return blocks


def _active_requests(inputs: CostInputs, parameters: CostParameters) -> Sequence[float]:
    return inputs.active_requests


def _subtract_credit(blocks: list[float], inputs: CostInputs, parameters: CostParameters) -> None:
    """Subtract from the blocks of each candidate the credit of its cached prefix, down to 0."""
    credit, overlap = parameters.overlap_score_credit, inputs.overlap_blocks
    lower = inputs.host_blocks is not None or inputs.disk_blocks is not None
    if not credit or not (lower or any(overlap)):
        return
    cached = compress(range(len(overlap)), overlap)
    decay = parameters.overlap_score_credit_decay
    if decay and parameters.track_prefill_tokens:
        size, tokens = inputs.block_size, inputs.prefill_tokens
        least = min(tokens)
        per_token = decay / size / max(1, math.ceil(inputs.isl_tokens / size))
        credits = {i: credit * overlap[i] / (1.0 + per_token * (tokens[i] - least)) for i in cached}
    else:
        credits = {i: credit * overlap[i] for i in cached}
    tiers = (
        (inputs.host_blocks, parameters.host_cache_hit_weight),
        (inputs.disk_blocks, parameters.disk_cache_hit_weight),
    )
    for column, weight in tiers:
        if column is not None and weight:
            for i in compress(range(len(column)), column):
                credits[i] = credits.get(i, 0.0) + weight * column[i]
    for i, credited in credits.items():
        left = blocks[i] - credited
        blocks[i] = left if left > 0 else 0.0


def _session_affinity(
    view: RoutingView, context: SelectionContext, slots: Sequence[int], mask: int
) -> AddedColumn | None:
    """What leaving the worker of the request's session costs, where that is compared."""
    if context.request.session is None or not compares_sessions(view):
        return None
    bound = bound_rank(view, context)
    if bound is None or not mask >> bound.slot & 1:
        return None
    more = view.config.router_session_affinity_yield_blocks
    return AddedColumn("session_affinity", [0.0 if slot == bound.slot else more for slot in slots])


def _transfer(
    view: RoutingView, context: SelectionContext, slots: Sequence[int], mask: int
) -> AddedColumn | None:
    """The seconds from where the request or its KV cache is, and the classes of the distances.

    None where the place, or the size of the KV cache, is unknown.
    """
    table = view.transfer
    if table is None:
        return None
    if context.stage == "decode":
        if context.source is None:
            return None
        place = table.place(context.source)
        seconds = decode_seconds(view.registry, table, context.request)
    else:
        if view.own_place is None:
            return None
        place, seconds = view.own_place, table.seconds(0)
    if seconds is None:
        return None
    masks = view.classes.masks_from(view.registry, table, place)
    column, classes = transfer_columns(masks, slots, mask, seconds)
    names = (*table.names, BEYOND)
    return AddedColumn("transfer", column, list(map(names.__getitem__, classes)))


def decode_seconds(
    registry: WorkerRegistry, table: TransferTable, request: RoutingRequest
) -> tuple[float, ...] | None:
    """The time of the request's KV transfer in each class; None where its size is unknown.

    An alias or an adapter has the size of its workers' model.
    """
    size = table.size_of(request.model)
    if size is None and table.by_model:
        size = table.size_of(registry.model_of(request.model))
    return None if size is None else table.seconds(request.isl_tokens * size)


#: The transfer stays the last one: :mod:`router_core.pairs` adds it to the sum of the others.
TERMS: Final[tuple[Term, ...]] = (
    Term(
        "prefill_blocks",
        "blocks",
        heading="prefill",
        phrase="prefill",
        weight="prefill_load_scale",
        switch="track_prefill_tokens",
        values=_prefill_blocks,
        load=("active_prefill_tokens", "prefill_tokens"),
        flips=("prefill_load_scale", "overlap_score_credit"),
        prefill_only=True,
        ordered=True,
    ),
    Term(
        "decode_blocks",
        "blocks",
        heading="decode",
        phrase="decode",
        switch="track_active_blocks",
        values=_decode_blocks,
        load=("active_decode_blocks", "active_blocks"),
        ordered=True,
    ),
    Term(
        "active_requests",
        "requests",
        heading="active",
        phrase="active requests",
        weight="decode_active_request_weight",
        switch="decode_active_request_weight",
        values=_active_requests,
        load=("active_requests", "active_requests"),
        flips=("decode_active_request_weight",),
    ),
    Term(
        "session_affinity",
        "blocks",
        heading="session",
        phrase="session affinity",
        needs="sessions",
        read=_session_affinity,
    ),
    Term(
        "transfer",
        "seconds",
        heading="transfer",
        phrase="transfer seconds",
        weight="kv_transfer_weight",
        needs="transfer",
        read=_transfer,
        flips=("kv_transfer_weight",),
        digits=6,
    ),
)
#: The term of mode round-robin.
TURNS: Final = Term("turns_until_due", "turns", heading="turns", phrase="turns until due")
#: The terms of all modes.
TERM_BY_NAME: Final = {term.name: term for term in (*TERMS, TURNS)}


def kv_terms(inputs: CostInputs, parameters: CostParameters) -> tuple[TermColumn, ...]:
    """The terms of the formula, without those that do not count on this hop."""
    counted = []
    added = {} if inputs.added is None else {column.name: column.values for column in inputs.added}
    for term in TERMS:
        values: Sequence[float]
        weight = 1.0
        if term.values is None:
            if term.name not in added:
                continue
            values = added[term.name]
            if term.weight is not None:
                weight = parameters.weight(term.weight)
        elif getattr(parameters, term.switch or ""):
            values = term.values(inputs, parameters)
            if term.weight is not None:
                weight = getattr(parameters, term.weight)
        else:
            continue
        counted.append(TermColumn(term.name, term.unit, weight, values))
    return tuple(counted)


def added_columns(
    view: RoutingView,
    context: SelectionContext,
    slots: Sequence[int],
    mask: int,
    parameters: CostParameters,
) -> tuple[AddedColumn, ...] | None:
    """The columns of the terms that have one of their own on this hop; None without any."""
    columns: tuple[AddedColumn, ...] = ()
    for term in TERMS:
        if term.read is None or (term.needs is not None and getattr(view, term.needs) is None):
            continue
        if term.weight is not None and not parameters.weight(term.weight):
            continue
        column = term.read(view, context, slots, mask)
        if column is not None:
            columns += (column,)
    return columns or None

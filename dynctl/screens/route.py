"""`route`: the short answer, and the explain screen of `--explain` and `why`.

Both draw a RouteResult and nothing else, so a saved decision, a frontend's answer and a dry run
on a view look the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from dynctl.documents.decisions import ClientResponse, PastDecision
from dynctl.documents.route_result import DecisionResult, ObservedChoice, RouteResult
from dynctl.screens import route_sentences as words
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, table
from dynctl.screens.numbers import amount, blocks, plural
from dynctl.screens.route_candidates import HopTable

#: Candidates shown per hop without --all.
TOP = 8
_LABEL = 9
_TITLE = 11


@dataclass(frozen=True, slots=True)
class ExplainScreen:
    """Draws a RouteResult; ``show_all`` lists every candidate and rejection of a large fleet."""

    show_all: bool = False

    def __call__(self, result: RouteResult, canvas: Canvas) -> str:
        past = result if isinstance(result, PastDecision) else None
        lines = [] if result.observed is UNSET else _observed(result.observed, canvas)
        if result.prefill is None and result.decode is None and lines:
            return "\n".join(lines) + "\n"
        lines += _labelled(canvas, "request", _request(result))
        lines += _doubts(result, canvas, show_all=self.show_all)
        for text in words.worker_sets(result):
            lines += _labelled(canvas, "set", text)
        for assumption in words.assumptions(result):
            lines += _labelled(canvas, "assumed", assumption)
        for constraint in words.request_constraints(result):
            lines += _labelled(canvas, "asks", constraint)
        for verdict in words.bypass(result):
            lines += _labelled(canvas, "hop", verdict)
        hops = [hop for hop in (result.prefill, result.decode) if hop is not None]
        limit = None if self.show_all else TOP
        table = HopTable.of(result, hops, canvas, limit)
        for number, hop in enumerate(hops, start=1):
            lines.append("")
            lines += self._hop(number, hop, result, table, canvas)
            if hop is result.prefill and result.decode is not None:
                lines.append("")
                for implied in words.implied(result):
                    lines += canvas.paragraph(implied, first="  implies  ")
        lines.append("")
        for text in words.pairs(result):
            lines += _labelled(canvas, "pairs", text)
        if past is not None and past.response.state == "failed" and not result.ok:
            lines += _labelled(canvas, "retry", words.no_retry(past), bold=True)
        else:
            lines += _answer(result, canvas)
        if past is not None:
            lines += _response(past.response, canvas)
        return "\n".join(lines) + "\n"

    def _hop(
        self,
        number: int,
        hop: DecisionResult,
        result: RouteResult,
        table: HopTable,
        canvas: Canvas,
    ) -> list[str]:
        title = f"{number} {hop.stage}".ljust(_TITLE)
        funnel = words.funnel(hop, result.model, canvas.screen_width - len(title) - 1)
        lines = canvas.paragraph(funnel, first=f"{title} ") or [title]
        lines[0] = canvas.bold(title) + lines[0][len(title) :]
        formula = words.formula(hop)
        if formula:
            lines += canvas.paragraph(formula, first="  cost = ", rest="         ")
        lines += table.lines(hop)
        for sentence in words.verdict(hop, result):
            lines += canvas.paragraph(sentence)
        return lines


def _request(result: RouteResult) -> str:
    parts = [
        words.counted(result, result.tokens, "token"),
        f"{words.counted(result, result.blocks, 'full block')} of {result.block_size}",
        f"model {result.model}",
        f"mode {result.mode}",
    ]
    if result.mode == "kv":
        final = result.decode or result.prefill
        parts.append(f"temperature {amount(final.temperature if final else 0.0)}")
    return ", ".join(parts)


def _doubts(
    result: RouteResult, canvas: Canvas, *, show_all: bool = False, label: int = _LABEL
) -> list[str]:
    """Whether the answer is certain, and what could change it."""
    first = words.certainty(result)
    if first is None:
        return []
    name, text = first
    lines = canvas.paragraph(text, first=name.ljust(label), rest=" " * label)
    for one in result.doubts:
        if one.matters or show_all:
            lines += canvas.paragraph(
                f"{one.what}: {one.effect}. {_sentence(one.resolve)}",
                first=f"  {one.code}  ",
                rest=" " * 11,
            )
    return lines


def _sentence(text: str) -> str:
    """``text`` with a capital letter; commands and options stay as users type them."""
    return text if text.startswith("dynctl ") else text[:1].upper() + text[1:]


def _observed(choice: ObservedChoice, canvas: Canvas) -> list[str]:
    """What a Dynamo frontend chose; the rest of the screen is a prediction."""
    if choice.refused:
        return _labelled(canvas, "refused", words.observed(choice), bold=True)
    return _labelled(canvas, "chosen", words.observed(choice), bold=True)


def _response(response: ClientResponse, canvas: Canvas) -> list[str]:
    """What became of the request: the client's response, and the requests to engines."""
    text = words.response(response)
    if not text:
        return []
    lines = _labelled(canvas, "outcome", text, bold=response.state != "complete")
    for number, attempt in enumerate(words.attempts(response), start=1):
        first = ("engines" if number == 1 else "").ljust(_LABEL)
        lines += canvas.paragraph(f"{number}. {attempt}", first=first, rest=" " * (_LABEL + 3))
    return lines


def _answer(result: RouteResult, canvas: Canvas) -> list[str]:
    first, *others = words.answer(result)
    label = "answer" if result.observed is UNSET else "predicts"
    lines = _labelled(canvas, label, first, bold=True)
    for label, text in words.remedies(result):
        lines += _labelled(canvas, label, text)
    for text in others:
        lines += canvas.paragraph(text, first=" " * _LABEL)
    return lines


def _labelled(canvas: Canvas, label: str, text: str, *, bold: bool = False) -> list[str]:
    lines = canvas.paragraph(text, first=label.ljust(_LABEL), rest=" " * _LABEL)
    return [canvas.bold(line) for line in lines] if bold else lines


# -- without --explain -------------------------------------------------------------------------


def route_short(result: RouteResult, canvas: Canvas) -> str:
    """The answer and one line per hop; `--explain` shows the rest."""
    hops = [hop for hop in (result.prefill, result.decode) if hop is not None]
    chosen = [hop for hop in hops if hop.winner is not None]
    first, *others = words.answer(result)
    lines = [first]
    if result.ok:
        lines = [table(_hop_columns(result), chosen, canvas).rstrip("\n"), "", f"answer  {first}"]
    else:
        lines = [f"answer  {first}"]
        lines += [
            line
            for label, text in words.remedies(result)
            for line in canvas.paragraph(text, first=label.ljust(8))
        ]
    for text in others:
        lines += canvas.paragraph(text, first=" " * 8)
    for verdict in words.bypass(result):
        lines += canvas.paragraph(verdict, first="hop     ")
    lines += _doubts(result, canvas, label=8)
    for text in words.worker_sets(result):
        lines += canvas.paragraph(text, first="set     ")
    for assumption in words.assumptions(result):
        lines += canvas.paragraph(assumption, first="assumed ")
    return "\n".join(lines) + "\n"


def _hop_columns(result: RouteResult) -> list[Column[DecisionResult]]:
    domain = words.primary_domain(result)

    def won(hop: DecisionResult) -> Any:
        winner = hop.winner
        return next(
            row
            for row in hop.candidates
            if winner is not None
            and (row.worker_id, row.dp_rank) == (winner.worker_id, winner.dp_rank)
        )

    def cached(hop: DecisionResult) -> str:
        if not words.credits_overlap(hop):
            return "-"
        blocks_cached = won(hop).overlap_blocks
        unknown = blocks_cached is None or not hop.overlap_modelled
        cached = "?" if unknown else f"{blocks_cached:,}"
        return f"{cached} of {words.counted(result, result.blocks)}"

    def ahead(hop: DecisionResult) -> str:
        if len(hop.candidates) == 1:
            return "only one"
        if hop.tied:
            return f"tie of {len(hop.tied)}"
        return f"+{blocks(hop.margin)}" if hop.margin is not None and hop.margin >= 0 else "drawn"

    columns: list[Column[DecisionResult]] = [
        Column("stage", "HOP", lambda hop: hop.stage),
        Column("worker", "WORKER", lambda h: won(h).worker, name=True),
    ]
    if domain is not None:
        columns.append(
            Column(
                "domain",
                domain.upper(),
                lambda hop: won(hop).domains.get(domain),
            )
        )
    columns += [
        Column("cached", "CACHED", lambda hop: won(hop).overlap_blocks, text=cached, right=True),
        Column("cost", "COST", lambda h: won(h).cost, form=blocks, right=True),
        Column("margin", "AHEAD", lambda hop: hop.margin, text=ahead, right=True),
        Column(
            "scored",
            "OF",
            lambda hop: len(hop.candidates),
            text=lambda hop: plural(len(hop.candidates), "candidate"),
            right=True,
            rank=1,
        ),
    ]
    return columns

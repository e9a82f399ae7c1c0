"""`route`: the short answer, and the explain screen of `--explain` and `why`.

Both draw a RouteResult and nothing else, so a saved decision, a frontend's answer and a dry run
on a view look the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import UNSET

from dynctl.documents.decisions import ClientResponse, PastDecision
from dynctl.documents.route_result import (
    CandidateRow,
    DecisionResult,
    ObservedChoice,
    RouteResult,
)
from dynctl.screens import route_sentences as words
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, table
from dynctl.screens.numbers import amount, blocks, plural
from dynctl.screens.route_candidates import HopTable
from dynctl.screens.route_refusals import remedies

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
        lines = [] if result.observed is UNSET else _observed_lines(result.observed, canvas)
        if not result.hops and lines:
            return "\n".join(lines) + "\n"
        lines += _labelled_lines(canvas, "request", _request(result))
        lines += _doubts(result, canvas, show_all=self.show_all)
        for label, text in _circumstances(result):
            lines += _labelled_lines(canvas, label, text)
        lines += self._hops(result, canvas)
        lines.append("")
        for text in words.pairs(result):
            lines += _labelled_lines(canvas, "pairs", text)
        if past is not None and past.response.state == "failed" and not result.ok:
            lines += _labelled_lines(canvas, "retry", words.no_retry(past), bold=True)
        else:
            lines += _answer(result, canvas)
        if past is not None:
            lines += _response(past.response, canvas)
        return "\n".join(lines) + "\n"

    def _hops(self, result: RouteResult, canvas: Canvas) -> Iterator[str]:
        """The hops, and between them what the first one implies for the second."""
        table = HopTable.from_hops(result, result.hops, canvas, None if self.show_all else TOP)
        for number, hop in enumerate(result.hops, start=1):
            yield ""
            yield from _hop(number, hop, result, table, canvas)
            if hop is result.prefill and result.decode is not None:
                yield ""
                for text in words.implied_constraints(result):
                    yield from canvas.paragraph(text, first="  implies  ")


def _hop(
    number: int, hop: DecisionResult, result: RouteResult, table: HopTable, canvas: Canvas
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


def _circumstances(result: RouteResult) -> Iterator[tuple[str, str]]:
    """What the decision starts from, with labels."""
    yield from (("set", text) for text in words.worker_sets(result))
    yield from (("assumed", text) for text in words.assumptions(result))
    yield from (("asks", text) for text in words.request_constraints(result))
    yield from (("hop", text) for text in words.bypass(result))


def _request(result: RouteResult) -> str:
    parts = [
        words.token_count_text(result, result.tokens, "token"),
        f"{words.token_count_text(result, result.blocks, 'full block')} of {result.block_size}",
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
    for doubt in result.doubts:
        if doubt.matters or show_all:
            lines += canvas.paragraph(
                f"{doubt.what}: {doubt.effect}. {_sentence(doubt.resolve)}",
                first=f"  {doubt.code}  ",
                rest=" " * 11,
            )
    return lines


def _sentence(text: str) -> str:
    """``text`` with a capital letter; commands and options stay as users type them."""
    return text if text.startswith("dynctl ") else text[:1].upper() + text[1:]


def _observed_lines(choice: ObservedChoice, canvas: Canvas) -> list[str]:
    """What a Dynamo frontend chose; the rest of the screen is a prediction."""
    label = "refused" if choice.refused else "chosen"
    return _labelled_lines(canvas, label, words.observed_text(choice), bold=True)


def _response(response: ClientResponse, canvas: Canvas) -> list[str]:
    """What became of the request: the client's response, and the requests to engines."""
    text = words.response_text(response)
    if not text:
        return []
    lines = _labelled_lines(canvas, "outcome", text, bold=response.state != "complete")
    for number, attempt in enumerate(words.attempt_texts(response), start=1):
        first = ("engines" if number == 1 else "").ljust(_LABEL)
        lines += canvas.paragraph(f"{number}. {attempt}", first=first, rest=" " * (_LABEL + 3))
    return lines


def _answer(result: RouteResult, canvas: Canvas) -> list[str]:
    first, *others = words.answer(result)
    label = "answer" if result.observed is UNSET else "predicts"
    lines = _labelled_lines(canvas, label, first, bold=True)
    for label, text in remedies(result):
        lines += _labelled_lines(canvas, label, text)
    for text in others:
        lines += canvas.paragraph(text, first=" " * _LABEL)
    return lines


def _labelled_lines(canvas: Canvas, label: str, text: str, *, bold: bool = False) -> list[str]:
    lines = canvas.paragraph(text, first=label.ljust(_LABEL), rest=" " * _LABEL)
    return [canvas.bold(line) for line in lines] if bold else lines


# -- without --explain -------------------------------------------------------------------------


def route_short(result: RouteResult, canvas: Canvas) -> str:
    """The answer and one line per hop; `--explain` shows the rest."""
    first, *others = words.answer(result)
    lines = [f"answer  {first}"]
    if result.ok:
        chosen = [hop for hop in result.hops if hop.winner is not None]
        lines = [table(_hop_columns(result), chosen, canvas), *lines]
    else:
        for label, text in remedies(result):
            lines += canvas.paragraph(text, first=label.ljust(8))
    for text in others:
        lines += canvas.paragraph(text, first=" " * 8)
    for text in words.bypass(result):
        lines += canvas.paragraph(text, first="hop     ")
    lines += _doubts(result, canvas, label=8)
    for text in words.worker_sets(result):
        lines += canvas.paragraph(text, first="set     ")
    for text in words.assumptions(result):
        lines += canvas.paragraph(text, first="assumed ")
    return "\n".join(lines) + "\n"


def _hop_columns(result: RouteResult) -> Iterator[Column[DecisionResult]]:
    domain = words.primary_domain(result)

    def won(hop: DecisionResult) -> CandidateRow:
        row = words.winner_row(hop)
        assert row is not None, "only hops with a winner are shown"
        return row

    def cached_text(hop: DecisionResult) -> str:
        if not words.credits_overlap(hop):
            return "-"
        blocks_cached = won(hop).overlap_blocks
        unknown = blocks_cached is None or not hop.overlap_modelled
        cached = "?" if unknown else f"{blocks_cached:,}"
        return f"{cached} of {words.token_count_text(result, result.blocks)}"

    def ahead(hop: DecisionResult) -> str:
        if len(hop.candidates) == 1:
            return "only one"
        if hop.tied:
            return f"tie of {len(hop.tied)}"
        return f"+{blocks(hop.margin)}" if hop.margin is not None and hop.margin >= 0 else "drawn"

    def candidate_count(hop: DecisionResult) -> str:
        return plural(len(hop.candidates), "candidate")

    yield Column("stage", "HOP", lambda hop: hop.stage)
    yield Column("worker", "WORKER", lambda hop: won(hop).worker, name=True)
    if domain is not None:
        yield Column("domain", domain.upper(), lambda hop: won(hop).domains.get(domain))
    yield Column("cached", "CACHED", cached_text, right=True)
    yield Column("cost", "COST", lambda hop: won(hop).cost, form=blocks, right=True)
    yield Column("margin", "AHEAD", ahead, right=True)
    yield Column("scored", "OF", candidate_count, right=True, rank=1)

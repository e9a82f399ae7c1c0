"""Separate calls of tools from generated text: by the text alone, or piece by piece, as Dynamo 1.6
does it."""

import re
from typing import NamedTuple

from dynctl.tokenization.reasoning import THINK, THINK_END, begun_mark
from dynctl.tokenization.tool_calls.calls import (
    MAX_CALLS,
    MAX_HELD,
    MAX_PARSED,
    SPACE,
    CallFormat,
    CallPiece,
    Parsed,
    ToolCall,
    ToolCallError,
    first_mark,
    strip_space,
)
from dynctl.tokenization.tool_calls.json_calls import JsonEnds


class Part(NamedTuple):
    """A part of an answer: text that users read, or calls, with the text that belongs to them.

    ``text`` None: no text, where an empty one stands for a part without a call. ``pieces``: of
    calls that are passed on before they are whole, in place of ``calls``.
    """

    text: str | None
    calls: tuple[ToolCall, ...] = ()
    pieces: tuple[CallPiece, ...] = ()


class ToolCallSplitter:
    """Separates the calls in the text of one answer.

    Text is passed on at once. It is held back from a start mark, or from what may be a call, until
    the calls are whole, or the answer ends.

    ``by_text``: the calls and the text are the same however the text is cut into pieces. A call
    inside ``<think>`` is text, and so is what comes first where ``thinking`` is true; white space
    after calls that no text follows is left out. Else pieces are read as Dynamo reads them, where
    the cut decides on some calls.
    """

    def __init__(
        self, form: CallFormat, *, by_text: bool = False, thinking: bool | None = None
    ) -> None:
        self.form = form
        self.calls = 0
        self._by_text = by_text
        self._starts = form.starts
        self._thinking = bool(thinking)
        self._thinks = by_text and thinking is not None
        # White space after a call, until text follows; None: no call was the last part.
        self._blank: str | None = None
        if by_text:
            more = (THINK,) if self._thinks else ()
            self._starts = (*form.starts, *form.loose_starts, *more)
            self._brackets = tuple(each for each in "{[" if form.may_begin(each))
            self._begins = _any_of({mark[0] for mark in self._starts} | set("{["))
            lasts = {mark[-1] for mark in (*form.ends, form.tried) if mark and mark != "json"}
            self._completes = _any_of(lasts | set("}]"))
        self._parsed = 0
        # What may be the beginning of a mark; and the text since a call may have begun.
        self._begun = self._held = ""
        self._reset()

    def _reset(self) -> None:
        self._ends = JsonEnds(self.form.starts)
        self._searched = self._tried = self._seen = 0
        self._marked: int | None = None
        # Calls that were whole, while more may belong to them.
        self._waiting: Parsed | None = None

    @property
    def holding(self) -> bool:
        return bool(self._begun or self._held)

    def feed(self, piece: str) -> list[Part]:
        """The parts that a piece completes, in their order.

        Raises ToolCallError where the calls exceed a bound.
        """
        if not self._by_text:
            return self._feed(piece)
        parts: list[Part] = []
        at = 0
        while at < len(piece):
            if self._thinking:
                at = self._think(piece, at, parts)
                continue
            end = self._step(piece, at)
            parts += self._feed(piece[at:end])
            at = end
            if self._thinks and self._held.startswith(THINK):
                self._held = ""
                self._thinking = True
                parts.append(Part(THINK))
        return self._without_blanks(_merge_texts(parts))

    def _step(self, piece: str, at: int) -> int:
        """The end of the next part of a piece that is read at once: it depends on the text alone,
        or nothing can begin or be complete before it."""
        if self._begun or self._waiting is not None:
            return at + 1
        match = (self._completes if self._inside_call else self._begins).search(piece, at)
        if match is None:
            return len(piece)
        return match.end() if self._inside_call or match.start() == at else match.start()

    @property
    def _inside_call(self) -> bool:
        return bool(self._held)

    def _think(self, piece: str, at: int, parts: list[Part]) -> int:
        """Pass thoughts on, up to their end; returns the place after them in the piece."""
        text, known = self._begun + piece[at:], len(self._begun)
        self._begun = ""
        end = text.find(THINK_END)
        if end >= 0:
            end += len(THINK_END)
            self._thinking = False
            parts.append(Part(text[:end]))
            return at + end - known
        begun = begun_mark(text, THINK_END)
        self._begun = text[begun:]
        if begun:
            parts.append(Part(text[:begun]))
        return len(piece)

    def _without_blanks(self, parts: list[Part]) -> list[Part]:
        """The parts without white space after calls, which text that follows brings along."""
        kept = []
        for part in parts:
            if part.calls or part.pieces:
                self._blank = ""
                kept.append(part)
            elif self._blank is None or part.text is None:
                kept.append(part)
            elif strip_space(part.text):
                kept.append(Part(self._blank + part.text))
                self._blank = None
            else:
                self._blank += part.text
        return kept

    def _may_begin(self, text: str) -> bool:
        """Whether text without a start mark may be the beginning of a call."""
        return text.endswith(self._brackets) if self._by_text else self.form.may_begin(text)

    def _feed(self, piece: str) -> list[Part]:
        if self._held:
            # By a name of its own: Python makes the text longer in place where nothing else refers
            # to it. An attribute would be copied for each piece, at the square of its length.
            held, self._held = self._held, ""
            held += piece
            self._held = held
            del held
            self._check_held()
            return self._completed_parts()
        text, self._begun = self._begun + piece, ""
        parts = self._outside(text)
        # What only may be a call is looked at with the next piece, and so are calls after calls.
        if first_mark(self._held, self._starts) == 0:
            parts += self._completed_parts()
        return parts

    def _outside(self, text: str) -> list[Part]:
        """The parts of text while nothing is held."""
        parts = []
        first = first_mark(text, self._starts)
        if first is not None:
            if first:
                parts.append(Part(text[:first]))
            self._hold(text[first:])
            return parts
        cut = begun_mark(text, *self._starts)
        if cut < len(text):
            self._begun = text[cut:]
            text = text[:cut]
        elif self._may_begin(text):
            self._hold(text)
            return parts
        if text:
            parts.append(Part(text))
        return parts

    def end(self) -> Part | None:
        """What is still held when the answer ends."""
        begun, held = self._begun, self._held
        self._begun = self._held = ""
        if held:
            return self._last(self._part(held, self.form.parse(held, final=True)))
        return self._last(Part(begun)) if begun else None

    def _last(self, part: Part) -> Part | None:
        """The last part, without white space after calls."""
        return part if not self._by_text else next(iter(self._without_blanks([part])), None)

    def cut_text(self, text: str) -> str:
        """What users read of a whole text without a call, whose length ended it."""
        if not self.form.cuts:
            return text
        return text[: first_mark(text, self.form.starts)]

    def _hold(self, text: str) -> None:
        self._held = text
        self._reset()
        self._check_held()

    def _check_held(self) -> None:
        if len(self._held) > MAX_HELD:
            raise ToolCallError(f"wrote more than {MAX_HELD} characters in one tool call")

    def _completed_parts(self) -> list[Part]:
        """The parts of the held text, if the calls in it are whole."""
        whole = self._whole()
        if whole is None:
            return []
        end, parsed = whole
        held, self._held = self._held, ""
        parts = [self._part(held[:end], parsed or self.form.parse(held[:end], final=False))]
        return parts + self._outside(held[end:])

    def _whole(self) -> tuple[int, Parsed | None] | None:
        """The length of the whole calls in the held text, and the calls; None if there are none."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            if not strip_space(self._held[self._seen :]):
                # White space decides nothing, and a model may write it without end: to look at all
                # of the text again for each would cost the square of its length.
                self._waits(waiting)
                return None
            whole = self._until_end(waiting)
            if whole is not None:
                return whole
        marked = self._end_mark()
        if marked is not None:
            parsed = self.form.parse(self._held, final=False)
            if not parsed.calls:
                return marked, None
            return self._until_end(parsed)
        if self._due() and self._parsed < MAX_PARSED and self._waiting is None:
            self._parsed += len(self._held)
            parsed = self.form.parse(self._held, final=False)
            if parsed.calls:
                return self._until_end(parsed)
        return None

    def _due(self) -> bool:
        """Whether the text since the last look may make the calls whole."""
        if self.form.tried == "json":
            return self._ends.new(self._held)
        tried, before = self.form.tried, max(0, self._tried - len(self.form.tried) + 1)
        self._tried = len(self._held)
        return bool(tried) and self._held.find(tried, before) >= 0

    def _until_end(self, parsed: Parsed) -> tuple[int, Parsed] | None:
        end = self.form.end(self._held, seen=self._seen)
        if end is None:
            self._waits(parsed)
            return None
        if end < len(self._held):
            parsed = self.form.parse(self._held[:end], final=False)
        return (end, parsed) if parsed.calls else None

    def _waits(self, parsed: Parsed) -> None:
        """Wait for text that decides whether more belongs to the calls."""
        self._waiting, self._seen = parsed, len(self._held)
        self._marked, self._searched = None, len(self._held)

    def _end_mark(self) -> int | None:
        """The place after an end mark."""
        if self._marked is None:
            for mark in self.form.ends:
                at = self._held.find(mark, max(0, self._searched - len(mark) + 1))
                if at >= 0:
                    self._marked = at + len(mark)
                    break
            self._searched = len(self._held)
        return self._marked

    def _part(self, held: str, parsed: Parsed) -> Part:
        if parsed.calls:
            self.calls += len(parsed.calls)
            if self.calls > MAX_CALLS:
                raise ToolCallError(f"made more than {MAX_CALLS} tool calls")
            return Part(parsed.text, parsed.calls)
        if not parsed.text or not self.form.hides:
            return Part(parsed.text and held)
        first = first_mark(held, self.form.starts)
        if first is not None:
            return Part(held[:first].rstrip(SPACE))
        if not any(mark in held for mark in self.form.ends):
            return Part(held)
        for mark in self.form.ends:
            held = held.replace(mark, "")
        return Part(strip_space(held))


def _any_of(characters: set[str]) -> re.Pattern[str]:
    return re.compile("[" + re.escape("".join(sorted(characters))) + "]")


def _merge_texts(parts: list[Part]) -> list[Part]:
    """The parts with texts that follow each other as one."""
    merged: list[Part] = []
    texts: list[str] = []
    for part in parts:
        if part.text is not None and not part.calls and not part.pieces:
            texts.append(part.text)
            continue
        if texts:
            merged.append(Part("".join(texts)))
            texts = []
        merged.append(part)
    return [*merged, Part("".join(texts))] if texts else merged

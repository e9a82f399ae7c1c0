"""Separate reasoning from the answer in generated text: by the text alone, or as Dynamo 1.6 does.

Dynamo has parsers by name, which a model's card selects. Those here mark reasoning with ``<think>``
and ``</think>``.
"""

from typing import Final, NamedTuple

THINK: Final = "<think>"
THINK_END: Final = "</think>"

REASONING_PARSERS: Final = {
    "basic": False,
    "deepseek_r1": True,
    "nemotron_deci": False,
    "qwen3": False,
    "step3": True,
}
"""Names of the supported parsers -> whether the text begins inside reasoning."""

CAN_BE_OFF: Final = frozenset({"deepseek_r1"})
"""Parsers that a request turns off if it wants no thinking."""


class Parts(NamedTuple):
    """``answer`` is what users read; ``reasoning`` what the model wrote before it."""

    answer: str
    reasoning: str


class ReasoningSplitter:
    """Separates the text of one answer, piece by piece.

    ``inside``: it begins inside reasoning, and may have the first mark too. ``prompted``: that mark
    is the end of the prompt. An end mark outside reasoning is left out. What may become a mark is
    held back; one ``<`` alone is text, and what is held at the end of the answer is lost, as in
    Dynamo.
    """

    def __init__(self, *, inside: bool, prompted: bool = False) -> None:
        self.inside = inside or prompted
        # A start mark is part of the reasoning after it was found once.
        self._opened = prompted
        self._held = ""

    def feed(self, piece: str) -> Parts:
        """The parts that this piece completes."""
        text, self._held = self._held + piece, ""
        answer, reasoning = "", ""
        while True:
            if not self._opened and text.startswith(THINK):
                self.inside = self._opened = True
                text = text[len(THINK) :]
                continue
            if self.inside and not self._opened and text and THINK.startswith(text):
                self._held = text
                break
            if self.inside:
                before, end, text = text.partition(THINK_END)
                if not end:
                    shown, self._held = _without_begun(before, THINK_END)
                    reasoning += shown
                    break
                reasoning += before
                self.inside = self._opened = False
                continue
            first = _first_mark(text, THINK, THINK_END)
            if first is None:
                shown, self._held = _without_begun(text, THINK, THINK_END)
                answer += shown
                break
            at, mark = first
            answer, text = answer + text[:at], text[at + len(mark) :]
            self.inside = self._opened = mark == THINK
        return Parts(answer, reasoning)

    @property
    def holding(self) -> bool:
        """Whether text is held back that the end of the answer shows."""
        return False

    def end(self) -> Parts:
        """What is held at the end of the answer and not lost."""
        return Parts("", "")


class TextReasoningSplitter(ReasoningSplitter):
    """As ReasoningSplitter, by the text alone: the parts are the same however it is cut.

    Where the text begins inside reasoning, a start mark at its very beginning is left out.
    """

    def __init__(self, *, inside: bool, prompted: bool = False) -> None:
        super().__init__(inside=inside, prompted=prompted)
        self._at_start = inside and not prompted

    def feed(self, piece: str) -> Parts:
        text, self._held = self._held + piece, ""
        parts = {True: "", False: ""}
        while text:
            if self._at_start and THINK.startswith(text):
                break
            if self._at_start:
                self._at_start = False
                text = text.removeprefix(THINK)
                continue
            at, mark = self._next_mark(text)
            if mark:
                parts[self.inside] += text[:at]
                text = text[at + len(mark) :]
                self.inside = mark == THINK
                continue
            shown, text = text[:at], text[at:]
            parts[self.inside] += shown
            break
        self._held = text
        return Parts(parts[False], parts[True])

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def end(self) -> Parts:
        held, self._held = self._held, ""
        if self._at_start and held == THINK:
            held = ""
        return Parts("", held) if self.inside else Parts(held, "")

    def _next_mark(self, text: str) -> tuple[int, str]:
        """The place of the next mark, and the mark; without one the place of its beginning at the
        end of the text."""
        marks = (THINK_END,) if self.inside else (THINK, THINK_END)
        return _first_mark(text, *marks) or (begun_mark(text, *marks), "")


def _first_mark(text: str, *marks: str) -> tuple[int, str] | None:
    """The place of the first mark, and the mark."""
    places = ((text.find(mark), mark) for mark in marks)
    return min((place for place in places if place[0] >= 0), default=None)


def begun_mark(text: str, *marks: str) -> int:
    """The place at the end of a text from which on it may be the beginning of a mark."""
    longest = max(map(len, marks))
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)


def _without_begun(text: str, *marks: str) -> tuple[str, str]:
    """The text, and its end that may be the beginning of a mark."""
    for length in range(max(map(len, marks)) - 1, 1, -1):
        end = text[-length:]
        if len(end) == length and any(mark.startswith(end) for mark in marks):
            return text[:-length], end
    return text, ""

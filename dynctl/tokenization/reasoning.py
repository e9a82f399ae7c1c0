"""Separate reasoning from the answer in generated text, as Dynamo 1.6 does it.

Dynamo has parsers by name, which a model's card selects. Those here mark reasoning with ``<think>``
and ``</think>``.
"""

from typing import Final, NamedTuple

_START: Final = "<think>"
_END: Final = "</think>"

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
            if not self._opened and text.startswith(_START):
                self.inside = self._opened = True
                text = text[len(_START) :]
                continue
            if self.inside and not self._opened and text and _START.startswith(text):
                self._held = text
                break
            if self.inside:
                before, end, text = text.partition(_END)
                if not end:
                    shown, self._held = _without_begun(before, _END)
                    reasoning += shown
                    break
                reasoning += before
                self.inside = self._opened = False
                continue
            start, end_at = text.find(_START), text.find(_END)
            if start >= 0 and (end_at < 0 or start < end_at):
                answer, text = answer + text[:start], text[start + len(_START) :]
                self.inside = self._opened = True
            elif end_at >= 0:
                answer, text = answer + text[:end_at], text[end_at + len(_END) :]
                self._opened = False
            else:
                shown, self._held = _without_begun(text, _START, _END)
                answer += shown
                break
        return Parts(answer, reasoning)


def _without_begun(text: str, *marks: str) -> tuple[str, str]:
    """The text, and its end that may be the beginning of a mark."""
    for length in range(max(map(len, marks)) - 1, 1, -1):
        end = text[-length:]
        if len(end) == length and any(mark.startswith(end) for mark in marks):
            return text[:-length], end
    return text, ""

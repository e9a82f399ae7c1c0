"""Decode token ids to text incrementally."""

from collections.abc import Sequence
from typing import Protocol

# A character of UTF-8 has at most four bytes: after three tokens the fourth completes it.
_LONGEST_WAIT = 3
# The number of ids decoded again before each new piece: at least one whole character.
_CONTEXT = 6
_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class StreamDecoder:
    """Decodes one sequence incrementally; one per stream, not shared.

    Text that ends inside a character is held back, because tokens may split a character. Each new
    piece is decoded together with the previous piece, because a decoder treats the first token
    differently (leading spaces). The window is bounded, so n tokens cost O(n).
    """

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; ``""`` while a character is incomplete."""
        self._pending.extend(ids)
        return self._take(final=False)

    def flush(self) -> str:
        """The rest, incomplete characters as U+FFFD; call once, at the end."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        before = self._decoder.decode(self._shown, self._skip)
        text = self._decoder.decode([*self._shown, *self._pending], self._skip)
        kept = self._incomplete_tail() if text.endswith(_REPLACEMENT) and not final else 0
        if kept:
            if kept == len(self._pending):
                return ""
            ready = self._pending[:-kept]
            text = self._decoder.decode([*self._shown, *ready], self._skip)
            self._shown, self._pending = ready, self._pending[-kept:]
        else:
            self._shown, self._pending = self._pending, []
        del self._shown[:-_CONTEXT]
        return text[len(before) :]

    def _incomplete_tail(self) -> int:
        """The number of last ids to hold back, so that the rest ends with a whole character.

        0 if these ids cannot start a character: invalid bytes are not held back.
        """
        for kept in range(1, min(len(self._pending), _LONGEST_WAIT) + 1):
            head = [*self._shown, *self._pending[: len(self._pending) - kept]]
            if not self._decoder.decode(head, self._skip).endswith(_REPLACEMENT):
                return kept
        return 0

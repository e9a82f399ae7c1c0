"""Calls of tools in generated text: the values, and what a format of them has to know.

A model writes a call of a tool into its text, between marks of its own. Dynamo has a parser for
each such format, which a model's card selects by name.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

MAX_HELD: Final = 262_144
"""Characters of one choice that may be held back until it is clear whether they are a call."""
MAX_PARSED: Final = 16 * MAX_HELD
"""Characters of one choice that are read before a mark ends the call, each as often as it is read
again; after that a call is found at its end mark, or when the answer ends."""
MAX_CALLS: Final = 512
"""Calls in one choice."""
MAX_NESTING: Final = 256
"""Depth of JSON in a call; what is deeper is not read as a call."""

SPACE: Final = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""What Unicode calls white space: Dynamo strips these, Python's ``strip`` four more."""


class ToolCallError(Exception):
    """Calls in a text that are more, or longer, than the bounds."""


class ToolCall(NamedTuple):
    """``arguments``: as the model wrote them, in most formats JSON. ``id``: the call's name where
    its format gives one, else empty."""

    name: str
    arguments: str
    id: str = ""


class CallPiece(NamedTuple):
    """A piece of a call that is passed on before the call is whole.

    ``number``: which call of the answer, from 0. ``name``: in the first piece of a call, else None.
    ``arguments``: text that follows that of the pieces before. ``id`` as of ToolCall.
    """

    number: int
    name: str | None
    arguments: str
    id: str = ""


class Parsed(NamedTuple):
    """What a whole text contains. ``text``: what users read beside the calls. Without calls, an
    empty one means that the text was a call that nothing can be read from."""

    calls: tuple[ToolCall, ...]
    text: str


class CallFormat(Protocol):
    """How a model writes calls.

    ``starts``, ``ends``: the marks. ``loose_starts``: marks that begin calls, too, but for Dynamo
    only where a piece has a whole one. ``cuts``: a whole answer that its length ends, without a
    call, is cut at its first start mark. ``hides``: marks without a call are removed from what
    users read. ``tried``: when held text is parsed, beside at each end mark: ``json``, when a JSON
    value ends in it; else at each occurrence of this text, or never if it is empty.
    """

    @property
    def starts(self) -> tuple[str, ...]: ...

    @property
    def ends(self) -> tuple[str, ...]: ...

    @property
    def loose_starts(self) -> tuple[str, ...]: ...

    @property
    def cuts(self) -> bool: ...

    @property
    def hides(self) -> bool: ...

    @property
    def tried(self) -> str: ...

    def may_begin(self, text: str) -> bool:
        """Whether text without a whole start mark may be the beginning of a call."""
        ...

    def parse(self, text: str, *, final: bool) -> Parsed:
        """The calls in a text. ``final``: nothing follows, so an unfinished call is one too.

        Raises ToolCallError for what exceeds a bound of the format.
        """
        ...

    def end(self, text: str, *, seen: int = 0) -> int | None:
        """The length of the calls at the beginning of a text; None if more may belong to them.

        ``seen``: the length of the text for which the answer was None the last time.
        """
        ...


def strip_space(text: str) -> str:
    return text.strip(SPACE)


def first_mark(text: str, marks: tuple[str, ...]) -> int | None:
    """The place of the first mark, None without one."""
    places = [at for mark in marks if (at := text.find(mark)) >= 0]
    return min(places, default=None)


def texts_between(text: str, start: str, end: str) -> Iterator[str]:
    """The texts between marks, each from a start mark to the next end mark."""
    at = 0
    while (at := text.find(start, at)) >= 0:
        at += len(start)
        close = text.find(end, at)
        if close < 0:
            return
        yield text[at:close]
        at = close + len(end)


def after_blank(text: str, at: int, mark: str) -> int | None:
    """The place after a mark that follows directly, but for white space."""
    rest = strip_space(text[at:])
    if not rest.startswith(mark):
        return None
    return text.find(mark, at) + len(mark)


def end_of_marked(text: str, start: str, end: str) -> int:
    """The end of the first call and of those that follow it directly."""
    at = text.find(end)
    if at < 0:
        return len(text)
    at += len(end)
    while (following := after_blank(text, at, start)) is not None:
        closed = text.find(end, following)
        if closed < 0:
            break
        at = closed + len(end)
    return at

"""The inference APIs of engines: their paths, and how their answers and streams look."""

import re
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

Endpoint = Literal[
    "chat_completions", "completions", "embeddings", "responses", "anthropic_messages"
]
"""The inference endpoints, by their names in metrics."""

#: The end of an event: the end of a line, and an empty line. Servers end lines in all three ways.
BLANK_LINE: Final = re.compile(rb"(?>\r\n|\n|\r)(?:\r\n|\n|\r)")
#: The last two bytes of it, whatever the ends of lines are.
_TWO_ENDS: Final = (b"\n\n", b"\n\r", b"\r\r")
#: How a part of a stream ends that is whole events. There are other ways, which are rare.
WHOLE_EVENTS: Final = (b"\n\n", b"\r\n\r\n")
#: The largest event that is passed on.
EVENT_BYTES: Final = 16 * 1024 * 1024
#: Lines of an event that are read. Engines write two.
_EVENT_LINES: Final = 4096
#: Events that the reader of a stream takes before it looks whether others need the event loop.
EVENTS_A_TURN: Final = 64
#: The data of the event that ends the streams of chats and completions.
DONE_DATA: Final = b"[DONE]"
_NAME_LINE: Final = re.compile(rb"(?:\A|[\r\n])event:([^\r\n]*)")
#: What every event of an engine that failed has; generated text may have it too.
ERROR_KEY: Final = b"error"
#: An event of an engine that failed, with its data: engines name the event, or their data begins
#: with the error. Generated text never matches, as JSON escapes its quotes and its ends of lines.
ERROR_EVENT: Final = re.compile(
    rb"(?:\A|[\r\n])(?:event: ?error(?:\r\n|\n|\r)data: ?"
    rb"|data: ?(?=\{ ?\"(?:error\" ?:(?! ?null)|object\" ?: ?\"error\")))([^\r\n]*)"
)


@dataclass(frozen=True, slots=True)
class Api:
    """One inference endpoint of engines.

    ``answers``: the field that every whole answer has. ``named_events``: its streams have events
    with names, and end with one of ``last``, not with ``[DONE]``. ``preamble``: events before the
    first output. ``failed``: events that end a stream with an error.
    """

    endpoint: Endpoint
    path: str
    answers: str
    preamble: frozenset[str] = frozenset()
    last: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()

    @property
    def named_events(self) -> bool:
        return bool(self.last)


_ALL: Final = (
    Api("chat_completions", "/v1/chat/completions", "choices"),
    Api("completions", "/v1/completions", "choices"),
    Api("embeddings", "/v1/embeddings", "data"),
    Api(
        "responses",
        "/v1/responses",
        "output",
        preamble=frozenset({"response.created", "response.queued", "response.in_progress"}),
        last=frozenset({"response.completed", "response.incomplete"}),
        failed=frozenset({"error", "response.failed"}),
    ),
    Api(
        "anthropic_messages",
        "/v1/messages",
        "content",
        preamble=frozenset({"message_start", "ping"}),
        last=frozenset({"message_stop"}),
        failed=frozenset({"error"}),
    ),
)
APIS: Final[dict[Endpoint, Api]] = {api.endpoint: api for api in _ALL}
BY_PATH: Final = {api.path: api for api in _ALL}


class EventCut:
    """Cuts a stream at the ends of its events: they pass whole, or not at all.

    Bytes of an event that is not complete are searched once: of a large one that arrives in small
    pieces a second look at each would block all requests.
    """

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        #: The begun event. It is always the same object.
        self.waiting = bytearray()

    def whole(self, piece: bytes) -> bytes:
        """The bytes of the events that the next bytes complete; a piece of whole events is passed
        on as it is."""
        waiting = self.waiting
        if not waiting and piece.endswith(WHOLE_EVENTS):
            return piece
        end = _last_end(bytes(waiting[-1:]) or b"\n", piece)
        if not waiting and end == len(piece):
            return piece
        if not end:
            waiting += piece
            return b""
        events = bytes(waiting) + piece[:end]
        waiting[:] = piece[end:]
        return events

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that the next bytes complete, without the blank lines after them."""
        return events_of(self.whole(piece))

    def last(self) -> bytes:
        """The last event of a stream that is complete, with the blank line that it should have
        had; empty where the event is not whole: its data are neither JSON nor ``[DONE]``."""
        event = bytes(self.waiting).rstrip(b"\r\n")
        data = event_data(event)
        return event + b"\n\n" if data == DONE_DATA or _is_json(data) else b""


def _last_end(before: bytes, piece: bytes) -> int:
    """The place after the last event that ends in a piece, 0 without one. ``before``: the byte in
    front of the piece."""
    at = max(map(piece.rfind, _TWO_ENDS))
    end = at + 2
    if at < 0:
        if before + piece[:1] not in _TWO_ENDS:
            return 0
        end = 1
    return end + piece.startswith(b"\r\n", end - 1)


def events_of(whole: bytes) -> list[bytes]:
    """The events in bytes that are whole events, without the blank lines after them."""
    return [event for part in BLANK_LINE.split(whole) if (event := part.strip(b"\r\n"))]


def _is_json(data: bytes) -> bool:
    """Whether the data of an event is a whole object or array."""
    if data[:1] not in (b"{", b"["):
        return False
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


class _Typed(msgspec.Struct):
    type: str = ""


def event_name(event: bytes) -> str:
    """The name of an event: of its line ``event:``, else the ``type`` of its data; else empty."""
    match = _NAME_LINE.search(event)
    if match is not None:
        return match[1].strip().decode("utf-8", "replace")
    try:
        return msgspec.json.decode(event_data(event), type=_Typed).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def event_data(event: bytes) -> bytes:
    """The data of an event; empty of one that has more lines than events of engines have."""
    if len(event) > _EVENT_LINES and event.count(b"\n") + event.count(b"\r") > _EVENT_LINES:
        return b""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)

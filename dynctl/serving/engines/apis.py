"""The inference APIs of engines: their paths, and how their answers and streams look."""

import re
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

Endpoint = Literal[
    "chat_completions", "completions", "embeddings", "responses", "anthropic_messages"
]
"""The inference endpoints, by their names in metrics."""

BLANK_LINE: Final = re.compile(rb"\r?\n\r?\n")


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
    """Cuts a stream into its events. Bytes of an event that is not complete are searched once: of
    a large one that arrives in small pieces a second look at each would block all requests."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def waiting(self) -> int:
        """Bytes of an event that is not complete."""
        return len(self._pending)

    def rest(self) -> bytes:
        """What is left at the end of the stream."""
        return bytes(self._pending)

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that the next bytes complete, without the blank lines after them."""
        begin, start = 0, max(0, len(self._pending) - 3)
        self._pending += piece
        events = []
        while (found := BLANK_LINE.search(self._pending, start)) is not None:
            events.append(bytes(self._pending[begin : found.start()]))
            begin = start = found.end()
        del self._pending[:begin]
        return events


class _Typed(msgspec.Struct):
    type: str = ""


def event_name(event: bytes) -> str:
    """The name of an event: of its line ``event:``, else the ``type`` of its data; else empty."""
    for line in event.splitlines():
        if line.startswith(b"event:"):
            return line[6:].strip().decode("utf-8", "replace")
    try:
        return msgspec.json.decode(event_data(event), type=_Typed).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def event_data(event: bytes) -> bytes:
    """The data of an event."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)

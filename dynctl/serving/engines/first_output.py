"""The first output of an engine: until it is there and is well, another engine may answer.

Of a whole answer that is all of it. Of a stream it is the first event, or the first one after those
that only announce an answer. What is not an answer raises UpstreamFailure.
"""

import asyncio
import re
from typing import Final

import msgspec

from dynctl.serving.engines.apis import (
    BLANK_LINE,
    BY_PATH,
    ERROR_EVENT,
    EVENTS_A_TURN,
    Api,
    EventCut,
    event_data,
    event_name,
)
from dynctl.serving.engines.failures import UpstreamFailure, reported_error
from dynctl.serving.engines.response_stream import EngineStream

_FIRST_EVENT_BYTES: Final = 64 * 1024
#: The beginning of an event stream: a field, a comment, or empty lines before them.
_EVENT_STREAM: Final = re.compile(rb"[\r\n]*+(?:(?:data|event|id|retry)?:|(?<=[\r\n])\Z)")
_FIRST_BYTES: Final = 8
#: The first field of an event; comments are none.
_FIELD: Final = re.compile(rb"(?:\A|[\r\n])((?:data|event|id|retry):)")
#: The longest end of an event, and the longest first field, without their last bytes.
_LINE_ENDS: Final = 3
_FIELD_BYTES: Final = 6
_COMMENT_BYTES: Final = 64 * 1024
#: A whole event of one line of data, an object, as nearly all engines begin their streams.
#: Without CR, which ends a line too: a class of two characters takes five times as long.
_OBJECT: Final = re.compile(rb"data: ?(\{.*+)\n\n")
_DONE: Final = (b"data: [DONE]", b"data:[DONE]")


async def first_events(response: EngineStream, api: Api, timeout_s: float, most: int) -> bytes:
    """A stream up to its first output or a part of it, with the comments before it.

    ``timeout_s``: for each part of it that has to be awaited; ``most``: bytes in all.
    """
    _check_type(response, "text/event-stream")
    head = await response.readany()
    whole = _OBJECT.match(head)
    plain = whole is not None and b"\r" not in whole[1] and not api.preamble
    if whole is not None and plain and not ERROR_EVENT.match(head):
        if not _is_json(whole[1]):
            raise _not_json(response)
        return head
    field = _FIELD.search(head)
    start = -1 if field is None else field.start(1)
    if start < 0:
        try:
            async with asyncio.timeout(timeout_s):
                head, start = await _first_field(response, head)
        except TimeoutError:
            raise UpstreamFailure(
                "timeout", f"{response.origin} sent no event within {timeout_s:g} s"
            ) from None
    # Judged whole: an engine that fails before its first token sends an error as its event.
    if BLANK_LINE.search(head, start) is None:
        head = await _first_event(response, head, start)
    event = head[start:]
    if event.startswith(_DONE):
        raise UpstreamFailure("protocol", f"{response.origin} sent [DONE] without any output")
    if not _has_json(event):
        raise _not_json(response)
    if ERROR_EVENT.match(event):
        raise reported_error(response.origin, event_data(BLANK_LINE.split(event, 1)[0]))
    if api.preamble:
        return await _after_preamble(response, head, api, timeout_s, most)
    return head


async def whole_answer(response: EngineStream, api: Api, most: int) -> bytes:
    """The body of a whole answer of up to ``most`` bytes."""
    _check_type(response, "application/json")
    body = await response.read(most)
    try:
        msgspec.json.decode(body, type=_ANSWERS[api.answers])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UpstreamFailure(
            "protocol", f"{response.origin} answered without a JSON object with {api.answers}"
        ) from None
    return body


async def _first_event(response: EngineStream, head: bytes, start: int) -> bytes:
    """The stream up to the end of the event at ``start``, or to the most that is judged."""
    whole, searched = bytearray(head), len(head)
    while len(whole) - start < _FIRST_EVENT_BYTES and (more := await response.readany()):
        whole += more
        # The end may be cut, and begin in what was searched.
        if BLANK_LINE.search(whole, max(start, searched - _LINE_ENDS)) is not None:
            break
        searched = len(whole)
    return bytes(whole)


async def _after_preamble(
    response: EngineStream, head: bytes, api: Api, timeout_s: float, most: int
) -> bytes:
    """The stream up to its first output or its end: until then another engine may answer."""
    cut, whole, piece = EventCut(), bytearray(head), head
    try:
        async with asyncio.timeout(timeout_s):
            while len(whole) <= most:
                for number, event in enumerate(cut.feed(piece), 1):
                    if number % EVENTS_A_TURN == 0:
                        await response.turn()
                    name = event_name(event)
                    if name in api.preamble or not event_data(event):
                        continue
                    if name in api.failed:
                        raise reported_error(response.origin, event_data(event))
                    return bytes(whole)
                piece = await response.readany()
                if not piece:
                    raise UpstreamFailure(
                        "reset", f"{response.origin} ended its response without any output"
                    )
                whole += piece
    except TimeoutError:
        raise UpstreamFailure(
            "timeout", f"{response.origin} sent no output within {timeout_s:g} s"
        ) from None
    raise UpstreamFailure("protocol", f"{response.origin} sent more than {most} bytes at first")


async def _first_field(response: EngineStream, head: bytes) -> tuple[bytes, int]:
    """The stream up to the first field of an event, and its place."""
    whole, searched, stream = bytearray(head), 0, True
    while True:
        field = _FIELD.search(whole, max(0, searched - _FIELD_BYTES))
        if field is not None:
            return bytes(whole), field.start(1)
        # Empty lines at the beginning are looked at again and again; of those are few.
        if len(whole) >= _FIRST_BYTES and (searched < _FIRST_BYTES or whole[:1] in b"\r\n"):
            stream = _EVENT_STREAM.match(whole) is not None
        searched = len(whole)
        more = await response.readany() if stream and len(whole) <= _COMMENT_BYTES else b""
        if not more and not whole:
            raise UpstreamFailure(
                "reset", f"{response.origin} ended its response without any output"
            )
        if not more:
            raise UpstreamFailure(
                "protocol", f"{response.origin} sent something else than events in its stream"
            )
        whole += more


def _check_type(response: EngineStream, expected: str) -> None:
    """Raise UpstreamFailure for an answer of another type or a compressed one; one without a type
    is read."""
    headers = response.headers
    if headers.get("content-type") == expected and "content-encoding" not in headers:
        return
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise UpstreamFailure(
            "protocol", f"{response.origin} compressed its answer with {encoding[:40]!r}; expected "
            "no compression, as the request's Accept-Encoding says",
        )  # fmt: skip
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type and content_type != expected:
        raise UpstreamFailure(
            "protocol",
            f"{response.origin} answered with {content_type[:80]!r}; expected {expected}",
        )


#: What every whole answer of an endpoint has, by its field.
_ANSWERS: Final = {
    api.answers: msgspec.defstruct("_Answer", [(api.answers, list[msgspec.Raw])])
    for api in BY_PATH.values()
}


def _has_json(stream: bytes) -> bool:
    """Whether the data of the first event is JSON, as far as it is here; no data is fine."""
    event, *others = BLANK_LINE.split(stream, 1)
    data = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    if not data:
        return True
    if not others and len(stream) >= _FIRST_EVENT_BYTES:
        return data[0][:1] in (b"{", b"[")
    return _is_json(b"\n".join(data))


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _not_json(response: EngineStream) -> UpstreamFailure:
    return UpstreamFailure("protocol", f"{response.origin} sent an event that is not JSON")

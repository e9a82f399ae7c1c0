"""Answers of a plain engine to the requests of a Dynamo frontend.

How a kind of engine takes and returns tokens is its own (:mod:`dynctl.wire.engine_kinds.tokens`).
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dynctl.adapters.dynamo.request_server import AnswerLost, ErrorItem, PlaneRequest
from dynctl.serving.engines.apis import DONE_DATA, EVENTS_A_TURN, EventCut, event_data
from dynctl.serving.engines.failures import UpstreamFailure, engine_reason
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.wire.dynamo.engine_output import EngineItem, EngineOutput
from dynctl.wire.engine_kinds.tokens import (
    EngineRefused,
    EngineTarget,
    InvalidOutput,
    NotSupported,
    TokenReader,
    UnexpectedAnswer,
    bootstrap_fields,
    engine_body,
)
from router_core import Role

_MAX_LINE: Final = 4 * 1024 * 1024
_RANK_HEADER: Final = "X-data-parallel-rank"

_log = logging.getLogger(__name__)


class Generation:
    """Answers ``generate``. ``target`` gives the engine as it is now; ``failed`` hears of failures
    of the engine, so that it can be examined."""

    def __init__(
        self,
        upstream: Upstream,
        target: Callable[[], EngineTarget],
        failed: Callable[[UpstreamFailure], None] = lambda failure: None,
    ) -> None:
        self._upstream = upstream
        self._target = target
        self._failed = failed

    async def handle(self, request: PlaneRequest) -> AsyncIterator[EngineItem]:
        """The items of one answer."""
        target, body = self._target(), request.body
        try:
            url, fields = engine_body(body, target)
        except NotSupported as error:
            # The frontend shows clients no text of workers, so the reason has to be here.
            reason = f"dynctl serve attach: {error}"
            _log.warning("request %s is refused: %s", request.request_id, reason)
            raise ErrorItem(reason, "InvalidArgument") from None
        headers = {}
        rank = body.routing.dp_rank if body.routing is not None else None
        if target.ranks > 1 and rank is not None:
            headers[_RANK_HEADER] = str(rank)
        reader = target.api.reader(body, target)
        stopped = _Stopped()
        try:
            stream = await self._upstream.open(url, msgspec.json.encode(fields), headers)
        except UpstreamFailure as failure:
            raise self._refusal(failure) from failure
        request.on_stop(lambda: stream.abandon(stopped.failure))
        try:
            if target.role is Role.PREFILL and body.bootstrap_info is not None:
                # A Dynamo frontend expects them first, though it made the room itself.
                room = bootstrap_fields(body.bootstrap_info)
                yield EngineItem(data=EngineOutput(token_ids=[], disaggregated_params=room))
            async for output in _outputs(stream, reader):
                yield EngineItem(data=output)
        except UpstreamFailure as failure:
            if failure is not stopped.failure:
                self._failed(failure)
                raise AnswerLost(str(failure)) from failure
            yield EngineItem(data=EngineOutput(token_ids=[], finish_reason="cancelled"))
        finally:
            stream.close()

    def _refusal(self, failure: UpstreamFailure) -> Exception:
        if failure.kind == "status" and failure.status in (400, 404, 413, 422):
            # The engine's message may have parts of the prompt.
            _log.warning(
                "the engine refused a request with HTTP %s; its own log may have the reason",
                failure.status,
            )
            return ErrorItem(_message_of(failure), "InvalidArgument")
        self._failed(failure)
        # Without an end, so that the frontend may send the request to another worker.
        return AnswerLost(str(failure))


@dataclass(frozen=True, slots=True)
class _Stopped:
    failure: UpstreamFailure = field(
        default_factory=lambda: UpstreamFailure("stopped", "the requester stopped the request")
    )


async def _outputs(stream: EngineStream, reader: TokenReader) -> AsyncIterator[EngineOutput]:
    """The outputs of an answer. Raises UpstreamFailure, or ErrorItem for an error in it."""
    try:
        async for event in _events(stream):
            for output in reader.read(event):
                yield output
        for output in reader.end():
            yield output
    except InvalidOutput as error:
        raise UpstreamFailure(error.kind, str(error)) from None
    except EngineRefused as refusal:
        raise ErrorItem(_error_text(refusal.error)) from None
    except UnexpectedAnswer as error:
        raise ErrorItem(str(error)) from None


async def _events(stream: EngineStream) -> AsyncIterator[bytes]:
    """The data of each server-sent event until ``[DONE]``; a whole answer is one event."""
    if "event-stream" not in stream.headers.get("content-type", ""):
        yield await stream.read(_MAX_LINE)
        return
    cut = EventCut()
    while data := await stream.readany():
        for number, event in enumerate(cut.feed(data), 1):
            if number % EVENTS_A_TURN == 0:
                await stream.turn()
            payload = event_data(event)
            if payload == DONE_DATA:
                await _to_end(stream)
                return
            if payload:
                yield payload
        if len(cut.waiting) > _MAX_LINE:
            raise UpstreamFailure("protocol", f"an event has more than {_MAX_LINE:,} bytes")
    last = event_data(cut.last())
    if last and last != DONE_DATA:
        yield last


async def _to_end(stream: EngineStream) -> None:
    """Read the end, so that the connection can be used again."""
    with suppress(UpstreamFailure):
        while await stream.readany():
            pass


def _message_of(failure: UpstreamFailure) -> str:
    """The engine's own words about a request that it refused; they go to its requester only."""
    reason = engine_reason(failure.body)
    if reason is None:
        return f"the engine returned status {failure.status} without a reason"
    return reason.message


def _error_text(error: Any) -> str:
    """The engine's own words in an error of a stream."""
    reason = engine_reason(msgspec.json.encode(error))
    return "no reason reported" if reason is None else reason.message

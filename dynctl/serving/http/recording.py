"""``GET /v1/recording``: a recording of this process, streamed as it is made.

For operators. The response is the file of :mod:`dynctl.documents.recording_file`. A reader that is
too slow loses records, which the recording notes; it never holds up the router.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from dynctl.serving.http.auth import guarded
from dynctl.serving.http.json_responses import bad_request
from dynctl.serving.records.recorder import (
    DEFAULT_MAX_BYTES,
    Recordings,
    RecordingsFull,
)
from dynctl.serving.routing.refusal import HttpError

PATH: Final = "/v1/recording"
CONTENT_TYPE: Final = "application/vnd.dynctl.recording"
#: Bounds of the parameters.
MAX_SECONDS: Final = 7 * 24 * 3600
LEAST_BYTES: Final = 1 << 20
MOST_BYTES: Final = 1 << 40
#: Seconds in which a reader has to take a chunk.
_WRITE_S: Final = 60.0


class RecordingApi:
    """The handler."""

    def __init__(self, recordings: Recordings, token: str | None) -> None:
        self._recordings = recordings
        self._token = token

    def routes(self) -> list[web.RouteDef]:
        return [web.get(PATH, guarded(self.stream, self._token), allow_head=False)]

    async def stream(self, http: web.Request) -> web.StreamResponse:
        """``seconds`` and ``max_bytes`` bound the recording."""
        for name in http.query:
            if name not in ("seconds", "max_bytes"):
                raise bad_request(
                    f"{name[:64]}: unknown parameter, expected one of seconds, max_bytes",
                    param=name[:64],
                    code="unknown_parameter",
                )
        seconds = _number(http.query, "seconds", 1, MAX_SECONDS)
        most = _number(http.query, "max_bytes", LEAST_BYTES, MOST_BYTES)
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        sink = _ResponseSink(response, http)
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await self._recordings.record(
                    sink,
                    max_bytes=most or DEFAULT_MAX_BYTES,
                    seconds=seconds,
                )
                await response.write_eof()
        except RecordingsFull as error:
            raise HttpError(
                429, f"{error}; end one of them first", "rate_limit_error", "recordings_full"
            ) from None
        return response


class _ResponseSink:
    """The body of a response. A reader that takes nothing for long is disconnected."""

    def __init__(self, response: web.StreamResponse, http: web.Request) -> None:
        self._response = response
        self._http = http

    async def write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._http)
        async with asyncio.timeout(_WRITE_S):
            await self._response.write(data)


def _number(query: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """Raises HttpError naming the parameter; None where it is not given."""
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and low <= int(text[:20]) <= high):
        raise bad_request(
            f"{name}: expected {low:,} to {high:,}, got {text[:20]!r}",
            param=name,
            code="out_of_range",
        )
    return int(text)

"""HTTP requests to engines: inference on the data path, and small bounded control calls."""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgspec

from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.http_client import EngineClient, origin_of
from dynctl.serving.engines.response_stream import ClientBounds, EngineStream
from dynctl.serving.routing.config import Limits

_HEADERS = {"user-agent": "dynctl"}
_CONTROL_ANSWER_BYTES = 4 * 1024 * 1024
_ERROR_ANSWER_BYTES = 64 * 1024


class Upstream:
    """The engines' client. ``open`` is for inference, ``get`` and ``post`` for control.

    Keeps connections alive; never follows redirects, never uses proxies or cookies.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._client: EngineClient | None = None
        self._credentials: dict[str, str] = {}

    def authorize(self, url: str, key: str | None) -> None:
        """Send ``key`` with every request to the engine at ``url``; None: no longer."""
        origin = str(origin_of(url))
        self._credentials.pop(origin, None)
        if key is not None:
            self._credentials[origin] = f"Bearer {key}"

    async def __aenter__(self) -> "Upstream":
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Open the client; needs a running event loop."""
        limits = self._limits
        self._client = EngineClient(
            ClientBounds(
                connect_s=limits.connect_s,
                first_byte_s=limits.first_byte_s,
                idle_s=limits.idle_s,
                header_bytes=limits.header_bytes,
            )
        )

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    async def open(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        first_byte_s: float | None = None,
        waiting: set[EngineStream] | None = None,
    ) -> EngineStream:
        """POST an inference request; returns when the response's head has arrived.

        The caller closes it. Raises UpstreamFailure, also for an error status. ``first_byte_s`` and
        ``waiting`` as in :meth:`EngineClient.post`.
        """
        if self._client is None:
            raise RuntimeError("the upstream client is not started")
        stream = await self._client.post(
            url,
            body,
            self._with_key(url, headers),
            first_byte_s=first_byte_s,
            waiting=waiting,
        )
        if stream.status != 200:
            if waiting is not None:
                waiting.discard(stream)
            raise await _refusal(stream)
        return stream

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """A control request: status and body; raises UpstreamFailure."""
        return await self._control("GET", url, None, timeout_s)

    async def post(self, url: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        """A control request with a JSON body; raises UpstreamFailure."""
        return await self._control("POST", url, msgspec.json.encode(body), timeout_s)

    async def pass_on(
        self, method: str, url: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """A client's control request: status and body as they are; raises UpstreamFailure."""
        return await self._control(method, url, body, timeout_s)

    def _with_key(self, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The headers with the engine's key, unless they have the client's."""
        if not self._credentials or "authorization" in headers:
            return headers
        value = self._credentials.get(str(origin_of(url)))
        return headers if value is None else {**headers, "authorization": value}

    async def _control(
        self, method: str, url: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        if self._client is None:
            raise RuntimeError("the upstream client is not started")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.control(
                    method, url, body, self._with_key(url, _HEADERS), _CONTROL_ANSWER_BYTES
                )
        except TimeoutError:
            where = str(origin_of(url))
            raise UpstreamFailure("timeout", f"{where} did not respond in time") from None


async def _refusal(stream: EngineStream) -> UpstreamFailure:
    read = bytearray()
    try:
        # The beginning of a longer one, or of one that breaks off, has the reason.
        while len(read) < _ERROR_ANSWER_BYTES and (piece := await stream.readany()):
            read += piece
    except UpstreamFailure:
        pass
    finally:
        stream.close()
    body = bytes(read[:_ERROR_ANSWER_BYTES])
    if stream.headers.get("content-encoding", "identity").lower() != "identity":
        body = b""
    if stream.status < 400:
        return UpstreamFailure(
            "protocol", f"{stream.origin} returned status {stream.status}; expected 200"
        )
    return UpstreamFailure(
        "status",
        f"{stream.origin} returned status {stream.status}",
        status=stream.status,
        body=body,
        retry_after=stream.headers.get("retry-after"),
    )

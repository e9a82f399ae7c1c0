"""Talking to engines over HTTP: one session, bounded answers, and failures with a name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from dynctl.serving.config import Limits

_JSON = {"content-type": "application/json"}
#: Below the 5 s after which uvicorn (so vLLM and SGLang) closes: a request must not meet the close.
_KEEPALIVE_S = 4.0
_CONTROL_ANSWER_BYTES = 4 * 1024 * 1024


@dataclass(eq=False)
class UpstreamFailure(Exception):
    """An engine did not do its part.

    ``kind``: ``refused`` (nobody listens), ``connect``, ``reset``, ``timeout``, ``status`` (an
    error answer, then ``status``, ``body`` and ``content_type`` hold it) or ``protocol``.
    ``retryable``: another engine may well do better.
    """

    kind: str
    message: str
    status: int = 0
    body: bytes = b""
    content_type: str = "application/json"
    retry_after: str | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def retryable(self) -> bool:
        return self.kind != "status" or self.status >= 500 or self.status == 429

    @property
    def sent(self) -> bool:
        """Whether the engine may have started on the request."""
        return self.kind not in ("refused", "connect")


class Upstream:
    """The HTTP client of a frontend. ``stream`` is for inference, ``get`` and ``post`` for control.

    Keeps connections alive; never follows redirects, never uses proxies or cookies.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

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
        """Open the session; needs a running event loop."""
        limits = self._limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ttl_dns_cache=30, keepalive_timeout=_KEEPALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect_s, sock_read=limits.first_byte_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"accept-encoding": "identity", "user-agent": "dynctl"},
            read_bufsize=2**17,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def open(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """POST an inference request; the answer's head is there, its body is not read.

        The caller closes or reads it. Raises UpstreamFailure, also for an error status.
        """
        try:
            response = await self._opened().post(
                url, data=body, headers={**_JSON, **headers}, allow_redirects=False
            )
        except Exception as error:
            raise _failure(url, error) from error
        if response.status != 200:
            raise await self._refused(url, response)
        return response

    async def read(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        """The whole body of an answer; raises UpstreamFailure for a broken or too long one."""
        parts: list[bytes] = []
        size = 0
        try:
            async for part in response.content.iter_any():
                size += len(part)
                if size > limit:
                    response.close()
                    raise UpstreamFailure(
                        "protocol", f"{response.url.origin()} answered more than {limit} bytes"
                    )
                parts.append(part)
        except UpstreamFailure:
            raise
        except Exception as error:
            raise _failure(str(response.url), error) from error
        return b"".join(parts)

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """A control request: status and body; raises UpstreamFailure."""
        return await self._control("GET", url, None, timeout_s)

    async def post(self, url: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        """A control request with a JSON body; raises UpstreamFailure."""
        return await self._control("POST", url, msgspec.json.encode(body), timeout_s)

    async def _control(
        self, method: str, url: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        try:
            async with self._opened().request(
                method,
                url,
                data=body,
                headers=_JSON if body is not None else None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                return response.status, await self.read(response, _CONTROL_ANSWER_BYTES)
        except UpstreamFailure:
            raise
        except Exception as error:
            raise _failure(url, error) from error

    async def _refused(self, url: str, response: aiohttp.ClientResponse) -> UpstreamFailure:
        try:
            body = await self.read(response, 64 * 1024)
        except UpstreamFailure:
            body = b""
        return UpstreamFailure(
            "status",
            f"{_origin(url)} answered {response.status}",
            status=response.status,
            body=body,
            content_type=response.headers.get("content-type", "application/json"),
            retry_after=response.headers.get("retry-after"),
        )

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the upstream session is not started")
        return self._session


def failure_of(url: str, error: Exception) -> UpstreamFailure:
    """A failure while an answer was being read."""
    return _failure(url, error)


def _failure(url: str, error: Exception) -> UpstreamFailure:
    where = _origin(url)
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, ConnectionRefusedError):
            return UpstreamFailure("refused", f"{where} refused the connection")
        return UpstreamFailure("connect", f"{where} cannot be reached: {cause.strerror or cause}")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamFailure("connect", f"{where} did not accept a connection in time")
    if isinstance(error, TimeoutError):
        return UpstreamFailure("timeout", f"{where} did not answer in time")
    if isinstance(error, (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, OSError)):
        return UpstreamFailure("reset", f"{where} broke the connection")
    if isinstance(error, aiohttp.ClientPayloadError):
        return UpstreamFailure("reset", f"{where} broke off its answer")
    if isinstance(error, aiohttp.ClientError):
        return UpstreamFailure("protocol", f"{where}: {type(error).__name__}")
    raise error


def _origin(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.split('/', 1)[0]}"

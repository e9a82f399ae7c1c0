"""The failures between the router and an engine, each with a name."""

from dataclasses import dataclass

import aiohttp

from dynctl.adapters.ports import RequestPlaneError
from dynctl.base.errors import CONNECTION_REFUSED, network_reason

_UNAVAILABLE = 503
_TOO_LARGE = 413


@dataclass(eq=False)
class UpstreamFailure(Exception):
    """A request to an engine failed.

    ``kind``: ``refused`` (no process listens), ``connect``, ``reset``, ``timeout``, ``status`` (an
    error answer, then ``status``, ``body`` and ``content_type`` hold it), ``protocol`` (not the
    answer of an engine), ``ejected`` (the engine was ejected while the request waited) or ``plane``
    (what is between us and all engines is not reachable; no engine failed).
    ``retryable``: another engine may succeed. ``shown``: the client's stream has its error already.
    """

    kind: str
    message: str
    status: int = 0
    body: bytes = b""
    content_type: str = "application/json"
    retry_after: str | None = None
    shown: bool = False

    def __str__(self) -> str:
        return self.message

    @property
    def retryable(self) -> bool:
        return self.kind != "status" or self.status >= 500 or self.status == 429

    @property
    def of_engine(self) -> bool:
        """Whether the engine failed, not the client's request or its share of the engine."""
        return self.kind != "plane" and (self.kind != "status" or self.status >= 500)

    @property
    def fatal(self) -> bool:
        """Whether the engine may have died of the request."""
        return self.kind == "reset" or (self.kind == "status" and self.status == 500)

    @property
    def sent(self) -> bool:
        """Whether the engine may have started on the request."""
        return self.kind not in ("refused", "connect", "plane")


def connect_failure(where: str, error: Exception) -> UpstreamFailure:
    """The connection failed, so nothing was sent. ``where`` is the engine's origin."""
    reason = network_reason(error)
    if reason == CONNECTION_REFUSED:
        return UpstreamFailure("refused", f"{where} refused the connection")
    if isinstance(error, TimeoutError):
        return UpstreamFailure("connect", f"{where} did not accept a connection in time")
    return UpstreamFailure("connect", f"{where} is not reachable: {reason}")


def plane_failure(error: RequestPlaneError) -> UpstreamFailure:
    """The failure of a request that went over Dynamo's request plane."""
    if error.kind == "refusal":
        # It is draining, or does not serve this endpoint any more.
        return UpstreamFailure("status", str(error), status=_UNAVAILABLE)
    if error.kind == "size":
        return UpstreamFailure("status", str(error), status=_TOO_LARGE)
    if error.kind == "plane":
        return UpstreamFailure("plane", str(error), status=_UNAVAILABLE, retry_after="1")
    return UpstreamFailure(error.kind, str(error))


def control_failure(where: str, error: Exception) -> UpstreamFailure:
    """A control request that failed; raises ``error`` if the engine is not its cause."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return connect_failure(where, TimeoutError())
    if isinstance(error, aiohttp.ClientConnectorError):
        return connect_failure(where, error.os_error)
    if isinstance(error, TimeoutError):
        return UpstreamFailure("timeout", f"{where} did not respond in time")
    if isinstance(error, (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, OSError)):
        return UpstreamFailure("reset", f"{where} closed the connection")
    if isinstance(error, aiohttp.ClientPayloadError):
        return UpstreamFailure("reset", f"{where} closed the connection during its response")
    if isinstance(error, aiohttp.ClientError):
        return UpstreamFailure("protocol", f"{where}: {type(error).__name__}")
    raise error

"""The failures between the router and an engine, each with a name."""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from dynctl.adapters.ports import RequestPlaneError
from dynctl.base.errors import CONNECTION_REFUSED, network_reason, single_line

_UNAVAILABLE = 503
_TOO_LARGE = 413


@dataclass(eq=False)
class UpstreamFailure(Exception):
    """A request to an engine failed.

    ``kind``: ``refused`` (no process listens), ``connect``, ``vanished`` (the host does not respond
    any more), ``reset``, ``timeout``, ``status`` (an error answer, then ``status``, ``body`` and
    ``content_type`` hold it), ``protocol`` (not the answer of an engine), ``ejected`` (the engine
    was ejected while the request waited) or ``plane`` (what is between us and all engines is not
    reachable; no engine failed).
    ``retryable``: another engine may succeed. ``shown``: the client's stream has its error already.
    ``plane_gone``: the request has waited for what is between us and all engines.
    """

    kind: str
    message: str
    status: int = 0
    body: bytes = b""
    content_type: str = "application/json"
    retry_after: str | None = None
    shown: bool = False
    plane_gone: bool = False

    def __str__(self) -> str:
        return self.message

    @property
    def retryable(self) -> bool:
        if self.kind == "status":
            return self.status >= 500 or self.status == 429
        return not self.plane_gone

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
        return UpstreamFailure(
            "plane", str(error), status=_UNAVAILABLE, retry_after="1", plane_gone=error.gone
        )
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


#: Characters of an engine's reason that a client gets.
_REASON_CHARS: Final = 2000
_WORD_CHARS: Final = 100
_MOST_PROBLEMS: Final = 8
_DEPTH: Final = 4
#: The fields in which servers write why they refuse, in the order in which they are tried: OpenAI's
#: and vLLM's, SGLang's and gRPC's, FastAPI's, and those of proxies.
_REASONS: Final = (
    *("error", "message", "detail", "msg", "reason", "error_message", "description", "errors"),
    *("error_description", "title"),
)
_SCRIPTS: Final = re.compile(
    r"<(script|style|title)\b.*?(?:</\1\s*>|\Z)", re.DOTALL | re.IGNORECASE
)
_TAGS: Final = re.compile(r"<[^>]*>?")


@dataclass(frozen=True, slots=True)
class EngineReason:
    """Why an engine refused a request, in its own words: one line, bounded, without control
    characters. ``type``, ``code`` and ``param`` as in OpenAI's errors, where it has them."""

    message: str
    type: str | None = None
    code: int | str | None = None
    param: str | None = None


def reported_error(origin: str, body: bytes, *, shown: bool = False) -> UpstreamFailure:
    """The failure of an engine whose stream has an error event with this data.

    Its status is the error's own code, else 500. ``shown``: the client has the event already.
    """
    reason = engine_reason(body)
    code = None if reason is None else reason.code
    return UpstreamFailure(
        "status",
        f"{origin} reported an error in its stream",
        status=code if isinstance(code, int) and 400 <= code <= 599 else 500,
        body=b"" if shown else body,
        shown=shown,
    )


def engine_reason(body: bytes) -> EngineReason | None:
    """The reason in the body of an engine's error, whatever its shape; None without one."""
    try:
        plain = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        plain = _as_text(body.decode("utf-8", "replace"))
    text = _reason(plain, _DEPTH)
    if not text.strip() and isinstance(plain, dict | list) and plain:
        text = body.decode("utf-8", "replace")  # a shape that is not known
    message = single_line(text, _REASON_CHARS)
    if not message:
        return None
    shown = _error_object(plain)
    code = shown.get("code")
    named = isinstance(code, (int, str)) and not isinstance(code, bool)
    return EngineReason(
        message,
        _word(shown.get("type") or shown.get("error_type")),
        (_word(code) if isinstance(code, str) else code) if named else None,
        _word(shown.get("param")),
    )


def _reason(plain: Any, depth: int) -> str:
    """The first text under a field with a reason; empty without one."""
    if isinstance(plain, str):
        return plain
    if depth == 0:
        return ""
    if isinstance(plain, list):
        problems = (_problem(each, depth - 1) for each in plain[:_MOST_PROBLEMS])
        return "; ".join(filter(None, problems))
    if isinstance(plain, dict):
        # A short text in "error" is a title where there is a message beside it.
        names = _REASONS if not isinstance(plain.get("error"), str) else (*_REASONS[1:], "error")
        texts = (_reason(plain.get(name), depth - 1) for name in names)
        return next((text for text in texts if text.strip()), "")
    return ""


def _problem(plain: Any, depth: int) -> str:
    """An entry of a list of problems; FastAPI's have the place of each."""
    text = _reason(plain, depth)
    place = plain.get("loc") if isinstance(plain, dict) else None
    if text and isinstance(place, list) and place:
        return ".".join(str(step)[:_WORD_CHARS] for step in place[:_MOST_PROBLEMS]) + f": {text}"
    return text


def _error_object(plain: Any) -> Mapping[str, Any]:
    """The object with the type, the code and the field of an error."""
    if isinstance(plain, list) and plain:
        plain = plain[0]
    if not isinstance(plain, dict):
        return {}
    error = plain.get("error")
    return error if isinstance(error, dict) else plain


def _word(value: Any) -> str | None:
    return single_line(value, _WORD_CHARS) or None if isinstance(value, str) else None


def _as_text(text: str) -> str:
    """A body that is not JSON, without the tags of a web page."""
    if not text.lstrip().startswith("<"):
        return text
    return html.unescape(_TAGS.sub(" ", _SCRIPTS.sub(" ", text)))

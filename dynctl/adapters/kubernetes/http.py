"""Requests to one API server: bounded, retried on its request, its refusals as errors.

They use the connection pool of the official client, but not its typed models, which are slow and
need a hundred times the memory of their content.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import quote, urlencode

import msgspec

from dynctl import version
from dynctl.adapters.kubernetes.login import Login
from dynctl.adapters.ports import ClusterRefusal
from dynctl.base.errors import DynctlError, TimedOut, Unreachable, network_reason, single_line

Method: TypeAlias = Literal["GET", "POST", "PUT", "PATCH", "APPLY", "DELETE"]
"""HTTP's, where PATCH is a merge patch and APPLY a PATCH that the server applies."""
_PATCHES: Final = {
    "PATCH": "application/merge-patch+json",
    "APPLY": "application/apply-patch+yaml",  # JSON is YAML
}

MAX_BYTES: Final = 256 << 20
"""Maximum of one response, so of one page of a list."""
MAX_LINE: Final = 32 << 20
"""Maximum of one event of a watch. An object has 1.5 MB in etcd, several times that here."""

_PIECE: Final = 1 << 16
_MAX_ERROR_BYTES: Final = 1 << 18
_MOST_TRIES: Final = 5
_MOST_KEPT: Final = 64
_SLOWEST: Final = 6
"""A whole response may take this many times the timeout while data arrives."""
_BUSY: Final = (429, 503)
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A lost connection is noticed within 40 s, also during a watch."""


class ApiServer:
    """Blocking, for any number of threads. ``timeout`` in seconds: for connecting, for a response
    and each next piece of it, and for all retries together. Raises UsageProblem, Unreachable."""

    def __init__(self, login: Login, timeout: float) -> None:
        from kubernetes.client.rest import RESTClientObject

        self.login = login
        self.timeout = timeout
        self.context = login.context
        configuration = login.configuration
        if not configuration.verify_ssl:
            import urllib3

            # Requested in the kubeconfig; kubectl does not warn about it either.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        # With more open connections, urllib3 drops some and logs that to stderr.
        configuration.connection_pool_maxsize = _MOST_KEPT
        self._pool: Any = RESTClientObject(configuration).pool_manager
        self._pool.connection_pool_kw["socket_options"] = _socket_options()
        self._agent = f"dynctl/{version()}"
        self._base: str = configuration.host.rstrip("/")
        self._lock = threading.Lock()
        self._under_way: set[Callable[[], None]] = set()
        self._closing = threading.Event()
        self._now: float | None = None

    @property
    def now(self) -> float:
        """The Date of the last response; before the first one, our own clock."""
        with self._lock:
            return time.time() if self._now is None else self._now

    def object(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        method: Method | None = None,
    ) -> Mapping[str, Any]:
        """The JSON object of the response; with ``body`` the request is a POST, or ``method``."""
        with self.answer(path, query, body=body, method=method) as response:
            within = _SLOWEST * self.timeout
            data = b"".join(self.pieces(response, path, MAX_BYTES, within=within))
        return self.decoded(data, path)

    @contextmanager
    def answer(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        method: Method | None = None,
        silence: float | None = None,
    ) -> Iterator[Any]:
        """A response of status 2xx with an unread body; ``silence``: seconds allowed without data
        (default: ``timeout``). Ends with the block, and when :meth:`close` is called.
        """
        response = self._request(path, query, body, method)
        held = _socket_of(response)
        if silence is not None and held is not None:
            held.settimeout(silence)

        def wake() -> None:
            _shut(response)

        self.began(wake)
        try:
            yield response
        finally:
            self.ended(wake)
            # A connection with unread data cannot be used for another request.
            response.close()
            response.release_conn()

    def pieces(
        self, response: Any, path: str, most: int | None, *, within: float | None = None
    ) -> Iterator[bytes]:
        """The body as it arrives. Raises Unreachable if it is cut, has more than ``most`` bytes, or
        is not complete after ``within`` seconds."""
        size = 0
        deadline = None if within is None else time.monotonic() + within
        try:
            while piece := response.read1(_PIECE):
                size += len(piece)
                if most is not None and size > most:
                    raise Unreachable(
                        f"the API server's response to {path} has more than {most:,} bytes",
                        "read less: one namespace (-n NAME)",
                    )
                if deadline is not None and time.monotonic() > deadline:
                    raise Unreachable(
                        f"the API server's response to {path} is not complete after {within:g} s",
                        "read less: one namespace (-n NAME), or wait longer: --timeout SECONDS",
                    )
                yield piece
        except DynctlError:
            raise
        except Exception as error:
            raise self.unreachable(error, path) from error
        if self._closing.is_set():
            raise self._closed_error()

    def decoded(self, data: bytes, path: str) -> Mapping[str, Any]:
        """Decode an object. Raises Unreachable if it is not a JSON object."""
        answer = _object(data)
        if answer is None:
            raise Unreachable(
                f"{self.context.server} does not return a JSON object for {path}",
                f"is that the API server? see context {self.context.name} in the kubeconfig",
            )
        return answer

    def refusal(self, status: int, data: bytes, path: str) -> Exception:
        """The error of a response without 2xx; ``data`` is its body."""
        if status == 401:
            return self.login.refused()
        if 300 <= status < 400:
            return Unreachable(
                f"{self.context.server} returned a redirect ({status}) for {path}",
                f"is that the API server? see context {self.context.name} in the kubeconfig",
            )
        answer = _object(data)
        if answer is None or answer.get("kind") != "Status":
            said = single_line(data.decode(errors="replace")) or "no reason reported"
            return ClusterRefusal(status, "", f"{path}: {said} (HTTP {status})")
        return refusal_of(answer, status, path)

    def note_date(self, date: str | None) -> None:
        """Keep the Date of a response."""
        try:
            moment = parsedate_to_datetime(date).timestamp() if date else None
        except (ValueError, TypeError, OverflowError):
            return
        with self._lock:
            self._now = self._now if moment is None else moment

    def unreachable(self, error: BaseException, path: str) -> Unreachable:
        """The error of a failed connection to the server."""
        if self._closing.is_set():
            return self._closed_error()
        server, name = self.context.server, self.context.name
        certificate = _wrapped_error(error, ssl.SSLCertVerificationError)
        if certificate is not None:
            return Unreachable(
                f"the TLS certificate of {server} (context {name}) is not accepted: "
                f"{single_line(str(certificate.verify_message))}",
                f"the certificate-authority of context {name} is not the one that signed it, or "
                "the name differs; get a new kubeconfig from the cluster administrator",
            )
        kind: type[Unreachable] = Unreachable
        tls = _wrapped_error(error, ssl.SSLError)
        if tls is not None:
            what = f"the TLS handshake failed: {single_line(str(tls.reason or tls))}"
        elif (
            inner := _wrapped_error(error, (socket.gaierror, ConnectionRefusedError))
        ) is not None:
            what = network_reason(inner)
        else:
            what = _in_words(error, self.timeout)
            kind = TimedOut if _timed_out(error) else Unreachable
        return kind(
            f"the API server {server} (context {name}) is not reachable: {what}",
            f"is the cluster up, and is this the right context? the request was {path}",
        )

    def began(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` from the thread of :meth:`close`; Unreachable after it."""
        with self._lock:
            self._under_way.add(wake)
        if self._closing.is_set():
            wake()

    def ended(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._under_way.discard(wake)

    def close(self) -> None:
        """Ends every response that is being read, and closes all connections."""
        self._closing.set()
        with self._lock:
            woken = list(self._under_way)
        for wake in woken:
            wake()
        self._pool.clear()

    # -- one request -----------------------------------------------------------------------

    def _request(
        self,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        method: Method | None,
    ) -> Any:
        deadline = time.monotonic() + self.timeout
        renewed, tries = False, 0
        while True:
            tries += 1
            response = self._send(path, query, body, method)
            self.note_date(response.headers.get("Date"))
            if 200 <= response.status < 300:
                return response
            try:
                data = response.read(_MAX_ERROR_BYTES)
            except Exception as error:
                raise self.unreachable(error, path) from error
            finally:
                response.close()
                response.release_conn()
            if response.status == 401 and not renewed and self.login.renew():
                renewed = True
                continue
            pause = _seconds(response.headers.get("Retry-After"))
            again = response.status in _BUSY and pause is not None and tries < _MOST_TRIES
            if not again or pause is None or time.monotonic() + pause >= deadline:
                raise self.refusal(response.status, data, path)
            self._closing.wait(pause)

    def _send(
        self,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        method: Method | None,
    ) -> Any:
        import urllib3

        method = method or ("GET" if body is None else "POST")
        if self._closing.is_set():
            raise self._closed_error()
        headers = urllib3.HTTPHeaderDict(self.login.headers())
        headers["Accept"] = "application/json, */*"
        headers["User-Agent"] = self._agent
        if body is not None:
            headers["Content-Type"] = _PATCHES.get(method, "application/json")
        # Repeated once if a kept connection is closed: there was no response, and every request
        # may be sent twice.
        for last in (False, True):
            try:
                return self._pool.request(
                    "PATCH" if method in _PATCHES else method,
                    self.url(path, query),
                    body=None if body is None else msgspec.json.encode(body),
                    headers=headers,
                    preload_content=False,
                    redirect=False,
                    retries=False,
                    timeout=urllib3.Timeout(connect=self.timeout, read=self.timeout),
                )
            except Exception as error:
                cut = _wrapped_error(error, ConnectionResetError) or _wrapped_error(
                    error, BrokenPipeError
                )
                if last or cut is None:
                    raise self.unreachable(error, path) from error
        raise AssertionError("unreachable")

    def url(self, path: str, query: Mapping[str, str] | None = None) -> str:
        """The URL of a path of the API; it begins with a slash."""
        return f"{self._base}{quote(path, safe='/%:~')}{f'?{urlencode(query)}' if query else ''}"

    def _closed_error(self) -> Unreachable:
        return Unreachable(f"the connection to {self.context.server} was closed by dynctl itself")


def refusal_of(status: Mapping[str, Any], code: int, path: str) -> ClusterRefusal:
    """The refusal of a Status object; ``code`` if it has none."""
    found, reason, message = (status.get(key) for key in ("code", "reason", "message"))
    return ClusterRefusal(
        found if isinstance(found, int) and found else code,
        reason if isinstance(reason, str) else "",
        single_line(message) if isinstance(message, str) and message else f"{path}: refused",
    )


def _socket_of(response: Any) -> Any:
    """The socket of a response that is being read; None once it is read."""
    return getattr(getattr(response, "connection", None), "sock", None)


def _shut(response: Any) -> None:
    """Wake the reader of this response."""
    held = _socket_of(response)
    if held is not None:
        shut_socket(held)
    else:
        # The server closes after this response, so the connection has released its socket.
        with suppress(ValueError, RuntimeError, OSError):
            response.shutdown()


def shut_socket(held: socket.socket) -> None:
    """Shut it down both ways; a reader in any thread gets an error."""
    try:
        # Not the method of an SSL socket, which would remove the reader's cipher.
        socket.socket.shutdown(held, socket.SHUT_RDWR)
    except OSError:
        return


def _socket_options() -> list[tuple[int, int, int]]:
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    for name, seconds in _KEEPALIVE.items():
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), seconds))
    return options


def _object(data: bytes) -> dict[str, Any] | None:
    """The JSON object of a body; None for any other body."""
    try:
        answer = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return answer if isinstance(answer, dict) else None


def _seconds(header: str | None) -> float | None:
    return float(header) if header and header.isdecimal() else None


def _wrapped_error(error: BaseException, kind: type[Any] | tuple[type[Any], ...]) -> Any:
    """The exception of this kind, or one of these, that another one wraps, at any depth."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        cause = waiting.pop()
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        if isinstance(cause, kind):
            return cause
        seen.add(id(cause))
        waiting += [cause.__cause__, cause.__context__, *cause.args, getattr(cause, "reason", None)]
    return None


def _timed_out(error: BaseException) -> bool:
    import urllib3.exceptions as known

    return (
        _wrapped_error(error, known.TimeoutError) is not None
        or _wrapped_error(error, TimeoutError) is not None
    )


def _in_words(error: BaseException, timeout: float) -> str:
    import urllib3.exceptions as known

    if _timed_out(error):
        return f"no response within {timeout:g} s"
    if _wrapped_error(error, known.ProxyError) is not None:
        return "the proxy refused the connection"
    if _wrapped_error(error, known.ProtocolError) or _wrapped_error(error, ConnectionError):
        return "the connection was closed"
    return network_reason(_wrapped_error(error, OSError) or error)

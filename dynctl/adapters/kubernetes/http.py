"""Requests to one API server: bounded, retried where it asks for it, its refusals made errors.

They go over the connection pool that the official client sets up, and not through its typed
models, which are slow and take a hundred times the memory of what they hold.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from dynctl import version
from dynctl.adapters.kubernetes.login import Login
from dynctl.adapters.ports import ClusterRefusal
from dynctl.base.errors import DynctlError, Unreachable, single_line

MAX_BYTES: Final = 256 << 20
"""Of one answer, so of one page of a list."""
MAX_LINE: Final = 32 << 20
"""Of one event of a watch. An object is at most 1.5 MB in etcd, and several times that here."""

_PIECE: Final = 1 << 16
_MAX_ERROR_BYTES: Final = 1 << 18
_MOST_TRIES: Final = 5
_MOST_KEPT: Final = 64
_SLOWEST: Final = 6
"""Times the timeout, that a whole answer may take while it keeps coming."""
_BUSY: Final = (429, 503)
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A connection whose other end vanished is noticed within 40 s, also in the middle of a watch."""


class ApiServer:
    """Blocking, for any number of threads. ``timeout`` is in seconds: what connecting, an answer
    and each next piece of it may take, and retries together. Raises UsageProblem, Unreachable."""

    def __init__(self, login: Login, timeout: float) -> None:
        from kubernetes.client.rest import RESTClientObject

        self.login = login
        self.timeout = timeout
        self.context = login.context
        configuration = login.configuration
        if not configuration.verify_ssl:
            import urllib3

            # The person asked for it in the kubeconfig; kubectl is silent about it too.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        # Where more are open at once, urllib3 throws them away and writes so to stderr.
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
        """By the Date of the last answer; before the first one, by our own clock."""
        with self._lock:
            return time.time() if self._now is None else self._now

    def object(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """The JSON object that the server answers with; with ``body`` it is a POST."""
        with self.answer(path, query, body=body) as response:
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
        silence: float | None = None,
    ) -> Iterator[Any]:
        """A response of status 2xx, its body to be read; ``silence`` seconds without a piece of it
        are borne, ``timeout`` unless told. Ends with the block, and when :meth:`close` is called.
        """
        response = self._asked(path, query, body)
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
            # What was not read to its end cannot be used for another request.
            response.close()
            response.release_conn()

    def pieces(
        self, response: Any, path: str, most: int | None, *, within: float | None = None
    ) -> Iterator[bytes]:
        """The body as it comes. Raises Unreachable where it is cut, over ``most`` bytes, or still
        coming after ``within`` seconds."""
        size = 0
        deadline = None if within is None else time.monotonic() + within
        try:
            for piece in _as_it_comes(response):
                size += len(piece)
                if most is not None and size > most:
                    raise Unreachable(
                        f"the API server's answer to {path} is over {most:,} bytes",
                        "ask for less: one namespace (-n NAME)",
                    )
                if deadline is not None and time.monotonic() > deadline:
                    raise Unreachable(
                        f"the API server's answer to {path} is not complete after {within:g} s",
                        "ask for less: one namespace (-n NAME), or give it time: --timeout SECONDS",
                    )
                yield piece
        except DynctlError:
            raise
        except Exception as error:
            raise self.unreachable(error, path) from error
        if self._closing.is_set():
            raise self._closed()

    def decoded(self, data: bytes, path: str) -> Mapping[str, Any]:
        """Raises Unreachable where it is no JSON object."""
        try:
            found = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            found = None
        if not isinstance(found, dict):
            raise Unreachable(
                f"{self.context.server} answers {path} with something that is no JSON object",
                f"is that the API server? see context {self.context.name} in the kubeconfig",
            )
        return found

    def refusal(self, status: int, data: bytes, path: str) -> Exception:
        """What an answer without 2xx means; ``data`` is its body."""
        if status == 401:
            return self.login.refused()
        if 300 <= status < 400:
            return Unreachable(
                f"{self.context.server} answers {path} with a redirect ({status})",
                f"is that the API server? see context {self.context.name} in the kubeconfig",
            )
        try:
            told = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            told = None
        if not isinstance(told, dict) or told.get("kind") != "Status":
            said = single_line(data.decode(errors="replace")) or "no reason given"
            return ClusterRefusal(status, "", f"{path}: {said} (HTTP {status})")
        return refusal_of(told, status, path)

    def heard(self, date: str | None) -> None:
        """Take over the Date of an answer."""
        try:
            moment = parsedate_to_datetime(date).timestamp() if date else None
        except (ValueError, TypeError, OverflowError):
            return
        with self._lock:
            self._now = self._now if moment is None else moment

    def unreachable(self, error: BaseException, path: str) -> Unreachable:
        """What went wrong on the way to the server, in words."""
        if self._closing.is_set():
            return self._closed()
        server, name = self.context.server, self.context.name
        certificate = _found(error, ssl.SSLCertVerificationError)
        if certificate is not None:
            return Unreachable(
                f"the TLS certificate of {server} (context {name}) is not accepted: "
                f"{single_line(str(certificate.verify_message))}",
                f"the certificate-authority of context {name} is not the one that signed it, or "
                "the name differs; take the kubeconfig anew from whoever runs the cluster",
            )
        tls = _found(error, ssl.SSLError)
        if tls is not None:
            what = f"the TLS handshake failed: {single_line(str(tls.reason or tls))}"
        elif _found(error, socket.gaierror) is not None:
            what = "its name is not known"
        elif _found(error, ConnectionRefusedError) is not None:
            what = "connection refused"
        else:
            what = _in_words(error, self.timeout)
        return Unreachable(
            f"the API server {server} (context {name}) cannot be reached: {what}",
            f"is the cluster up, and is this the right context? asked for {path}",
        )

    def began(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when :meth:`close` is, from that thread; Unreachable after it."""
        with self._lock:
            self._under_way.add(wake)
        if self._closing.is_set():
            wake()

    def ended(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._under_way.discard(wake)

    def close(self) -> None:
        """Ends every answer that is being read, and leaves no connection."""
        self._closing.set()
        with self._lock:
            woken = list(self._under_way)
        for wake in woken:
            wake()
        self._pool.clear()

    # -- one request -----------------------------------------------------------------------

    def _asked(
        self,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
    ) -> Any:
        deadline = time.monotonic() + self.timeout
        renewed, tries = False, 0
        while True:
            tries += 1
            response = self._sent(path, query, body)
            self.heard(response.headers.get("Date"))
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

    def _sent(
        self,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
    ) -> Any:
        import urllib3

        if self._closing.is_set():
            raise self._closed()
        headers = urllib3.HTTPHeaderDict(self.login.headers())
        headers["Accept"] = "application/json, */*"
        headers["User-Agent"] = self._agent
        if body is not None:
            headers["Content-Type"] = "application/json"
        # Repeated once where a kept connection turns out to be closed: nothing was answered, and
        # everything that is asked may be asked twice.
        for last in (False, True):
            try:
                return self._pool.request(
                    "GET" if body is None else "POST",
                    self.url(path, query),
                    body=None if body is None else msgspec.json.encode(body),
                    headers=headers,
                    preload_content=False,
                    redirect=False,
                    retries=False,
                    timeout=urllib3.Timeout(connect=self.timeout, read=self.timeout),
                )
            except Exception as error:
                cut = _found(error, ConnectionResetError) or _found(error, BrokenPipeError)
                if last or cut is None:
                    raise self.unreachable(error, path) from error
        raise AssertionError("unreachable")

    def url(self, path: str, query: Mapping[str, str] | None = None) -> str:
        """Of the API; ``path`` begins with a slash."""
        return f"{self._base}{quote(path, safe='/%:~')}{f'?{urlencode(query)}' if query else ''}"

    def _closed(self) -> Unreachable:
        return Unreachable(f"the connection to {self.context.server} was closed by dynctl itself")


def refusal_of(status: Mapping[str, Any], code: int, path: str) -> ClusterRefusal:
    """The refusal that a Status object tells; ``code`` where it tells none."""
    told, reason, message = (status.get(key) for key in ("code", "reason", "message"))
    return ClusterRefusal(
        told if isinstance(told, int) and told else code,
        reason if isinstance(reason, str) else "",
        single_line(message) if isinstance(message, str) and message else f"{path}: refused",
    )


def _as_it_comes(response: Any) -> Iterator[bytes]:
    """Pieces as soon as they are there; urllib3 before 2.2 may wait for a whole _PIECE."""
    if not hasattr(response, "read1"):
        yield from response.stream(_PIECE)
        return
    while piece := response.read1(_PIECE):
        yield piece


def _socket_of(response: Any) -> Any:
    """The socket under a response that is being read; None once it is read."""
    return getattr(getattr(response, "connection", None), "sock", None)


def _shut(response: Any) -> None:
    """Wake whoever reads this response."""
    held = _socket_of(response)
    if held is not None:
        shut_socket(held)
    elif hasattr(response, "shutdown"):
        # The server closes after this answer, so that the connection gave its socket away.
        with suppress(ValueError, RuntimeError, OSError):
            response.shutdown()


def shut_socket(held: socket.socket) -> None:
    """End it both ways; who is reading from it, in whatever thread, is told."""
    try:
        # Not the method of an SSL socket, which would take the reader's cipher away.
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


def _seconds(told: str | None) -> float | None:
    return float(told) if told and told.isdecimal() else None


def _found(error: BaseException, kind: type[Any]) -> Any:
    """The exception of this kind behind another one, however deep libraries have wrapped it."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        if isinstance(one, kind):
            return one
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__, *one.args, getattr(one, "reason", None)]
    return None


def _in_words(error: BaseException, timeout: float) -> str:
    import urllib3.exceptions as known

    if _found(error, known.TimeoutError) is not None or _found(error, TimeoutError) is not None:
        return f"no answer within {timeout:g} s"
    if _found(error, known.ProxyError) is not None:
        return "the proxy does not let us through"
    if _found(error, known.ProtocolError) or _found(error, ConnectionError):
        return "the connection was cut"
    refused = _found(error, OSError)
    return single_line((refused.strerror if refused is not None else "") or str(error))

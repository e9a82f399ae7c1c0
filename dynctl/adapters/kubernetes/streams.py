"""Two-way streams through an API server: a command in a container, a port of a pod.

Kubernetes uses WebSockets whose messages begin with the number of a channel. They are opened with
websocket-client, not with the official client's streams (which use it too): those decode binary
data as text, connect without a timeout, lose the reason of a refusal, and would follow a redirect
with our token.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec

from dynctl.adapters.kubernetes.http import ApiServer, refusal_of, shut_socket
from dynctl.adapters.ports import ClusterRefusal
from dynctl.base.errors import Unreachable, single_line

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOL: Final = "v4.channel.k8s.io"
STDOUT, STDERR, STATUS = 1, 2, 3
MAX_MESSAGE: Final = 32 << 20
"""Maximum bytes of one message; API servers send a few tens of thousands."""

_MAX_STDERR: Final = 1 << 16
_MAX_STATUS: Final = 1 << 20
_MISSING: Final = ("No such file or directory", "Not a directory")


class PodStream:
    """One WebSocket to a pod. ``receive`` and ``send`` are for one thread, ``shut`` for any."""

    def __init__(self, server: ApiServer, path: str, query: Sequence[tuple[str, str]]) -> None:
        self._server = server
        self._path = path
        self._socket = _connect(server, path, query)
        server.began(self.shut)

    @property
    def socket(self) -> Any:
        """The socket to wait for, in addition to :attr:`waiting`."""
        return self._socket.sock

    @property
    def waiting(self) -> bool:
        """Whether data was already read from the network, so that a selector does not report it."""
        pending = getattr(self._socket.sock, "pending", None)
        return bool(pending is not None and pending())

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """The next message: channel and content; None if the stream has ended.

        Raises Unreachable if no message arrives in ``timeout`` seconds or the connection fails.
        """
        import websocket

        self._socket.settimeout(max(timeout, 0.001))
        while True:
            self._socket.begin()
            try:
                opcode, frame = self._socket.recv_data_frame(True)
            except websocket.WebSocketConnectionClosedException:
                return None
            except websocket.WebSocketTimeoutException:
                raise Unreachable(
                    f"{self._path}: no data from the pod within {timeout:.3g} s"
                ) from None
            except (websocket.WebSocketException, OSError) as error:
                raise self._server.unreachable(error, self._path) from error
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                return None
            if opcode in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT) and frame.data:
                data = bytes(frame.data)
                return data[0], data[1:]

    def send(self, channel: int, data: bytes, timeout: float) -> None:
        """Raises Unreachable if sending fails."""
        import websocket

        self._socket.settimeout(timeout)
        try:
            self._socket.send_binary(bytes([channel]) + data)
        except (websocket.WebSocketException, OSError) as error:
            raise self._server.unreachable(error, self._path) from error

    def shut(self) -> None:
        """Wake the waiting thread, with the end of the stream."""
        held = self._socket.sock
        if held is not None:
            shut_socket(held)

    def close(self) -> None:
        self._server.ended(self.shut)
        self._socket.shutdown()


@contextmanager
def pod_stream(
    server: ApiServer, path: str, query: Sequence[tuple[str, str]]
) -> Iterator[PodStream]:
    """Raises ClusterRefusal or Unreachable if opening fails."""
    stream = PodStream(server, path, query)
    try:
        yield stream
    finally:
        stream.close()


def pod_path(namespace: str, pod: str, part: str) -> str:
    """The path of a subresource of a pod."""
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}/{part}"


def output_in_container(
    server: ApiServer,
    namespace: str,
    pod: str,
    container: str,
    command: Sequence[str],
    max_bytes: int,
) -> bytes:
    """The output of a command whose last word is a path.

    See ``Cluster.read_file`` for the errors.
    """
    query = [("command", word) for word in command] + [("container", container)]
    query += [("stdin", "false"), ("stdout", "true"), ("stderr", "true"), ("tty", "false")]
    what = f"{' '.join(command)} in container {container} of pod {namespace}/{pod}"
    content, output, status = bytearray(), bytearray(), bytearray()
    deadline = time.monotonic() + server.timeout
    with pod_stream(server, pod_path(namespace, pod, "exec"), query) as stream:
        while (message := stream.receive(deadline - time.monotonic())) is not None:
            channel, data = message
            if channel == STDOUT:
                content += data
                if len(content) > max_bytes:
                    raise ValueError(f"{what}: the output is larger than {max_bytes:,} bytes")
            elif channel == STDERR:
                output += data[: _MAX_STDERR - len(output)]
            elif channel == STATUS:
                status += data[: _MAX_STATUS - len(status)]
                if _complete(status):
                    break
    _judge(status, output, command[-1], what)
    return bytes(content)


def _complete(status: bytearray) -> bool:
    """Some servers keep the stream open after the status."""
    try:
        return isinstance(msgspec.json.decode(status), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False


def _judge(status: bytearray, output: bytearray, path: str, what: str) -> None:
    """Return if the command succeeded; else raise its error."""
    if not _complete(status):
        raise Unreachable(f"{what}: the stream ended without the status of the command")
    end = msgspec.json.decode(status)
    if end.get("status") == "Success":
        return
    if end.get("reason") != "NonZeroExitCode":
        refusal = refusal_of(end, 500, what)
        raise ClusterRefusal(refusal.status, refusal.reason, f"{what}: {refusal.message}")
    text = single_line(output.decode(errors="replace"))
    if any(words in text for words in _MISSING):
        raise FileNotFoundError(errno.ENOENT, f"{what}: no such file", path)
    raise ClusterRefusal(500, "NonZeroExitCode", f"{what}: {text or refusal_text(end)}")


def refusal_text(status: dict[str, Any]) -> str:
    """The message of a Status."""
    message = status.get("message")
    return single_line(message) if isinstance(message, str) and message else "it failed"


# -- opening ---------------------------------------------------------------------------------------


def _connect(server: ApiServer, path: str, query: Sequence[tuple[str, str]]) -> Any:
    import websocket

    renewed = False
    while True:
        try:
            return _handshake(server, path, query)
        except websocket.WebSocketBadStatusException as error:
            headers = error.resp_headers or {}
            server.note_date(headers.get("date"))
            if error.status_code == 401 and not renewed and server.login.renew():
                renewed = True
                continue
            # Without a content-length, this version of the library does not read the body.
            body = getattr(error, "resp_body", None) or b""
            raise server.refusal(error.status_code, bytes(body), path) from None
        except websocket.WebSocketTimeoutException:
            raise server.unreachable(TimeoutError(), path) from None
        except (websocket.WebSocketException, OSError) as error:
            raise server.unreachable(error, path) from error


def _handshake(server: ApiServer, path: str, query: Sequence[tuple[str, str]]) -> Any:
    configuration = server.login.configuration
    url = f"{server.url(path)}?{urlencode(query)}".replace("http", "ws", 1)
    tls: dict[str, Any] = {"context": server.login.tls}
    if not configuration.verify_ssl:
        import ssl

        tls |= {"cert_reqs": ssl.CERT_NONE, "check_hostname": False}
    if configuration.tls_server_name:
        tls["server_hostname"] = configuration.tls_server_name
    opened: Any = _bounded_socket(tls if server.login.tls is not None else {})
    opened.connect(
        url,
        timeout=server.timeout,
        header=[f"{name}: {value}" for name, value in server.login.headers()],
        subprotocols=[PROTOCOL],
        redirect_limit=0,
        **_proxy(configuration),
    )
    status = opened.handshake_response.status
    if status != 101:
        opened.shutdown()
        raise server.refusal(status, b"", path)
    return opened


def _bounded_socket(tls: dict[str, Any]) -> Any:
    """A WebSocket that aborts messages of more than MAX_MESSAGE bytes."""
    import websocket

    class BoundedSocket(websocket.WebSocket):
        _taken = 0

        def begin(self) -> None:
            """Restart the count for the next message."""
            self._taken = 0

        def _recv(self, bufsize: int) -> Any:
            receive: Any = super()._recv
            data = receive(bufsize)
            self._taken += len(data)
            if self._taken > MAX_MESSAGE:
                raise websocket.WebSocketPayloadException(f"over {MAX_MESSAGE:,} bytes at once")
            return data

    return BoundedSocket(sslopt=tls, skip_utf8_validation=True)


def _proxy(configuration: Any) -> dict[str, Any]:
    """The client's proxy as options for websocket-client."""
    if not configuration.proxy:
        return {}
    url = urlsplit(configuration.proxy)
    what: dict[str, Any] = {"http_proxy_host": url.hostname, "http_proxy_port": url.port or 80}
    if url.scheme.startswith("socks"):
        what["proxy_type"] = url.scheme
    if url.username:
        what["http_proxy_auth"] = (unquote(url.username), unquote(url.password or ""))
    if configuration.no_proxy:
        what["http_no_proxy"] = [part.strip() for part in configuration.no_proxy.split(",")]
    return what

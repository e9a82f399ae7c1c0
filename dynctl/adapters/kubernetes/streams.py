"""What goes both ways through an API server: a command in a container, a port of a pod.

Kubernetes sends these over WebSockets whose messages begin with the number of a channel. They are
opened with websocket-client, on which the official client's own streams stand, and not with those:
they decode what is no text, wait for ever while connecting, say nothing of why the server refused,
and would follow a redirect with our token.
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
"""Bytes of one message; API servers send some tens of thousands at most."""

_MAX_STDERR: Final = 1 << 16
_MAX_STATUS: Final = 1 << 20
_MISSING: Final = ("No such file or directory", "Not a directory")


class PodStream:
    """One WebSocket to a pod. ``receive`` and ``send`` are for one thread, ``shut`` for any."""

    def __init__(self, server: ApiServer, path: str, query: Sequence[tuple[str, str]]) -> None:
        self._server = server
        self._path = path
        self._socket = _connected(server, path, query)
        server.began(self.shut)

    @property
    def socket(self) -> Any:
        """To wait for, beside :attr:`waiting`."""
        return self._socket.sock

    @property
    def waiting(self) -> bool:
        """Whether something was read from the network already that no selector would tell of."""
        pending = getattr(self._socket.sock, "pending", None)
        return bool(pending is not None and pending())

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """The next message: channel and content; None where the stream has ended.

        Raises Unreachable where nothing comes in ``timeout`` seconds or the connection breaks.
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
                    f"{self._path}: nothing came from the pod within {timeout:.3g} s"
                ) from None
            except (websocket.WebSocketException, OSError) as error:
                raise self._server.unreachable(error, self._path) from error
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                return None
            if opcode in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT) and frame.data:
                data = bytes(frame.data)
                return data[0], data[1:]

    def send(self, channel: int, data: bytes, timeout: float) -> None:
        """Raises Unreachable where it cannot be sent."""
        import websocket

        self._socket.settimeout(timeout)
        try:
            self._socket.send_binary(bytes([channel]) + data)
        except (websocket.WebSocketException, OSError) as error:
            raise self._server.unreachable(error, self._path) from error

    def shut(self) -> None:
        """Wake who waits for it, with the end of the stream."""
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
    """Raises ClusterRefusal or Unreachable where it cannot be opened."""
    stream = PodStream(server, path, query)
    try:
        yield stream
    finally:
        stream.close()


def pod_path(namespace: str, pod: str, part: str) -> str:
    """Of a subresource of a pod."""
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}/{part}"


def file_of_container(
    server: ApiServer, namespace: str, pod: str, container: str, path: str, max_bytes: int
) -> bytes:
    """What ``cat PATH`` writes there; see ``Cluster.read_file`` for the errors."""
    query = [("command", "cat"), ("command", path), ("container", container)]
    query += [("stdin", "false"), ("stdout", "true"), ("stderr", "true"), ("tty", "false")]
    told = f"cat {path} in container {container} of pod {namespace}/{pod}"
    content, said, status = bytearray(), bytearray(), bytearray()
    deadline = time.monotonic() + server.timeout
    with pod_stream(server, pod_path(namespace, pod, "exec"), query) as stream:
        while (message := stream.receive(deadline - time.monotonic())) is not None:
            channel, data = message
            if channel == STDOUT:
                content += data
                if len(content) > max_bytes:
                    raise ValueError(f"{told}: the file is larger than {max_bytes:,} bytes")
            elif channel == STDERR:
                said += data[: _MAX_STDERR - len(said)]
            elif channel == STATUS:
                status += data[: _MAX_STATUS - len(status)]
                if _complete(status):
                    break
    _judge(status, said, path, told)
    return bytes(content)


def _complete(status: bytearray) -> bool:
    """Some servers keep the stream open behind the status."""
    try:
        return isinstance(msgspec.json.decode(status), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False


def _judge(status: bytearray, said: bytearray, path: str, told: str) -> None:
    """Return where the command ended well; raise what it means where it did not."""
    if not _complete(status):
        raise Unreachable(f"{told}: the stream ended without telling how the command did")
    end = msgspec.json.decode(status)
    if end.get("status") == "Success":
        return
    if end.get("reason") != "NonZeroExitCode":
        refusal = refusal_of(end, 500, told)
        raise ClusterRefusal(refusal.status, refusal.reason, f"{told}: {refusal.message}")
    text = single_line(said.decode(errors="replace"))
    if any(words in text for words in _MISSING):
        raise FileNotFoundError(errno.ENOENT, f"{told}: there is no such file", path)
    raise ClusterRefusal(500, "NonZeroExitCode", f"{told}: {text or refusal_text(end)}")


def refusal_text(status: dict[str, Any]) -> str:
    """What a Status says in words."""
    message = status.get("message")
    return single_line(message) if isinstance(message, str) and message else "it failed"


# -- opening ---------------------------------------------------------------------------------------


def _connected(server: ApiServer, path: str, query: Sequence[tuple[str, str]]) -> Any:
    import websocket

    renewed = False
    while True:
        try:
            return _handshake(server, path, query)
        except websocket.WebSocketBadStatusException as error:
            headers = error.resp_headers or {}
            server.heard(headers.get("date"))
            if error.status_code == 401 and not renewed and server.login.renew():
                renewed = True
                continue
            # Where a server tells no length, this version of the library does not read the body.
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
    """A WebSocket that breaks off a message of more than MAX_MESSAGE bytes."""
    import websocket

    class BoundedSocket(websocket.WebSocket):
        _taken = 0

        def begin(self) -> None:
            """The next message is counted anew."""
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
    """The client's proxy, as websocket-client wants to be told of it."""
    if not configuration.proxy:
        return {}
    url = urlsplit(configuration.proxy)
    told: dict[str, Any] = {"http_proxy_host": url.hostname, "http_proxy_port": url.port or 80}
    if url.scheme.startswith("socks"):
        told["proxy_type"] = url.scheme
    if url.username:
        told["http_proxy_auth"] = (unquote(url.username), unquote(url.password or ""))
    if configuration.no_proxy:
        told["http_no_proxy"] = [part.strip() for part in configuration.no_proxy.split(",")]
    return told

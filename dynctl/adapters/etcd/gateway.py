"""Discovery in etcd over its JSON gateway: the same results without gRPC.

It shares only failover with the gRPC client, so tests compare the two. Use it where gRPC is blocked
or its library does not load (``--etcd-client gateway``).
"""

import asyncio
import base64
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeVar

import httpx
import msgspec

from dynctl.adapters.etcd.address import EtcdAccess, EtcdEndpoint, etcd_access
from dynctl.adapters.etcd.discovery import (
    PAGE_S,
    EtcdCompacted,
    EtcdDiscovery,
    EtcdFailure,
    EtcdNoLease,
    EtcdTooLarge,
    Page,
    key_of,
    one_line,
)
from dynctl.adapters.ports import Deleted, DiscoveryEntry, Put
from dynctl.base.errors import network_reason
from dynctl.wire.dynamo.discovery import PREFIX

_Answer = TypeVar("_Answer")

_MAX_ANSWER_BYTES: Final = 96 * 1024 * 1024
"""64 MiB in base64, with the field names."""
_MAX_ERROR_BYTES: Final = 4096

# The gateway sends nothing while nothing changes, so TCP must notice a lost peer: within
# 10 + 3 * 5 s.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class EtcdGatewayDiscovery(EtcdDiscovery):
    """Takes the arguments of :func:`~dynctl.adapters.etcd.address.etcd_access`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        user: str | None = None,
        password: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        prefix: bytes = PREFIX.encode(),
    ) -> None:
        access = etcd_access(endpoints, user=user, password=password, ca=ca, cert=cert, key=key)
        tls = any(endpoint.tls for endpoint in access.endpoints)
        verify = access.ssl_context() if tls else False
        super().__init__(
            access, partial(_Session, access, verify), prefix, f"etcd {access} (JSON gateway)"
        )


# -- the JSON: bytes are base64, which msgspec reads as such, and 64-bit integers are strings ------


class _Header(msgspec.Struct):
    revision: str = "0"


class _KeyValue(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""


class _Range(msgspec.Struct):
    header: _Header
    kvs: list[_KeyValue] = []
    more: bool = False


class _Token(msgspec.Struct):
    token: str = ""


class _Lease(msgspec.Struct):
    ID: str = "0"
    TTL: str = "0"


class _KeptAlive(msgspec.Struct):
    result: _Lease | None = None
    error: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    kv: _KeyValue
    prev_kv: _KeyValue | None = None
    type: Literal["PUT", "DELETE"] = "PUT"


class _Watched(msgspec.Struct):
    events: list[_Event] = []
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: str = "0"


class _Line(msgspec.Struct):
    result: _Watched | None = None
    error: dict[str, Any] | None = None


class _Session:
    """One HTTP client for one member."""

    def __init__(
        self, access: EtcdAccess, verify: ssl.SSLContext | bool, endpoint: EtcdEndpoint
    ) -> None:
        self._access = access
        self._headers: dict[str, str] = {}
        self._client = httpx.AsyncClient(
            base_url=endpoint.url,
            transport=httpx.AsyncHTTPTransport(verify=verify, socket_options=_KEEPALIVE),
            trust_env=False,
            timeout=PAGE_S,
        )

    async def open(self, timeout: float) -> None:
        if self._access.user is None:
            return
        body = {"name": self._access.user, "password": self._access.password}
        try:
            answer = await self._post("/v3/auth/authenticate", body, _Token, timeout)
        except EtcdFailure as failure:
            # As in etcd's own clients, credentials are not an error without authentication.
            if "authentication is not enabled" not in str(failure):
                raise
        else:
            self._headers = {"Authorization": answer.token}

    async def page(self, key: bytes, end: bytes, limit: int, revision: int, timeout: float) -> Page:
        body = {
            "key": _text(key),
            "range_end": _text(end),
            "limit": str(limit),
            "revision": str(revision),
        }
        answer = await self._post("/v3/kv/range", body, _Range, timeout)
        entries = [(entry.key, entry.value) for entry in answer.kvs]
        return Page(entries, int(answer.header.revision), answer.more)

    async def watch(
        self, key: bytes, end: bytes, revision: int
    ) -> AsyncGenerator[Put | Deleted, None]:
        create = {
            "key": _text(key),
            "range_end": _text(end),
            "start_revision": str(revision),
            # To distinguish a rewritten value from a changed one.
            "prev_kv": True,
        }
        # A watch at a member that lost its cluster ends instead of staying silent.
        headers = {**self._headers, "Grpc-Metadata-hasleader": "true"}
        timeout = httpx.Timeout(PAGE_S, read=None)
        try:
            async with self._client.stream(
                "POST",
                "/v3/watch",
                json={"create_request": create},
                headers=headers,
                timeout=timeout,
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response.status_code, await _read(response, _MAX_ERROR_BYTES))
                async for line in _lines(response):
                    for change in _changes(line):
                        yield change
        except httpx.HTTPError as error:
            raise EtcdFailure(one_line(network_reason(error))) from error
        raise EtcdFailure("the watch ended")

    async def grant(self, ttl_s: int, timeout: float) -> int:
        body = {"TTL": str(ttl_s)}
        return int((await self._post("/v3/lease/grant", body, _Lease, timeout)).ID)

    async def keep_alive(self, lease: int, timeout: float) -> int:
        answer = await self._post("/v3/lease/keepalive", {"ID": str(lease)}, _KeptAlive, timeout)
        if answer.error is not None:
            raise _said(str(answer.error.get("message") or "the keep-alive failed"))
        return int((answer.result or _Lease()).TTL)

    async def revoke(self, lease: int, timeout: float) -> None:
        await self._post("/v3/lease/revoke", {"ID": str(lease)}, dict[str, Any], timeout)

    async def put(self, key: bytes, value: bytes, lease: int, timeout: float) -> None:
        body = {"key": _text(key), "value": _text(value), "lease": str(lease)}
        await self._post("/v3/kv/put", body, dict[str, Any], timeout)

    async def delete(self, key: bytes, timeout: float) -> None:
        await self._post("/v3/kv/deleterange", {"key": _text(key)}, dict[str, Any], timeout)

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, path: str, body: Any, kind: type[_Answer], timeout: float) -> _Answer:
        try:
            async with (
                asyncio.timeout(timeout),
                self._client.stream("POST", path, json=body, headers=self._headers) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response.status_code, await _read(response, _MAX_ERROR_BYTES))
                content = await _read(response, _MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise EtcdFailure(f"no response in {timeout:.1f} s") from error
        except httpx.HTTPError as error:
            raise EtcdFailure(one_line(network_reason(error))) from error
        if len(content) > _MAX_ANSWER_BYTES:
            raise EtcdTooLarge(f"more than {_MAX_ANSWER_BYTES:,} bytes in one response")
        return _decode(content, kind)


def _changes(line: bytes) -> list[Put | Deleted]:
    """One message of the watch. Raises EtcdFailure if it is the last."""
    read = _decode(line, _Line)
    if read.error is not None:
        raise _said(str(read.error.get("message") or read.error.get("error") or "the watch failed"))
    watched = read.result or _Watched()
    if watched.compact_revision != "0":
        raise EtcdCompacted(f"revisions before {watched.compact_revision} are compacted")
    if watched.canceled:
        raise _said(watched.cancel_reason or "the watch was cancelled")
    changes: list[Put | Deleted] = []
    for event in watched.events:
        key = key_of(event.kv.key)
        if event.type == "DELETE":
            changes.append(Deleted(key))
        elif event.prev_kv is None or event.prev_kv.value != event.kv.value:
            changes.append(Put(DiscoveryEntry(key, event.kv.value)))
    return changes


async def _read(response: httpx.Response, most: int) -> bytes:
    """The body, or its beginning, a little longer than ``most`` bytes."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > most:
            break
    return bytes(body)


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of the endless response; each is bounded like a response."""
    pending = bytearray()
    async for chunk in response.aiter_bytes():
        start = len(pending)
        pending += chunk
        while (end := pending.find(b"\n", start)) >= 0:
            line = bytes(pending[:end])
            del pending[: end + 1]
            start = 0
            if line.strip():
                yield line
        if len(pending) > _MAX_ANSWER_BYTES:
            raise EtcdFailure(f"the watch sent more than {_MAX_ANSWER_BYTES:,} bytes at once")


def _decode(content: bytes, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EtcdFailure(f"not an etcd with the v3 API: {one_line(str(error))}") from error


def _refusal(status: int, body: bytes) -> EtcdFailure:
    try:
        error_body = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        error_body = {}
    return _said(str(error_body.get("message") or error_body.get("error") or f"HTTP {status}"))


def _said(text: str) -> EtcdFailure:
    line = one_line(text)
    if "requested lease not found" in line:
        return EtcdNoLease(line)
    return EtcdCompacted(line) if "compacted" in line else EtcdFailure(line)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()

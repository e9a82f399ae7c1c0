"""Discovery in etcd over gRPC, with the messages and stubs of etcd3.

Its ``Etcd3Client`` and ``Watcher`` are not used: see docs/decisions/0014. gRPC's calls block, so
each session makes them in a separate thread, never on the event loop.
"""

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from dynctl.adapters.etcd.address import EtcdAccess, EtcdEndpoint, etcd_access, system_roots
from dynctl.adapters.etcd.discovery import (
    CERTIFICATE_REFUSED,
    EtcdCompacted,
    EtcdDiscovery,
    EtcdFailure,
    EtcdLeaseExists,
    EtcdNoLease,
    EtcdTooLarge,
    KeptAlive,
    Page,
    key_of,
    one_line,
)
from dynctl.adapters.etcd.shim import Etcd3Unusable, load_etcdrpc
from dynctl.adapters.ports import Deleted, DiscoveryEntry, Put
from dynctl.base.errors import (
    NO_RESPONSE,
    UNKNOWN_HOST,
    UNTRUSTED,
    UsageProblem,
    known_network_reason,
)
from dynctl.wire.dynamo.discovery import PREFIX

_Result = TypeVar("_Result")

_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A lost member is noticed within 15 s. etcd refuses pings that come
    # more often than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it gRPC waits a minute for the response of a member that is frozen.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Sessions share no connection, so that a new one never inherits an old one's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_ADDRESS: Final = re.compile(r"^(?:[A-Z_]+: )?ipv[46]:\S+: ")
_DISTRUST: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([\w ]+)")
_REFUSED_CERTIFICATE: Final = re.compile(r"SSLV3_ALERT_\w*CERTIFICATE|TLSV1_ALERT_UNKNOWN_CA")
# A watch at a member that lost its cluster ends instead of staying silent.
_REQUIRE_LEADER: Final = ("hasleader", "true")


class Etcd3Discovery(EtcdDiscovery):
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
        super().__init__(access, partial(_GrpcSession, access), prefix, f"etcd {access}")


class _GrpcSession:
    """One gRPC channel to one member, and the thread that waits for it."""

    def __init__(self, access: EtcdAccess, endpoint: EtcdEndpoint) -> None:
        self._access = access
        self._endpoint = endpoint
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynctl-etcd3")
        self._channel: Any = None
        self._rpc: Any = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._released = threading.Event()
        self._busy: asyncio.Future[Any] | None = None
        self._closed = False

    async def open(self, timeout: float) -> None:
        await self._blocking(self._connect, timeout)

    async def page(self, key: bytes, end: bytes, limit: int, revision: int, timeout: float) -> Page:
        request = self._rpc.RangeRequest(key=key, range_end=end, limit=limit, revision=revision)
        stub = self._rpc.KVStub(self._channel)
        call = partial(stub.Range, request, timeout=timeout, metadata=self._metadata)
        answer = await self._blocking(call)
        entries = [(entry.key, entry.value) for entry in answer.kvs]
        return Page(entries, answer.header.revision, answer.more)

    async def watch(
        self, key: bytes, end: bytes, revision: int
    ) -> AsyncGenerator[Put | Deleted, None]:
        create = self._rpc.WatchCreateRequest(
            key=key,
            range_end=end,
            start_revision=revision,
            # To distinguish a rewritten value from a changed one.
            prev_kv=True,
        )
        request = self._rpc.WatchRequest(create_request=create)
        call = self._rpc.WatchStub(self._channel).Watch(
            self._once(request), metadata=(*self._metadata, _REQUIRE_LEADER)
        )
        try:
            while True:
                response = await self._blocking(next, call, None)
                if response is None:
                    raise EtcdFailure("the watch ended")
                if response.compact_revision:
                    raise EtcdCompacted(
                        f"revisions before {response.compact_revision} are compacted"
                    )
                if response.canceled:
                    raise EtcdFailure("the watch was cancelled")
                for event in response.events:
                    change = _change(event)
                    if change is not None:
                        yield change
        finally:
            self._released.set()
            call.cancel()

    async def grant(self, lease: int, ttl_s: int, timeout: float) -> int:
        call = self._rpc.LeaseStub(self._channel).LeaseGrant
        request = self._rpc.LeaseGrantRequest(TTL=ttl_s, ID=lease)
        answer = await self._unary(call, request, timeout)
        return int(answer.ID)

    async def keep_alive(self, lease: int, timeout: float) -> KeptAlive:
        return await self._blocking(self._keep_alive, lease, timeout)

    async def revoke(self, lease: int, timeout: float) -> None:
        call = self._rpc.LeaseStub(self._channel).LeaseRevoke
        await self._unary(call, self._rpc.LeaseRevokeRequest(ID=lease), timeout)

    async def put(self, key: bytes, value: bytes, lease: int, timeout: float) -> None:
        request = self._rpc.PutRequest(key=key, value=value, lease=lease)
        await self._unary(self._rpc.KVStub(self._channel).Put, request, timeout)

    async def delete(self, key: bytes, timeout: float) -> None:
        request = self._rpc.DeleteRangeRequest(key=key)
        await self._unary(self._rpc.KVStub(self._channel).DeleteRange, request, timeout)

    async def _unary(self, call: Any, request: Any, timeout: float) -> Any:
        return await self._blocking(
            partial(call, request, timeout=timeout, metadata=self._metadata)
        )

    def _keep_alive(self, lease: int, timeout: float) -> KeptAlive:
        """One message of the stream, then its end. Runs in the thread."""
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)
        call = self._rpc.LeaseStub(self._channel).LeaseKeepAlive(
            iter([request]), timeout=timeout, metadata=self._metadata
        )
        try:
            answer = next(call)
            return KeptAlive(answer.TTL, answer.header.raft_term, answer.header.revision)
        except StopIteration:
            raise EtcdFailure("no response to a keep-alive") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._released.set()
        if self._channel is not None:
            self._channel.close()
        if self._busy is not None:
            # Closing the channel ended every call, so the thread is free at once, unless it still
            # imports; that is not waited for.
            await asyncio.wait([self._busy], timeout=1.0)
        self._thread.shutdown(wait=self._busy is None or self._busy.done())

    async def _blocking(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        if self._closed:
            raise EtcdFailure("closed")
        future = asyncio.get_running_loop().run_in_executor(
            self._thread, partial(_call, function, *arguments)
        )
        # A cancelled caller does not read the call's result; without this, asyncio logs an error.
        future.add_done_callback(_mark_error_read)
        self._busy = future
        return await asyncio.shield(future)

    def _connect(self, timeout: float) -> None:
        self._rpc = load_etcdrpc()
        import grpc  # type: ignore[import-untyped]

        access, address = self._access, self._endpoint.authority
        if self._endpoint.tls:
            try:
                pem = access.certificates()
            except UsageProblem as error:
                raise EtcdFailure(f"{error.message}. {error.hint}") from error
            credentials = grpc.ssl_channel_credentials(pem.ca or system_roots(), pem.key, pem.cert)
            channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        else:
            channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._channel = channel
        if self._closed:
            channel.close()
        if access.user is None:
            return
        request = self._rpc.AuthenticateRequest(name=access.user, password=access.password)
        try:
            answer = self._rpc.AuthStub(channel).Authenticate(request, timeout=timeout)
        except grpc.RpcError as error:
            # As in etcd's own clients, credentials are not an error without authentication.
            if "authentication is not enabled" not in (error.details() or ""):
                raise
        else:
            self._metadata = (("token", answer.token),)

    def _once(self, request: Any) -> Iterator[Any]:
        """One request, then none: the end of this iterator would end the stream."""
        yield request
        self._released.wait()


def _mark_error_read(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()


def _change(event: Any) -> Put | Deleted | None:
    if event.type == event.DELETE:
        return Deleted(key_of(event.kv.key))
    if event.HasField("prev_kv") and event.prev_kv.value == event.kv.value:
        return None
    return Put(DiscoveryEntry(key_of(event.kv.key), event.kv.value))


def _call(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call it, and turn gRPC's errors into an EtcdFailure. Runs in the thread."""
    try:
        return function(*arguments)
    except EtcdFailure:
        raise
    except Etcd3Unusable as error:
        raise EtcdFailure(f"{error}; reinstall dynctl with its dependencies") from error
    except Exception as error:
        import grpc

        if isinstance(error, grpc.RpcError):
            raise _failure(error) from error
        # The error of a channel that was closed during a call.
        raise EtcdFailure(one_line(str(error))) from error


def _failure(error: Any) -> EtcdFailure:
    full = error.details() or ""
    details = one_line(full)
    if "compacted" in details:
        return EtcdCompacted(details)
    if "lease already exists" in details:
        return EtcdLeaseExists(details)
    if "requested lease not found" in details:
        return EtcdNoLease(details)
    if error.code().name == "RESOURCE_EXHAUSTED" and "message larger than" in details:
        return EtcdTooLarge(details)
    if error.code().name == "DEADLINE_EXCEEDED":
        return EtcdFailure(NO_RESPONSE)
    if (distrust := _DISTRUST.search(full)) is not None:
        return EtcdFailure(f"{UNTRUSTED}: {distrust[1]}")
    if _REFUSED_CERTIFICATE.search(full) is not None:
        return EtcdFailure(CERTIFICATE_REFUSED)
    # "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: what happened"
    text = _ADDRESS.sub("", details.rpartition("last error: ")[2])
    if "DNS resolution failed" in details or "errors resolving" in details:
        text = UNKNOWN_HOST
    return EtcdFailure(known_network_reason(text) or text or error.code().name.lower())

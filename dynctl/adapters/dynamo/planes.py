"""The planes of a live Dynamo (discovery, events, requests), opened as the options name them.

A value comes from the option, else from the context, else from Dynamo's variable, else it is
Dynamo's default. Adapters are imported when they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from dynctl.base.backends import BACKENDS, MEMORY, Backend
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.settings.contexts.precedence import in_context

if TYPE_CHECKING:
    from dynctl.adapters.dynamo.publishing import TopicPublisher
    from dynctl.adapters.dynamo.request_plane import Messenger
    from dynctl.adapters.nats.durable_events import RouterConsumer
    from dynctl.adapters.ports import (
        BackendPort,
        Discovery,
        DiscoveryChange,
        EventPlane,
        Registrar,
        RequestPlane,
    )
    from dynctl.wire.dynamo.discovery import EventChannel

DISCOVERY_VARIABLE: Final = "DYN_DISCOVERY_BACKEND"
NAMESPACE_VARIABLE: Final = "DYN_NAMESPACE"
EVENT_PLANE_VARIABLE: Final = "DYN_EVENT_PLANE"
#: Linux: the request for an interface's address.
_SIOCGIFADDR: Final = 0x8915
_BACKENDS: Final = tuple(BACKENDS.values())
_MEMORY: Final = ("mem", "memory")


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of one deployment. ``title`` is shown, without credentials."""

    title: str
    discovery: Discovery
    plane_of: Callable[[EventChannel], EventPlane]
    requests: RequestPlane
    opened: list[EventPlane]

    async def close(self) -> None:
        for plane in self.opened:
            await plane.close()
        await self.requests.close()
        await self.discovery.close()


def backend(options: GlobalOptions, *, serving: bool = False) -> tuple[str, str] | None:
    """(discovery backend, option or variable that names it), None without one.

    ``serving``: it may be the memory of this process. Raises UsageProblem.
    """
    options = in_context(options)
    environ = os.environ if options.environment_sources else {}
    candidates = [
        (options.discovery, "--discovery"),
        *((b.name, b.flag) for b in _BACKENDS if b.place and getattr(options, b.place) is not None),
        (environ.get(DISCOVERY_VARIABLE), DISCOVERY_VARIABLE),
        *((b.name, b.variable) for b in _BACKENDS if b.variable and environ.get(b.variable)),
    ]
    for name, source in candidates:
        if not name:
            continue
        if name in _MEMORY:
            if serving:
                return MEMORY.name, source
            problem = "lives inside one process; nothing outside can read it"
            raise UsageProblem(f"{source} {name}: this discovery backend {problem}")
        if name not in BACKENDS:
            raise UsageProblem(
                f"{source} {name}: unknown discovery backend", f"known: {', '.join(BACKENDS)}"
            )
        return name, source
    return None


def in_cluster(options: GlobalOptions) -> bool:
    """Whether the discovery backend is a Kubernetes cluster. Raises UsageProblem."""
    named = backend(options)
    return named is not None and BACKENDS[named[0]].cluster


def _port_of(backend: Backend) -> BackendPort:
    """The backend's own part of dynctl.adapters."""
    port: BackendPort = import_module(f"dynctl.adapters.{backend.module}").BACKEND
    return port


def namespace(options: GlobalOptions) -> str | None:
    """The Dynamo namespace to read; None (``*``): all of them.

    In Kubernetes the operator names it after the graph, so the default is all.
    """
    options = in_context(options)
    name = options.dyn_namespace or os.environ.get(NAMESPACE_VARIABLE)
    if name is None:
        return None if in_cluster(options) else "dynamo"
    return None if name == "*" else name


def open_planes(
    options: GlobalOptions,
    *,
    response_port: int = 0,
    serving: bool = False,
    durable: RouterConsumer | None = None,
    on_lost: Callable[[str | None], None] = lambda problem: None,
) -> Planes:
    """The planes that the options name, not connected yet. Needs a running event loop.

    ``response_port``: where responses of workers arrive; 0: a free port. ``serving``: the memory of
    this process may be the discovery backend. ``durable``: the consumers of a router that reads
    streams of NATS JetStream. ``on_lost`` gets the problem of the way to all workers over NATS,
    None when it is open again.

    Raises UsageProblem, or Unreachable where a credential plugin of a kubeconfig fails.
    """
    from dynctl.adapters.dynamo.request_plane import RequestLimits, TcpRequestPlane

    options = in_context(options)
    named = backend(options, serving=serving)
    if named is None:
        raise UsageProblem(
            "no discovery backend is set",
            "--discovery file --file-kv DIR, --discovery etcd --etcd-endpoints HOST:2379, or "
            "--discovery kubernetes",
        )
    discovery = _port_of(BACKENDS.get(named[0], MEMORY)).open(options)
    events = _EventPlanes(options, durable)
    requests = TcpRequestPlane(
        advertised_host=_response_host(),
        nats=lambda: _messenger(options, on_lost),
        limits=RequestLimits(port=response_port),
    )
    return Planes(discovery.title, discovery, events.of, requests, events.opened)


def open_registrar(options: GlobalOptions, discovery: Discovery, *, pod: bool = False) -> Registrar:
    """What registers in the discovery plane of :func:`open_planes`; not connected yet.

    ``pod``: in Kubernetes the pod of this process is registered. Raises UsageProblem for a backend
    in which dynctl does not register, Unreachable for a directory that cannot be written.
    """
    named = backend(options, serving=True)
    port = None if named is None else _port_of(BACKENDS.get(named[0], MEMORY))
    if port is None or port.open_registrar is None or (port.pods_only and not pod):
        raise _no_registration(named)
    return port.open_registrar(options, discovery)


def expect_registrar(options: GlobalOptions) -> None:
    """Raise UsageProblem for a backend in which a worker does not register, or for Kubernetes
    outside a pod, before it is opened."""
    named = backend(options)
    if named is None:
        return
    port = _port_of(BACKENDS[named[0]])
    if port.open_registrar is None:
        raise _no_registration(named)
    port.expect_registrar()


def _no_registration(named: tuple[str, str] | None) -> UsageProblem:
    name, source = named or ("", "--discovery")
    return UsageProblem(
        f"{source} {name}: dynctl does not register workers in this discovery backend",
        "Set --discovery etcd or --discovery file.",
    )


def topic_opener(options: GlobalOptions, plane: str | None = None) -> Callable[..., TopicPublisher]:
    """A call ``(scope, topic=...)`` that opens a channel of this process on the event plane.

    ``plane``: zmq or nats; None: ``DYN_EVENT_PLANE`` names it, zmq unless set. Over ZMQ other
    hosts can read it where ``DYN_EVENT_PLANE_HOST`` names an address of this host; else this host
    alone. Raises UsageProblem.
    """
    from functools import partial

    from dynctl.adapters.dynamo.publishing import open_topic

    environ = os.environ if options.environment_sources else {}
    plane = (plane or environ.get(EVENT_PLANE_VARIABLE) or "zmq").strip().lower()
    if plane not in ("zmq", "nats"):
        raise UsageProblem(f"{EVENT_PLANE_VARIABLE} {plane[:40]}: expected zmq or nats")
    return partial(
        open_topic,
        plane="nats" if plane == "nats" else "zmq",
        host=environ.get("DYN_EVENT_PLANE_HOST") or "127.0.0.1",
        nats_servers=",".join(nats_servers(options)),
    )


def _messenger(options: GlobalOptions, report: Callable[[str | None], None]) -> Messenger:
    from dynctl.adapters.nats.requests import NatsMessenger

    return NatsMessenger(nats_servers(options), report=report)


def nats_servers(options: GlobalOptions) -> list[str]:
    """The NATS servers of --nats-server or NATS_SERVER, else Dynamo's default."""
    named = options.nats_server or os.environ.get("NATS_SERVER")
    return _addresses(named or "nats://localhost:4222")


def _response_host() -> str | None:
    """The address that DYN_TCP_RESPONSE_STREAM_HOST sets.

    Dynamo 1.5 and older take the name of a network interface there, such as ``lo``.
    """
    value = os.environ.get("DYN_TCP_RESPONSE_STREAM_HOST")
    if not value:
        return None
    import socket

    if value not in (name for _, name in socket.if_nameindex()):
        return value
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", value.encode()[:15])
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise UsageProblem(
                f"DYN_TCP_RESPONSE_STREAM_HOST {value}: the interface has no IPv4 address"
            ) from error
    return socket.inet_ntoa(found[20:24])


def _addresses(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class _EventPlanes:
    """One event plane for each transport that a channel uses, opened when it is first needed."""

    def __init__(self, options: GlobalOptions, consumer: RouterConsumer | None = None) -> None:
        self._consumer = consumer
        self.opened: list[EventPlane] = []
        self._options = options
        self._zmq: EventPlane | None = None
        self._nats: EventPlane | None = None
        self._durable: EventPlane | None = None

    def of(self, channel: EventChannel) -> EventPlane:
        from dynctl.wire.dynamo.discovery import JetStreamTransport, NatsTransport

        if isinstance(channel.transport, JetStreamTransport):
            if self._durable is None:
                self._durable = self._open_durable()
            return self._durable
        if isinstance(channel.transport, NatsTransport):
            if self._nats is None:
                self._nats = self._open_nats()
            return self._nats
        if self._zmq is None:
            from dynctl.adapters.zmq.dynamo_events import ZmqEventPlane

            self._zmq = ZmqEventPlane()
            self.opened.append(self._zmq)
        return self._zmq

    def _open_durable(self) -> EventPlane:
        from dynctl.adapters.nats.durable_events import DurableEventPlane

        plane = DurableEventPlane(nats_servers(self._options), consumer=self._consumer)
        self.opened.append(plane)
        return plane

    def _open_nats(self) -> EventPlane:
        from dynctl.adapters.nats.dynamo_events import NatsEventPlane

        plane = NatsEventPlane(nats_servers(self._options))
        self.opened.append(plane)
        return plane


_RETRY_S: Final = 1.0


async def watch_discovery(discovery: Discovery, take: Callable[[DiscoveryChange], None]) -> None:
    """Pass every change to ``take`` until cancelled, also while the plane is not reachable."""
    import asyncio  # here, since shell completion imports this module and has 0.2 s
    from contextlib import aclosing

    from dynctl.adapters.ports import Interrupted

    while True:
        try:
            async with aclosing(discovery.watch()) as changes:
                async for change in changes:
                    take(change)
        except Unreachable as error:
            take(Interrupted(error.message))
        await asyncio.sleep(_RETRY_S)

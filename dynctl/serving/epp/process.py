"""``serve epp``: the router as the endpoint picker of a gateway (Gateway API Inference Extension).

The gateway sends requests and responses through ext_proc; workers, decisions, thresholds, metrics
and their HTTP interface are those of ``serve router``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from dynctl.adapters.dynamo.model_files import host_of
from dynctl.health.deployment import RegisteredWorker
from dynctl.serving.dynamo.fleet import no_obstacle
from dynctl.serving.epp.exchange import Picker
from dynctl.serving.epp.grpc_server import Call, Code, GrpcLimits, GrpcServer, Method
from dynctl.serving.epp.pool import PoolFollower
from dynctl.serving.http.connections import (
    FEW,
    Certificate,
    CertificateError,
    Listeners,
    descriptors,
)
from dynctl.serving.http.core import ProcessCore, build_routing
from dynctl.serving.http.fleet_endpoints import ControlApi
from dynctl.serving.http.parts import ProcessPart
from dynctl.serving.http.process import ServingProcess, run
from dynctl.serving.http.server import administrate, build_core, common_parts
from dynctl.serving.http.start import LOOPBACK, StartError, listen
from dynctl.serving.http.start_log import log_start
from dynctl.serving.routing.config import FrontendConfig, PickerConfig
from dynctl.wire.envoy import ext_proc, health
from dynctl.wire.envoy.health import Serving

_log = logging.getLogger(__name__)

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
#: Streams that follow the health of one listener.
_MOST_WATCHERS: Final = 1024
_HEALTH_S: Final = 0.5
_OPENSSL_S: Final = 30.0
#: Bytes of a request of gRPC health.
_PROBE_BYTES: Final = 4096


def build_picker(config: FrontendConfig) -> ServingProcess:
    """A process that chooses workers for gateways and serves no inference. Errors as
    :func:`dynctl.serving.http.server.build_frontend`."""
    options = config.picker
    assert options is not None
    direct = options.dynamo_frontend
    # Without a host of its own the frontend is beside each worker.
    obstacle = _no_address if direct is not None and not direct[0] else no_obstacle
    core, fleet_part = build_core(build_routing(config), obstacle)
    administration = administrate(core, clients=False)
    parts = common_parts(core, administration, fleet_part, tokenizes=True)
    if options.pool is not None:
        parts.append(PoolPart(PoolFollower(core.service, core.fleet, options.pool)))
    parts.append(GatewayPart(core, options, administration.control))
    return ServingProcess(
        core,
        administration,
        parts,
        Listeners(config.limits),
        title="dynctl serve router",
        describe=partial(log_start, core, tokenizes=True),
    )


class PoolPart(ProcessPart):
    """Follows the InferencePool whose pods are the workers."""

    def __init__(self, pool: PoolFollower) -> None:
        self._pool = pool

    async def join(self) -> None:
        await self._pool.start()

    async def leave(self) -> None:
        await self._pool.close()


class GatewayPart(ProcessPart):
    """The gRPC servers for gateways and for probes of health."""

    def __init__(self, core: ProcessCore, options: PickerConfig, control: ControlApi) -> None:
        config, limits = core.config, core.config.limits
        self._options = options
        self._service = core.service
        self._fleet = core.fleet
        self._control = control
        self.picker = Picker(
            core.service,
            core.fleet,
            core.inference,
            core.placement,
            core.reader,
            limits,
            options.dynamo_frontend,
            config.client_fields,
        )
        self.health = Health(self._serving)
        self._certificate = _certificate_of(options)
        grpc_limits = GrpcLimits(
            connections=max(1, min(limits.in_flight // 4, max(FEW, descriptors() // 4))),
            header_bytes=limits.header_bytes,
            message_bytes=limits.body_bytes + ext_proc.MOST_BESIDE_BODY,
            held_bytes=limits.all_bodies_bytes + ext_proc.MOST_BESIDE_BODY,
            greeting_s=limits.header_s,
            idle_s=max(limits.keep_alive_s, 1.0) * 8,
            unread_s=limits.unread_s,
        )
        self.gateways = GrpcServer(
            {ext_proc.PROCESS: self.picker.begin, **self.health.methods()},
            grpc_limits,
            self._certificate,
            held=self.picker.bytes_held,
        )
        small = replace(grpc_limits, connections=FEW // 4, message_bytes=_PROBE_BYTES)
        self.probes = GrpcServer(self.health.methods(), small)
        self.picker_port = options.port
        self.health_port = options.health_port
        self._listener: socket.socket | None = None

    def addresses(self) -> dict[str, Any]:
        return {"picker_port": self.picker_port, "health_port": self.health_port}

    async def open(self) -> None:
        options = self._options
        self._listener = listen(options.host, options.port, "--port")
        self.picker_port = self._listener.getsockname()[1]
        if options.health_port is not None:
            probes = listen(options.host, options.health_port, "--health-port")
            self.health_port = probes.getsockname()[1]
            # At once, so that a slow start is not taken for a dead process.
            self.probes.start(probes)

    async def serve(self) -> None:
        assert self._listener is not None
        self.gateways.start(self._listener)
        tasks = self._service.tasks
        tasks.start("silent gateways", self.picker.sweep)
        tasks.start("gRPC health", self.health.follow)
        if self._certificate is not None and self._options.cert is not None:
            tasks.start("certificate reload", self._certificate.watch)

    async def drain(self) -> None:
        """Not ready any more; requests that were routed end in their gateways."""
        self.health.notify()
        self.gateways.drain()

    async def leave(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self.gateways.close()
        await self.probes.close()

    def log_start(self) -> None:
        options = self._options
        tls = "without TLS" if self._certificate is None else "TLS"
        if self._certificate is not None and options.cert is None:
            tls = "TLS with a certificate made at this start"
        _log.info("gateways: %s:%d (%s)", options.host, self.picker_port, tls)
        if self.health_port is not None:
            _log.info("gRPC health: %s:%d", options.host, self.health_port)
        if options.host not in LOOPBACK:
            _log.warning(
                "%s:%d is reachable from other hosts: each of them can have requests routed and "
                "read workers' addresses; allow only gateways",
                options.host, self.picker_port,
            )  # fmt: skip
        if options.dynamo_frontend is not None:
            host, port = options.dynamo_frontend
            _log.info(
                "gateways send requests to Dynamo frontends with --router-mode direct, at %s:%d",
                host or "each worker's address", port,
            )  # fmt: skip
            return
        for member in self._fleet:
            host = member.spec.host
            if host != "localhost" and not _is_address(host):
                _log.warning(
                    "worker %s: %s is a name; a gateway needs an IP address to send requests to",
                    member.spec.name, host,
                )  # fmt: skip

    def _serving(self, service: str) -> Serving:
        """The state of a service of gRPC's health."""
        if service == LIVENESS:
            return Serving.SERVING
        if service not in ("", READINESS, ext_proc.SERVICE):
            return Serving.SERVICE_UNKNOWN
        if not self.gateways.listening or self._service.draining:
            return Serving.NOT_SERVING
        models = self._service.models()
        ready = any(self._control.readiness(name).ready for name in models)
        return Serving.SERVING if ready else Serving.NOT_SERVING


class Health:
    """gRPC's health service. ``state``: of a service, by its name."""

    def __init__(self, state: Callable[[str], Serving]) -> None:
        self._state = state
        self._watchers: set[_HealthCall] = set()

    def methods(self) -> dict[str, Method]:
        return {
            health.CHECK: lambda call: _HealthCall(self, call, watch=False),
            health.WATCH: lambda call: _HealthCall(self, call, watch=True),
        }

    async def follow(self) -> None:
        """Notify watchers of changes, until cancelled."""
        while True:
            await asyncio.sleep(_HEALTH_S)
            self.notify()

    def notify(self) -> None:
        for watcher in tuple(self._watchers):
            watcher.show(self._state(watcher.service))

    def answer(self, call: _HealthCall) -> None:
        state = self._state(call.service)
        if not call.watch:
            if state is Serving.SERVICE_UNKNOWN:
                call.call.finish(Code.NOT_FOUND, f"unknown service {call.service[:200]}")
                return
            call.call.send(health.status_message(state))
            call.call.finish()
        elif len(self._watchers) >= _MOST_WATCHERS:
            call.call.finish(Code.RESOURCE_EXHAUSTED, f"{_MOST_WATCHERS:,} watches, the maximum")
        else:
            self._watchers.add(call)
            call.show(state)

    def left(self, call: _HealthCall) -> None:
        self._watchers.discard(call)


class _HealthCall:
    """One Check or Watch."""

    def __init__(self, owner: Health, call: Call, *, watch: bool) -> None:
        self._owner = owner
        self.call = call
        self.watch = watch
        self.service = ""
        self._shown: Serving | None = None

    def show(self, state: Serving) -> None:
        if state is not self._shown:
            self._shown = state
            self.call.send(health.status_message(state))

    def on_message(self, data: bytes) -> None:
        if len(data) > _PROBE_BYTES:
            problem = f"a request of {len(data):,} bytes; at most {_PROBE_BYTES:,}"
            self.call.finish(Code.RESOURCE_EXHAUSTED, problem)
            return
        try:
            self.service = health.service_of(data)
        except ValueError as error:
            self.call.finish(Code.INVALID_ARGUMENT, str(error))
            return
        self._owner.answer(self)

    def on_half_close(self) -> None:
        """A client asks once."""

    def on_closed(self) -> None:
        self._owner.left(self)


def run_picker(config: FrontendConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Blocks. Errors as :func:`build_picker`."""
    return run(lambda: build_picker(config), config)


def _certificate_of(options: PickerConfig) -> Certificate | None:
    if not options.tls:
        return None
    try:
        if options.cert is not None and options.key is not None:
            certificate = Certificate(options.cert, options.key, ("h2",))
            certificate.load()
            return certificate
        with tempfile.TemporaryDirectory(prefix="dynctl-epp-") as directory:
            chain, key = Path(directory, "cert.pem"), Path(directory, "key.pem")
            _self_signed(chain, key)
            certificate = Certificate(chain, key, ("h2",))
            certificate.load()
            return certificate
    except CertificateError as error:
        raise StartError(f"--tls-cert, --tls-key: {error}") from None


def _self_signed(chain: Path, key: Path) -> None:
    """A certificate that nothing trusts, as other endpoint pickers have one: it encrypts, and the
    gateway does not verify it."""
    program = shutil.which("openssl")
    hint = "set --tls-cert and --tls-key, or --no-tls"
    if program is None:
        raise StartError("the openssl program, which makes a certificate, is missing", hint)
    command = [
        *(program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-days", "3650", "-subj", "/CN=dynctl-epp", "-addext"),
        *("subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_OPENSSL_S)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(f"openssl could not make a certificate: {error}", hint) from None


def _no_address(item: RegisteredWorker) -> str | None:
    """Why no frontend beside a worker can be named; None if one can."""
    if _is_address(host_of(item.instance)):
        return None
    return (
        "it is registered without an IP address (its request plane is NATS, or a host name): set "
        "--dynamo-frontend HOST:PORT"
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

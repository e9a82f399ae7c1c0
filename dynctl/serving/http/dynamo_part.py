"""A process in a Dynamo deployment: follows its workers, and takes part as one of its routers."""

import asyncio
import os
from functools import partial
from typing import cast

from dynctl.adapters.dynamo.planes import open_planes, open_registrar, topic_opener
from dynctl.adapters.dynamo.registration import Registration
from dynctl.adapters.dynamo.request_plane import TcpRequestPlane
from dynctl.adapters.dynamo.request_server import RequestServer
from dynctl.adapters.nats.durable_events import RouterConsumer, snapshot_threshold
from dynctl.base.errors import network_reason
from dynctl.health import conditions as codes
from dynctl.serving.dynamo.fleet import DynamoFleet, Obstacle, no_obstacle
from dynctl.serving.dynamo.fleet_sync import FleetSync
from dynctl.serving.dynamo.request_plane import PlaneDispatch
from dynctl.serving.dynamo.served_index import PlaneProcess, RemoteIndex, served_index
from dynctl.serving.http.core import Routing
from dynctl.serving.http.parts import ProcessPart
from dynctl.serving.http.start import LOOPBACK, StartError
from dynctl.serving.routing.config import DynamoConfig
from dynctl.wire.dynamo.discovery import ACTIVE_SEQUENCES, EndpointId
from dynctl.wire.dynamo.events import RouterEvent


class DynamoPart(ProcessPart):
    """The fleet of a deployment's workers, how requests reach them, and what of this process is
    registered there."""

    def __init__(
        self, routing: Routing, dynamo: DynamoConfig, obstacle: Obstacle = no_obstacle
    ) -> None:
        config, service = routing.config, routing.service
        self._config = config
        self.options = dynamo
        self._service = service
        self._router_id = routing.router_id
        planes = open_planes(
            dynamo.planes,
            response_port=dynamo.response_port,
            serving=True,
            durable=self._consumer() if config.router.router_durable_kv_events else None,
            on_lost=lambda problem: self.fleet.request_plane_lost(problem),
        )
        self.fleet = DynamoFleet(service, routing.upstream, config, planes, dynamo, obstacle)
        self.dispatch = PlaneDispatch(
            cast(TcpRequestPlane, planes.requests),
            self.fleet,
            config.limits,
            dynamo,
            traced=config.otlp_endpoint is not None,
        )
        #: What this process has on the request plane; None: nothing.
        self.registered: PlaneProcess | None = None
        if config.router.use_remote_indexer:
            remote = RemoteIndex(service, self.fleet.observer, self._own_instance)
            service.read_index_with(remote.ask)

    def _consumer(self) -> RouterConsumer:
        """The durable consumers of this router; it has its name when it is registered."""

        async def dump(scope: EndpointId) -> list[RouterEvent]:
            return await self.fleet.dump(scope)

        router = self._config.router
        return RouterConsumer(
            lambda: self.fleet.router_name(),
            dump,
            router.router_reset_states,
            snapshot_threshold(os.environ),
        )

    def _own_instance(self) -> int | None:
        return None if self.registered is None else self.registered.instance_id

    async def open(self) -> None:
        router = self._config.router
        if router.router_replica_sync or router.router_durable_kv_events:
            self._register_as_router()

    def _register_as_router(self) -> None:
        """Replica sync with Dynamo's frontends, and consumers of its streams; starts when the fleet
        joins."""
        dynamo, router = self.options, self._config.router
        registrar = open_registrar(dynamo.planes, self.fleet.discovery)
        subject = f"registration in {registrar.title}"

        def report(problem: str | None) -> None:
            if problem is None:
                self._service.clear_condition(codes.DISCOVERY_INTERRUPTED, subject)
            else:
                message = f"{problem}; other routers may not see the load of this one"
                self._service.set_condition(codes.DISCOVERY_INTERRUPTED, subject, message)

        registration = Registration(registrar, self.fleet.entries, report)
        sync = durable = None
        if router.router_replica_sync:
            sync = FleetSync(
                self._service,
                partial(topic_opener(dynamo.planes, dynamo.event_plane), topic=ACTIVE_SEQUENCES),
                router_id=self._router_id,
                later=asyncio.get_running_loop().call_later,
                changed=registration.update,
            )
        if router.router_durable_kv_events:
            durable = RequestServer(LOOPBACK[0])
        self.fleet.register(registration, sync=sync, durable=durable)

    async def join(self) -> None:
        await self.fleet.join()

    async def prepare(self) -> None:
        """Answer other routers' questions to the index, with ``--serve-indexer``."""
        dynamo, fleet = self.options, self.fleet
        if self._config.router.serve_indexer and dynamo.endpoint is None:
            registrar = open_registrar(dynamo.planes, fleet.discovery)
            await self.register(
                served_index(self._service, fleet.observer, registrar, dynamo.rpc_host)
            )

    async def register(self, process: PlaneProcess) -> None:
        """Listen on Dynamo's request plane and register what is served there."""
        self.registered = process
        try:
            await process.start()
        except OSError as error:
            raise StartError(
                f"cannot listen on {self.options.rpc_host}: {network_reason(error)}; set "
                "DYN_TCP_RPC_HOST to an address of this host"
            ) from None

    async def drain(self) -> None:
        if self.registered is not None:
            await self.registered.drain(self._config.limits.drain_s)

    async def leave(self) -> None:
        if self.registered is not None:
            await self.registered.close()
        await self.fleet.leave()

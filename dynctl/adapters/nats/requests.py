"""Requests over NATS: each endpoint of a worker with Dynamo's NATS request plane has a subject."""

import asyncio
import socket
from typing import Final, cast
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from dynctl.adapters.nats.address import NatsAuth, NatsServer, nats_servers
from dynctl.adapters.nats.dynamo_events import hang_up, reason_of
from dynctl.adapters.ports import RequestPlaneError
from dynctl.base.errors import network_reason

_DIAL_S: Final = 2.0
_PING_S: Final = 5.0
_PORT: Final = 4222


class NatsMessenger:
    """One connection to one of ``servers``, made when it is first needed and again after a loss.

    Raises UsageProblem for a server or invalid credentials, as NatsEventPlane does.
    """

    def __init__(
        self, servers: str | list[str] | tuple[str, ...], auth: NatsAuth | None = None
    ) -> None:
        self._servers = nats_servers(servers)
        self._auth = NatsAuth.from_environment() if auth is None else auth
        self._client: Client | None = None
        self._server: NatsServer | None = None
        self._dialing = asyncio.Lock()

    async def request(
        self, subject: str, body: bytes, headers: dict[str, str], timeout: float
    ) -> bytes:
        """The reply to a message. Raises RequestPlaneError with the reason."""
        client = await self.connected()
        try:
            reply = await client.request(subject, body, timeout=timeout, headers=headers)
        except NoRespondersError:
            raise RequestPlaneError(f"does not listen at {subject}") from None
        except (NatsError, OSError, TimeoutError) as error:
            why = reason_of(error, timeout)
            raise RequestPlaneError(f"did not accept the request over NATS: {why}") from None
        return reply.data

    async def local_host(self) -> str:
        """The address of this host towards the server. Raises RequestPlaneError."""
        await self.connected()
        assert self._server is not None
        parts = urlsplit(self._server.url)
        return await asyncio.to_thread(_towards, parts.hostname or "", parts.port or _PORT)

    async def close(self) -> None:
        """Leave no connection."""
        if self._client is not None:
            await hang_up(self._client)
            self._client = None

    async def connected(self) -> Client:
        """The connection. Raises RequestPlaneError."""
        async with self._dialing:
            if self._client is not None and not self._client.is_closed:
                return self._client
            problems = []
            for server in self._servers:
                client = Client()
                try:
                    async with asyncio.timeout(_DIAL_S):
                        await self._dial(client, server)
                except Exception as error:  # also any error of a key or a certificate
                    problems.append(f"{server.title}: {reason_of(error, _DIAL_S)}")
                    await hang_up(client)
                    continue
                self._client, self._server = client, server
                return client
        raise RequestPlaneError(f"needs NATS, which is not reachable: {'; '.join(problems)}")

    async def _dial(self, client: Client, server: NatsServer) -> None:
        async def ignore(error: Exception) -> None:
            """Errors are raised by the request that they concern."""

        # The library's types are whole seconds; it accepts fractions.
        await client.connect(
            servers=[server.url],
            name="dynctl",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=cast(int, _DIAL_S),
            ping_interval=cast(int, _PING_S),
            error_cb=ignore,
            **self._auth.options(server),
        )


def _towards(host: str, port: int) -> str:
    """The local address of the route to a host; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RequestPlaneError(
            f"cannot connect back: no way to {host}: {network_reason(error)}"
        ) from None

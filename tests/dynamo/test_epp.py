"""`serve epp` on the workers of a real Dynamo: a gateway gets the worker for Dynamo's frontends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec
from grpc import aio  # type: ignore[import-untyped]

from dynctl.wire.envoy import ext_proc
from tests.dynamo.fleet import DynamoFleet, two_zones
from tests.dynamo.ours import FOREIGN, OurFrontend, wait, zones
from tests.dynamo.processes import ProcessGroup
from tests.dynctl.serving.gateways import Stream, set_headers
from tests.ports import free_port
from tests.waiting import patience

PATH = "/v1/completions"


@contextmanager
def picker(fleet: DynamoFleet, port: int) -> Iterator[OurFrontend]:
    """A picker for the fleet's frontend, with gateways on ``port``; ready with all workers."""
    http = free_port()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    planes = {k: v for k, v in fleet.environment.items() if k.startswith("DYN_")}
    words = ["serve", "epp", "--no-tls", "--port", str(port), "--health-port", "-1"]
    words += ["--http-port", str(http)]
    words += ["--dynamo-frontend", f"127.0.0.1:{fleet.frontend.port}"]
    cache = {"XDG_CACHE_HOME": str(fleet.directory / "cache")}
    group = ProcessGroup(fleet.directory)
    try:
        command = [sys.executable, "-m", "dynctl", *words]
        process = group.start("picker", command, {**clean, **planes, **cache})
        found = OurFrontend(process, http, fleet.model)
        expected = {worker.instance_id for worker in fleet.workers.values()}
        wait(found, lambda: expected <= found.ready().keys(), "all workers to be ready")
        yield found
    finally:
        group.close()


def test_a_gateway_gets_the_pair_and_dynamos_frontend_sends_the_request_there() -> None:
    """The headers of the choice are those that a frontend with ``--router-mode direct`` reads."""
    port = free_port()
    with (
        DynamoFleet(two_zones("required"), speedup=0, router_mode="direct") as fleet,
        picker(fleet, port) as chooser,
    ):

        async def ask(prompt: list[int]) -> tuple[int | None, int | None]:
            """One request through both, as a gateway sends it; its (prefill, decode) worker."""
            body: dict[str, Any] = {"model": fleet.model, "prompt": prompt, "max_tokens": 3}
            async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                plain = {"request_serializer": None, "response_deserializer": None}
                stream = Stream(channel.stream_stream(ext_proc.PROCESS, **plain)())
                chosen = set_headers(await stream.ask(body, path=PATH))
                assert chosen[ext_proc.DESTINATION] == f"127.0.0.1:{fleet.frontend.port}"
                assert ext_proc.PREFILLER not in chosen
                pair = chosen[ext_proc.PREFILL_WORKER_ID], chosen[ext_proc.WORKER_ID]
                body["nvext"] = {"extra_fields": ["worker_id"]}
                sent = {name: value for name, value in chosen.items() if name.startswith("x-dyn")}
                url = fleet.frontend.url + PATH
                async with (
                    asyncio.timeout(patience(20)),
                    aiohttp.ClientSession() as client,
                    client.post(url, json=body, headers=sent) as answer,
                ):
                    data = await answer.read()
                assert answer.status == 200, data
                await stream.response(200)
                await stream.body(data, end=True, kind="response_body")
                while (await stream.answer()).WhichOneof("kind") != "response_body":
                    pass
                stream.call.cancel()
            placed = msgspec.json.decode(data)["nvext"]["worker_id"]
            found = placed["prefill_worker_id"], placed["decode_worker_id"]
            assert tuple(map(str, found)) == pair
            return found

        def cached() -> dict[int, int]:
            return {
                int(row["id"]): sum(rank["cached_blocks"] for rank in row["ranks"])
                for row in chooser.workers()
            }

        for number in range(3):
            prompt, before = [3 + number, *range(3, 103)], cached()
            first = asyncio.run(ask(prompt))
            one, two = zones(fleet, first)
            assert one == two
            # The caches of workers come from Dynamo's event plane.
            prefill = first[0]
            assert prefill is not None
            wait(chooser, lambda: cached()[prefill] >= before[prefill] + 6, "its blocks")  # noqa: B023
            wait(chooser, chooser.idle, "bookings to end")
            assert asyncio.run(ask(prompt))[0] == prefill
        wait(chooser, chooser.idle, "bookings to end")

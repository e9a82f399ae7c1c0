"""The least that a Python proxy on the same libraries can do: no routing, no accounting.

    python -m tests.bench.bare_proxy URL [URL ..]

Prints its port. What a frontend costs above this is what its own work costs.
"""

import asyncio
import itertools
import sys

import aiohttp
import uvloop
from aiohttp import web


async def serve(urls: list[str]) -> None:
    turn = itertools.cycle(urls)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"content-type": "application/json"}
        async with session.post(next(turn) + request.path, data=body, headers=headers) as upstream:
            response = web.StreamResponse(
                status=upstream.status,
                headers={"content-type": upstream.headers.get("content-type", "text/event-stream")},
            )
            await response.prepare(request)
            while piece := await upstream.content.readany():
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:]))

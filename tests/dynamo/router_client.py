"""A client of Dynamo's runtime behind JSON lines: ``[endpoint, instance id, request]`` in, the
items of the answer (or the error) out.

Run with the Python that has ai-dynamo; not imported by the tests.
"""

import asyncio
import json
import sys

from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found]


async def main() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    clients = {}
    for line in sys.stdin:
        name, instance, request = json.loads(line)
        if name not in clients:
            clients[name] = await runtime.endpoint(name).client()
        client = clients[name]
        try:
            async with asyncio.timeout(120):
                while instance not in client.instance_ids():  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.05)
                items = [item async for item in await client.direct(request, instance)]
            data = [one.data() if hasattr(one, "data") else one for one in items]
            answer = json.dumps({"items": data})
        except Exception as error:  # the test wants to read it
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


asyncio.run(main())

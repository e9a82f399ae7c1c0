"""Dynamo's own SelectionService behind JSON lines: ``["method", [arguments]]`` in, its answer out.

Run with the Python that has ai-dynamo; not imported by the tests.
"""

import asyncio
import json
import os
import sys

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import SelectionService  # type: ignore[import-not-found]


async def main() -> None:
    ttl = os.environ.get("ORACLE_SESSION_TTL")
    service = SelectionService(
        indexer_threads=1, session_affinity_ttl_secs=None if ttl is None else int(ttl)
    )
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = {"answer": await getattr(service, method)(*arguments)}
        except Exception as error:  # the test wants to read it
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


asyncio.run(main())

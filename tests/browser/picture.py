"""docs/web-page.png: the web page of a frontend under load, with a worker and a zone that fail.

``python -m tests.browser.picture``. Times and ports differ from run to run, so no test compares it.
"""

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.browser.chromium import chromium
from tests.dynctl.serving.fleets import WORDS, Site, frontend_with_page, site, zone

_PICTURE: Final = Path("docs/web-page.png")
_SECONDS: Final = 40.0
_CLIENTS: Final = 12
_ENGINES: Final = [
    {
        "name": f"{role}-1{place}-{number}",
        "role": role,
        "total_blocks": 400,
        "speedup_ratio": 1.0,
        "default_output_tokens": 60,
        **zone(f"us-east-1{place}"),
    }
    for place, prefill, decode in (("a", 2, 3), ("b", 2, 3), ("c", 1, 0))
    for role, many in (("prefill", prefill), ("decode", decode))
    for number in range(many)
]


async def _chat(fleet: Site, client: int) -> None:
    """One conversation after another: each turn has the ones before it."""
    for number in range(1000):
        topic = f"{client % 5} {WORDS * 6}"
        for turn in range(5):
            topic += f" turn {turn} of {number}: {WORDS}"
            body = {"model": "demo", "messages": [{"role": "user", "content": topic}]}
            await fleet.post("/v1/chat/completions", body)


async def draw() -> None:
    """Write the picture; takes about a minute."""
    with tempfile.TemporaryDirectory() as folder:
        async with site(_ENGINES, kind=frontend_with_page) as fleet, chromium(Path(folder)) as tab:
            await tab.size(1280, 1330)
            await tab.open(fleet.url("/ui"))
            clients = [asyncio.create_task(_chat(fleet, one)) for one in range(_CLIENTS)]
            await asyncio.sleep(_SECONDS / 2)
            await fleet.engines["decode-1b-2"].close()
            await asyncio.sleep(_SECONDS / 2)
            await tab.picture(_PICTURE, whole=False)
            for one in clients:
                one.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*clients)


if __name__ == "__main__":
    asyncio.run(draw())

"""Follow a discovery plane for good: one loop for everybody who watches."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

from dynctl.adapters.ports import Discovery, DiscoveryChange, Interrupted
from dynctl.base.errors import Unreachable

_RETRY_S: Final = 1.0

_log = logging.getLogger(__name__)


async def watch_discovery(discovery: Discovery, take: Callable[[DiscoveryChange], None]) -> None:
    """Give every change to ``take`` until cancelled, also over failures of the plane."""
    while True:
        try:
            async with aclosing(discovery.watch()) as changes:
                async for change in changes:
                    take(change)
        except Unreachable as error:
            take(Interrupted(error.message))
        except Exception:
            _log.exception("following %s failed; following again", discovery.title)
        await asyncio.sleep(_RETRY_S)

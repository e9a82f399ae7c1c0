"""Changes of a rank's prefix cache, as routers need them. Blocks have the engine's own hashes."""

from __future__ import annotations

from typing import NamedTuple

from router_core import DEVICE


class CacheStored(NamedTuple):
    """A run of consecutive blocks became findable; `tokens`: the tokens of these full blocks.

    `salt`: the prompt's cache salt, in the run of its first block only. `tier`: where they are.
    """

    parent: int | None
    hashes: tuple[int, ...]
    tokens: tuple[int, ...]
    lora: str | None
    salt: str | None = None
    tier: str = DEVICE


class CacheRemoved(NamedTuple):
    """Blocks were evicted from a tier, in this order; on the device, copies of them may be left."""

    hashes: tuple[int, ...]
    tier: str = DEVICE


class CacheCleared(NamedTuple):
    """Every block was dropped, in all tiers."""


CacheEvent = CacheStored | CacheRemoved | CacheCleared

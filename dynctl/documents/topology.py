"""Documents about topology domains: capacity, plans, and the value of one domain."""

from __future__ import annotations

import msgspec

SCHEMA = 1


class TopologyValue(msgspec.Struct, frozen=True):
    """What a worker would read for one topology domain, and the file it stands in."""

    domain: str
    value: str
    path: str
    kind: str = "TopologyValue"
    schema: int = SCHEMA

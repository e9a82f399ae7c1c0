"""Request traces: what simulations replay."""

from __future__ import annotations

import msgspec


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace.

    ``at``: its arrival in seconds, not before the request in front of it. ``input_tokens`` (at
    least 1) and ``output_tokens`` (at least 1) are counts. ``hash_ids`` identify the blocks of the
    prompt, each of ``block_size`` tokens: two requests with the same id at one place have the same
    tokens up to and including that block. The last id may stand for a block that is not full; ids
    of missing blocks mean that these cannot be reused. Empty names: not known. ``priority``: a
    larger one is served earlier. ``zone``: where the request comes from.
    """

    at: float
    id: str
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    block_size: int
    model: str = ""
    tenant: str = ""
    session: str = ""
    priority: int = 0
    zone: str = ""

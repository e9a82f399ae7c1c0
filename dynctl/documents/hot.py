"""`hot`: the prefixes that requests share most, and on how many workers each of them is."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dynctl.documents.doubts import Doubt

SCHEMA = 1
#: Prefixes of an answer, by default and at most.
DEFAULT_TOP: Final = 20
MOST_TOP: Final = 1_000

Verdict = Literal["", "too few copies", "too many copies"]


class HotPrefix(msgspec.Struct, frozen=True):
    """A prefix that at least two requests have.

    ``prefix``: the sequence hash of its last block, in hex. It is ``tokens`` long; ``own_tokens``
    of these are behind the shorter prefix ``parent`` that more requests have (empty: none).
    ``tenant``: a digest of the cache salt, empty without one. ``share``: of all prompt tokens,
    those of its ``requests`` in its own tokens. ``reused_tokens``: what engines reported of these,
    None where no engine of its requests reported any. ``copies``: workers that have all of it now,
    ``workers`` their names; None where no worker reports KV events. ``bytes``: the KV cache of one
    copy, on all layers; None where its size is unknown. ``missed``: requests that went
    to a worker without all of it while another one had it; ``missed_by_load``: those of them whose
    choice the load of that worker decided. ``examples``: ids of requests.
    """

    prefix: str
    model: str
    tenant: str
    tokens: int
    own_tokens: int
    requests: int
    share: float
    reused_tokens: int | None = None
    copies: int | None = None
    bytes: int | None = None
    workers: list[str] = []
    missed: int = 0
    missed_by_load: int = 0
    verdict: Verdict = ""
    parent: str = ""
    examples: list[str] = []


class HotReport(msgspec.Struct, frozen=True):
    """The prefixes with the most tokens that requests share, the largest share first.

    ``start`` and ``end``: wall-clock seconds of the first and the last of ``requests``. ``shared``:
    all prefixes that at least two requests have; ``prefixes`` are the first of them.
    """

    source: str
    start: float | None
    end: float | None
    requests: int
    prompt_tokens: int
    workers: int
    models: list[str]
    shared: int
    prefixes: list[HotPrefix]
    doubts: list[Doubt] = []
    kind: str = "HotReport"
    schema: int = SCHEMA

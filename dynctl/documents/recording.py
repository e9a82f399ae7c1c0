"""A recording: what a router saw and did, as records in order of time.

``at`` is wall-clock seconds everywhere; a router is replayed with ``now=at``. Records have hashes
of prompt blocks and digests, never text, token ids, salts or credentials.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from router_core import Change

RecordingSource = Literal["frontend", "observe", "dynamo", "simulation"]

#: What a source may be able to give (`Start.complete`).
KINDS: Final = (
    "arrivals",
    "decisions",
    "kv_events",
    "loads",
    "outcomes",
    "workers",
    "topology",
)


class Start(msgspec.Struct, frozen=True):
    """The first record. ``router`` names the process and ``version`` its release.

    ``settings``: the router's, by field name of RouterConfig. ``block_sizes``: tokens per block by
    model. ``exact_reuse`` and ``learns``: as in ``router_core.Router``. ``complete``: those of
    KINDS that the source gives; an answer that needs another one is unknown.
    """

    at: float
    source: RecordingSource
    router: str
    version: str
    settings: dict[str, Any] = {}
    block_sizes: dict[str, int] = {}
    exact_reuse: bool = False
    learns: bool = False
    complete: frozenset[str] = frozenset()


class State(msgspec.Struct, frozen=True):
    """The router's snapshot document (``Router.snapshot``) at this moment: a place to start."""

    at: float
    snapshot: dict[str, Any]


class Changed(msgspec.Struct, frozen=True):
    """One change that the router applied."""

    at: float
    change: Change


class Arrived(msgspec.Struct, frozen=True):
    """A request arrived.

    ``hashes``: the sequence hashes of its full prompt blocks (each chained to its parent, salted)
    as the router uses them. ``tenant``: a digest of its cache salt, empty without one.
    ``output_limit``: the most tokens that it may generate, None without a limit.
    """

    at: float
    id: str
    model: str
    isl_tokens: int
    block_size: int
    hashes: tuple[int, ...] = ()
    salted: bool = False
    tenant: str = ""
    lora: str = ""
    session: str = ""
    priority: int = 0
    output_limit: int | None = None


class Decided(msgspec.Struct, frozen=True):
    """The router chose, or refused.

    ``prefill`` and ``decode``: (worker id, rank), None without that hop. ``cached_blocks``: the
    router's expectation at the worker that computes the prompt; ``best_cached_blocks``: the most
    that any eligible worker had; both None where the source does not know them. ``cost`` and
    ``margin`` are in blocks. ``outcome``: ``selected`` or the name of the refusal, ``code`` its
    code. ``why``: the short reason (such as ``cache``, ``load``). ``doubts``: codes.
    ``document``: the RouteResult in JSON, empty where it is not kept.
    """

    at: float
    id: str
    model: str
    prefill: tuple[int, int] | None = None
    decode: tuple[int, int] | None = None
    cached_blocks: float | None = None
    best_cached_blocks: float | None = None
    cost: float | None = None
    margin: float | None = None
    outcome: str = "selected"
    code: str = ""
    why: str = ""
    doubts: tuple[str, ...] = ()
    document: bytes = b""


class Finished(msgspec.Struct, frozen=True):
    """A request ended; None where a value is unknown.

    ``status``: of the HTTP response. ``outcome``: ``completed``, ``failed``, ``cancelled`` or
    ``refused``. ``cached_tokens``: what the engine reported that it reused.
    """

    at: float
    id: str
    status: int | None = None
    outcome: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    queued_s: float | None = None


class Noted(msgspec.Struct, frozen=True):
    """Something that readers must know: a condition, a step of a canary, records that are missing.

    ``kind``: ``began``, ``ended``, ``canary``, ``dropped`` or ``stopped``. ``code``: a code of
    `dynctl explain`, or empty.
    """

    at: float
    kind: str
    subject: str
    code: str = ""
    text: str = ""


Record = Start | State | Changed | Arrived | Decided | Finished | Noted

"""`route --parts`: one prompt part by part, what of it is cached where, and where it breaks."""

from __future__ import annotations

import msgspec

from dynctl.documents.doubts import Doubt

SCHEMA = 1


class PromptPart(msgspec.Struct, frozen=True):
    """A part of a prompt: ``system``, ``tools``, ``documents``, a turn, or ``prompt`` where the
    parts are unknown.

    ``cached``: of its ``tokens``, those that the worker with most of the prompt has. ``workers``:
    those that have the prompt to the end of the part, in whole blocks. ``equal``: its tokens that
    are not cached there although a worker has equal text behind another prefix.
    """

    name: str
    start: int
    tokens: int
    cached: int
    workers: list[str]
    equal: int = 0


class PartHolder(msgspec.Struct, frozen=True):
    """Leading blocks of the prompt on one rank, by tier."""

    worker: str
    device: int
    host: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk


class PartBreak(msgspec.Struct, frozen=True):
    """The first ``block`` that no worker has, at ``token`` in ``segment``.

    ``cause``: one of ``hits``. The blocks from ``equal_from`` to ``equal_to`` (not included) are
    cached on ``worker``, which has them from block ``was_at`` on; None: there is no equal text.
    """

    block: int
    token: int
    segment: str
    cause: str
    equal_from: int | None = None
    equal_to: int | None = None
    was_at: int | None = None
    worker: str = ""


class PromptParts(msgspec.Struct, frozen=True):
    """A prompt part by part. ``holders``: ranks that have a part of it, the most first.

    ``breaks``: None where a worker has all whole blocks. No index has the age of blocks.
    """

    model: str
    tokens: int
    block_size: int
    parts: list[PromptPart]
    holders: list[PartHolder]
    breaks: PartBreak | None = None
    doubts: list[Doubt] = []
    kind: str = "PromptParts"
    schema: int = SCHEMA

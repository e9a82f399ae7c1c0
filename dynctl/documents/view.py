"""A saved view: the whole state of a router at one moment, to repeat a decision.

The file is JSON. It contains hashes, loads, cards and settings, never prompts or tokens. ``now`` is
the clock of the router that saved it, so ages do not depend on when the file is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import single_line
from dynctl.base.json_reader import check_depth
from dynctl.documents.codec import decode, encode
from dynctl.documents.doubts import Doubt, doubt
from router_core import Captured, Router

SCHEMA = 1
#: A view of a thousand workers with a million blocks is about 60 MB.
MAX_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SavedView:
    """The content of a view file. ``model_paths``: model -> tokenizer directory, where known.

    ``from_file``: the view was read from a file, whose author may be another user: its paths are
    not followed, except to directories of dynctl's own.

    ``chats``: how the router's frontend prepares a chat for its template: ``plain`` as received,
    or ``dynamo`` as Dynamo's frontend does. ``doubts``: what its source did not know.
    ``origins``: setting -> where it was read, of a router that exports only some; None: all are
    the router's own.
    """

    router: Router
    now: float
    preset: str | None = None
    model_paths: dict[str, str] = field(default_factory=dict)
    tokenizers: dict[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    source: str = "view"
    chats: str = "plain"
    doubts: tuple[Doubt, ...] = ()
    origins: dict[str, str] | None = None
    from_file: bool = False


class _ViewDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The file. ``snapshot`` is :meth:`Router.snapshot`."""

    kind: str = "RoutingView"
    schema: int = SCHEMA
    now: float
    preset: str | None = None
    source: str = "view"
    chats: str = "plain"
    model_paths: dict[str, str] = {}
    tokenizers: dict[str, str] = {}
    assumptions: tuple[str, ...] = ()
    #: None in files of versions that did not record doubts.
    doubts: tuple[Doubt, ...] | None = None
    origins: dict[str, str] | None = None
    snapshot: dict[str, Any]


def encode_view(
    captured: Captured,
    *,
    now: float,
    preset: str | None = None,
    model_paths: dict[str, str] | None = None,
    tokenizers: dict[str, str] | None = None,
    assumptions: tuple[str, ...] = (),
    source: str = "this router",
    chats: str = "plain",
    doubts: tuple[Doubt, ...] = (),
    origins: dict[str, str] | None = None,
) -> bytes:
    """The file's bytes, from ``router.capture()``.

    ``tokenizers``: model -> fingerprint, which shows whether another tokenizer is in use.
    """
    snapshot = captured.document()
    # Sessions belong to clients, and their keys mean something to the running router only.
    snapshot.pop("sessions", None)
    return encode(
        _ViewDocument(
            now=now,
            preset=preset,
            source=source,
            chats=chats,
            model_paths=model_paths or {},
            tokenizers=tokenizers or {},
            assumptions=assumptions,
            doubts=doubts,
            origins=origins,
            snapshot=snapshot,
        )
    )


def decode_view(data: bytes, *, from_file: bool = True) -> SavedView:
    """Read a view file; raises WireError naming the field that does not fit. ``from_file`` False:
    the bytes come from a source that the operator named, such as a frontend."""
    if len(data) > MAX_BYTES:
        raise WireError("view file", f"{len(data):,} bytes are over the limit of {MAX_BYTES:,}")
    read = decode(data, _ViewDocument, "view file")
    try:
        check_depth(read.snapshot, "view file")
        router = Router.restore(read.snapshot)
        router.advance(read.now)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # ValidationError and SnapshotError are ValueErrors.
        raise WireError("view file", single_line(str(error))) from None
    return SavedView(
        router=router,
        now=read.now,
        preset=read.preset,
        model_paths=read.model_paths,
        tokenizers=read.tokenizers,
        assumptions=read.assumptions,
        source=read.source,
        chats=read.chats,
        doubts=(doubt("DYR0703"),) if read.doubts is None else read.doubts,
        origins=read.origins,
        from_file=from_file,
    )

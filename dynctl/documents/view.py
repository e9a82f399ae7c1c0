"""A saved view: the router's whole state at one moment, so that a decision can be made again.

The file is JSON. It holds hashes, loads, cards and settings, never prompts or tokens. ``now`` is
the saving router's clock, so ages are the same whenever the file is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynctl.base.decode_errors import WireError
from router_core import Captured, Router, SnapshotError

SCHEMA = 1
#: A view of a thousand workers with a million blocks is about 60 MB.
MAX_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SavedView:
    """What a view file says. ``model_paths``: model -> tokenizer directory where it was known.

    ``chats``: how the router's frontend reads a chat before its template does: ``plain`` as it
    came, or ``dynamo`` as Dynamo's frontend.
    """

    router: Router
    now: float
    preset: str | None = None
    model_paths: dict[str, str] = field(default_factory=dict)
    tokenizers: dict[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    source: str = "view"
    chats: str = "plain"


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
) -> bytes:
    """The file's bytes, from ``router.capture()``.

    ``tokenizers``: model -> fingerprint, to notice another tokenizer.
    """
    document: dict[str, Any] = {
        "kind": "RoutingView",
        "schema": SCHEMA,
        "now": now,
        "preset": preset,
        "source": source,
        "chats": chats,
        "model_paths": model_paths or {},
        "tokenizers": tokenizers or {},
        "assumptions": list(assumptions),
        "snapshot": captured.document(),
    }
    return msgspec.json.encode(document)


def decode_view(data: bytes) -> SavedView:
    """Read a view file; raises WireError naming what does not fit."""
    if len(data) > MAX_BYTES:
        raise WireError("view file", f"{len(data):,} bytes are over the limit of {MAX_BYTES:,}")
    try:
        document = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise WireError("view file", f"not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("kind") != "RoutingView":
        kind = document.get("kind") if isinstance(document, dict) else type(document).__name__
        raise WireError("view file", f"expected kind RoutingView, got {kind!r}")
    if document.get("schema") != SCHEMA:
        raise WireError("view file", f"expected schema {SCHEMA}, got {document.get('schema')!r}")
    try:
        return SavedView(
            router=Router.restore(document["snapshot"]),
            now=float(document["now"]),
            preset=document.get("preset"),
            model_paths=dict(document.get("model_paths", {})),
            tokenizers=dict(document.get("tokenizers", {})),
            assumptions=tuple(document.get("assumptions", ())),
            source=str(document.get("source", "view")),
            chats=str(document.get("chats", "plain")),
        )
    except (KeyError, TypeError, ValueError, SnapshotError) as error:
        raise WireError("view file", str(error)) from None

"""The contents of a bundle: what `dynctl bundle` prints and writes as the manifest."""

from __future__ import annotations

import msgspec

SCHEMA = 1


class BundleMember(msgspec.Struct, frozen=True):
    """One file of a bundle. ``notes``: what is unknown in it."""

    file: str
    what: str
    bytes: int
    sha256: str
    notes: list[str] = []


class LeftOut(msgspec.Struct, frozen=True):
    """One missing file of a bundle, and the reason."""

    file: str
    what: str
    why: str


class BundleManifest(msgspec.Struct, frozen=True):
    """The contents of a bundle. ``created``: UTC. ``redacted``: what was removed from it."""

    created: str
    client: str
    members: list[BundleMember]
    left_out: list[LeftOut]
    redacted: str
    kind: str = "BundleManifest"
    schema: int = SCHEMA


class BundleReport(msgspec.Struct, frozen=True):
    """A bundle that was written. ``bytes``: of the file."""

    path: str
    bytes: int
    members: list[BundleMember]
    left_out: list[LeftOut]
    kind: str = "Bundle"
    schema: int = SCHEMA

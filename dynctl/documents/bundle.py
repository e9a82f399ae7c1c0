"""The contents of a bundle: what `dynctl bundle` prints and writes as the manifest."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

SCHEMA = 1


class FrontendVersion(msgspec.Struct, frozen=True):
    """The kind (dynamo, dynctl) and version of one frontend. ``error``: why they are unknown."""

    frontend: str
    kind: str | None = None
    version: str | None = None
    error: str | None = None


class ClusterVersion(msgspec.Struct, frozen=True):
    """The version of the cluster's API server. ``error``: why it is unknown."""

    version: str | None
    platform: str | UnsetType | None = UNSET
    error: str | UnsetType = UNSET


class VersionsFile(msgspec.Struct, frozen=True):
    """``versions.json``: this client, its libraries, the frontends and the cluster.

    ``frontends_error``: why the frontends are unknown.
    """

    client: str
    python: str
    platform: str
    libraries: dict[str, str | None]
    frontends: list[FrontendVersion]
    cluster: ClusterVersion | None
    frontends_error: str | UnsetType = UNSET


class OptionsFile(msgspec.Struct, frozen=True):
    """``options.json``: the given options, the context, and where each value comes from."""

    given: list[str]
    context: str | None
    context_chosen_by: str
    origins: dict[str, str]
    overruled: dict[str, str]


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

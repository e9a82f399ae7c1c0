"""Documents about this client: its version, and the shell completion script."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SCHEMA = 1


class PeerVersion(msgspec.Struct, frozen=True):
    """The version of one frontend. ``error``: why it is unknown."""

    url: str
    version: str | None = None
    error: str | None = None


class Versions(msgspec.Struct, frozen=True):
    """The answer of `dynctl version`: this client, its Python, and the frontends."""

    client: str
    python: str
    peers: list[PeerVersion] = []
    kind: str = "Versions"
    schema: int = SCHEMA


class CompletionScript(msgspec.Struct, frozen=True):
    """The completion script of one shell: bash, zsh or fish."""

    shell: str
    script: str
    kind: str = "CompletionScript"
    schema: int = SCHEMA

    def with_own_lines(self, original: CompletionScript) -> CompletionScript:
        """With the lines and tabs of ``original``, which has only texts of dynctl."""
        return msgspec.structs.replace(self, script=original.script)


def versions(peers: Sequence[tuple[str, str | None, str | None]]) -> Versions:
    """This client's version, and ``(url, version, error)`` of each peer."""
    import platform

    from dynctl import version

    return Versions(version(), platform.python_version(), [PeerVersion(*peer) for peer in peers])

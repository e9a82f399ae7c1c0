"""Read the missing permission from the 403 message of an API server."""

from __future__ import annotations

import re
from typing import Final

#: The text of RBAC; other authorizers have their own texts.
_FORBIDDEN: Final = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "[^"]*"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)


def lacking(message: str) -> str:
    """``no permission to list pods in prod``; empty if RBAC did not write the message."""
    match = _FORBIDDEN.search(message)
    if match is None:
        return ""
    where = f" in {match['namespace']}" if match["namespace"] else ""
    return f"no permission to {match['verb']} {match['resource']}{where}"

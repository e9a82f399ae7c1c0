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
    found = _FORBIDDEN.search(message)
    if found is None:
        return ""
    where = f" in {found['namespace']}" if found["namespace"] else ""
    return f"no permission to {found['verb']} {found['resource']}{where}"

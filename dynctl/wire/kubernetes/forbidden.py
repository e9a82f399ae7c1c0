"""What an API server's 403 says is lacking, without the user's name, its path and its grammar."""

from __future__ import annotations

import re
from typing import Final

#: As RBAC words it; authorizers of other makes say something of their own.
_FORBIDDEN: Final = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "[^"]*"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)


def lacking(message: str) -> str:
    """``no permission to list pods in prod``; empty where the message is none of RBAC's."""
    found = _FORBIDDEN.search(message)
    if found is None:
        return ""
    where = f" in {found['namespace']}" if found["namespace"] else ""
    return f"no permission to {found['verb']} {found['resource']}{where}"

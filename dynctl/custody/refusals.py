"""What the API server refused, in the words of what is lacking: its own name a user and a path.

Where the same is refused for a thousand pods, the reason is one, so that it is said once.
"""

from __future__ import annotations

import re
from typing import Final

from dynctl.observing.facts import Unread
from dynctl.ports import ClusterRefusal

#: As RBAC words it; authorizers of other makes say something of their own.
_FORBIDDEN: Final = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "[^"]*"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)
#: What nothing but verify asks for is in its list of permissions (DYT0004), but for these.
_UNLISTED: Final = ("subjectaccessreviews", "localsubjectaccessreviews")


def unread(refusal: ClusterRefusal) -> Unread:
    """``no permission to list nodes (DYT0004)``, else the server's message and HTTP status."""
    if not refusal.forbidden:
        return Unread(f"{refusal.message} (HTTP {refusal.status})")
    found = _FORBIDDEN.search(refusal.message)
    if found is None:
        return Unread(refusal.message, "ask for this permission")
    where = f" in {found['namespace']}" if found["namespace"] else ""
    listed = "" if found["resource"] in _UNLISTED else " (DYT0004)"
    told = f"no permission to {found['verb']} {found['resource']}{where}{listed}"
    return Unread(told, "ask for this permission")

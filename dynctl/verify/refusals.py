"""What the API server refused, in the words of what is lacking.

Where the same is refused for a thousand pods, the reason is one, so that it is said once.
"""

from __future__ import annotations

from typing import Final

from dynctl.adapters.ports import ClusterRefusal
from dynctl.health.facts import Unread
from dynctl.wire.kubernetes.forbidden import lacking

#: All that verify asks for is in its list of permissions (DYT0004), but for what it asks about
#: others.
_UNLISTED: Final = "subjectaccessreviews"


def unread(refusal: ClusterRefusal) -> Unread:
    """``no permission to list nodes (DYT0004)``, else the server's message and HTTP status."""
    if not refusal.forbidden:
        return Unread(f"{refusal.message} (HTTP {refusal.status})")
    told = lacking(refusal.message)
    if not told:
        return Unread(refusal.message, "ask for this permission")
    listed = "" if _UNLISTED in told else " (DYT0004)"
    return Unread(told + listed, "ask for this permission")

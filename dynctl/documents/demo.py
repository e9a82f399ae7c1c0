"""The answer of `dynctl demo`: one document for each step, and one for its end."""

from __future__ import annotations

import msgspec

from dynctl.documents.route_result import RouteResult


class DemoStep(msgspec.Struct, frozen=True):
    """One chapter: what is done, what the client got, and the decision behind it.

    ``status`` and ``answer`` are the HTTP status and the text (or the refusal's message).
    """

    number: int
    title: str
    doing: str
    status: int
    answer: str
    route: RouteResult
    seconds: float
    kind: str = "DemoStep"


class DemoEnd(msgspec.Struct, frozen=True):
    """How the demo ended. ``kept``: the fleet stays up at ``url`` until it is interrupted.

    ``found_by_default``: commands without options for a source find it.
    """

    url: str
    engines: list[str]
    steps: int
    seconds: float
    kept: bool = False
    found_by_default: bool = False
    #: Traffic is sent until then.
    loaded: bool = False
    kind: str = "DemoEnd"

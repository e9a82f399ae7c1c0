"""The answers of `dynctl demo`: its steps and its end; troubles of a simulated cluster."""

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


class ClusterTrouble(msgspec.Struct, frozen=True):
    """A trouble of a simulated cluster. ``codes``: what `topology verify` reports, the cause first.

    ``happened``: the cause in a sentence. ``seen``: what the other commands show of it.
    """

    name: str
    codes: list[str]
    happened: str
    seen: str
    commands: list[str]
    kind: str = "ClusterTrouble"


class ClusterTroubles(msgspec.Struct, frozen=True):
    """All troubles. ``commands``: for one of them, and for the same cluster without a trouble."""

    troubles: list[ClusterTrouble]
    commands: list[str]
    kind: str = "ClusterTroubles"

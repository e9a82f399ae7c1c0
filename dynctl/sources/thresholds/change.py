"""A change of busy thresholds: set on every replica, awaited, watched, set back where necessary."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dynctl.documents.thresholds import CanaryVerdict, Waited
from dynctl.sources.thresholds.canary import Canary, announce
from dynctl.sources.thresholds.replicas import (
    Replica,
    SetResult,
    differing,
    read_all,
    set_back,
    set_everywhere,
)
from dynctl.sources.thresholds.verdicts import wait_until_acting


@dataclass(frozen=True, slots=True)
class ChangedThresholds:
    """What became of a change. ``waited`` and ``verdict``: None where it was not awaited, and not
    watched. ``set``: a replica took the values, and no canary set them back. ``agree``: all
    replicas have the same thresholds afterwards."""

    result: SetResult
    waited: Waited | None
    verdict: CanaryVerdict | None
    set: bool
    agree: bool


def change_thresholds(
    replicas: Sequence[Replica],
    model: str,
    values: Mapping[str, float | int | None],
    *,
    partial: bool,
    wait_s: float | None,
    canary: Canary | None,
    say: Callable[[str], None],
) -> ChangedThresholds:
    """Set the values. ``wait_s``: wait for so long until they are in effect.

    ``canary`` has begun to watch; ``say`` gets its lines. ``partial``: if a replica fails, the
    others keep their new values.
    """
    result = set_everywhere(replicas, model, values, partial=partial)
    done = [outcome.replica for outcome in result.outcomes if outcome.state == "set"]
    waited, verdict = None, None
    try:
        if wait_s is not None and done:
            acting, took = wait_until_acting(done, model, values, wait_s)
            waited = Waited(round(took, 3), acting.acts, list(acting.pending), list(acting.unknown))
        if canary is not None and result.ok and (waited is None or waited.acts):
            verdict = canary.watch(_unless_closed(say))
    except BaseException:
        # Values that are not watched any more are not proven, whatever the reason is.
        if canary is not None and result.ok:
            announce(replicas, "canary reverted: the command that watched it failed")
            set_back(result, model)
        raise
    if verdict is not None:
        if not verdict.kept:
            announce(replicas, f"canary reverted ({verdict.state}): {verdict.why}")
            result = set_back(result, model)
    elif canary is not None:
        announce(replicas, "canary reverted: the thresholds did not take effect")
        result = set_back(result, model) if result.ok else result
    return ChangedThresholds(
        result,
        waited,
        verdict,
        set=bool(done) and (verdict is None or verdict.kept),
        agree=result.agree and not differing(read_all(replicas), model),
    )


def _unless_closed(say: Callable[[str], None]) -> Callable[[str], None]:
    """``say``, until it cannot be written: a terminal or a pipe that is closed ends no canary."""

    def write(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            say(text)

    return write

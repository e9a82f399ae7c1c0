"""A change of busy thresholds: set on every replica, awaited, watched, set back where necessary."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynctl.documents.thresholds import CanaryVerdict, Waited
from dynctl.sources.thresholds.canary import Canary, release
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
    with _known(canary, replicas, model):
        result = set_everywhere(replicas, model, values, partial=partial)
        done = [outcome.replica for outcome in result.outcomes if outcome.state == "set"]
        waited, verdict = None, None
        try:
            if wait_s is not None and done:
                acting, took = wait_until_acting(done, model, values, wait_s)
                waited = Waited(
                    round(took, 3), acting.acts, list(acting.pending), list(acting.unknown)
                )
            if canary is not None and result.ok and (waited is None or waited.acts):
                verdict = canary.watch(_unless_closed(say))
        except BaseException:
            # Values that are not watched any more are not proven, whatever the reason is.
            if canary is not None and result.ok:
                canary.announce("canary reverted: the command that watched it failed", ends=True)
                set_back(result, model)
            raise
        if canary is not None:
            result = _after_canary(canary, verdict, result, model)
    return ChangedThresholds(
        result,
        waited,
        verdict,
        set=bool(done) and (verdict is None or verdict.kept),
        agree=result.agree and not differing(read_all(replicas), model),
    )


@contextlib.contextmanager
def _known(canary: Canary | None, replicas: Sequence[Replica], model: str) -> Iterator[None]:
    """At the end, let the frontends accept another canary of the thresholds."""
    try:
        yield
    finally:
        if canary is not None:
            canary.announce("", ends=True)
            release(replicas, model)


def _after_canary(
    canary: Canary, verdict: CanaryVerdict | None, result: SetResult, model: str
) -> SetResult:
    """The result, set back where the canary does not keep the values."""
    if verdict is not None and verdict.kept:
        return result
    why = "reverted: the thresholds did not take effect"
    if verdict is not None:
        why = f"reverted ({verdict.state}): {verdict.why}"
    canary.announce(f"canary {why}", ends=True)
    return set_back(result, model) if result.ok else result


def _unless_closed(say: Callable[[str], None]) -> Callable[[str], None]:
    """``say``, until it cannot be written: a terminal or a pipe that is closed ends no canary."""

    def write(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            say(text)

    return write

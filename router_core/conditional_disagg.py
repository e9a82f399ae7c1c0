"""Conditional disaggregation: whether a decode worker computes a prompt by itself.

::

    eff_isl      = isl - tokens cached on the decode worker that would be chosen
    isl-bounding : eff_isl < eff_isl_threshold  and  eff_isl / max(isl, 1) < eff_isl_ratio_threshold
    prefill-load : the prefill worker that would be chosen is busy
    isl-or-load  : either of them

A decode worker over its own line keeps the prefill hop (a gate; without its size it counts as over
the line). A prefill worker whose load is unknown counts as calm. All comparisons are strict.
Source: Dynamo 1.6.1, compared with a real one in ``tests/dynamo``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: The policies of ``conditional_disagg_policy``.
POLICIES = ("isl-bounding", "prefill-load", "isl-or-load")
#: Those that read the load of a prefill worker.
LOAD_POLICIES = POLICIES[1:]

#: Why the hop is left out (the first two) or kept; stable, other tools match on them.
BypassReason = Literal[
    "short_prefill",
    "prefill_busy",
    "long_prefill",
    "little_cached",
    "prefill_calm",
    "decode_busy",
    "decode_size_unknown",
    "prefill_pinned",
    "not_tokenized",
    "no_decode_worker",
]


@dataclass(frozen=True, slots=True)
class BusyLine:
    """A rank's load in tokens or blocks, and the line above which it counts as busy.

    ``limit`` None: unknown, because the rank does not publish its size.
    """

    worker: str
    value: float
    limit: float | None

    @property
    def is_over(self) -> bool | None:
        return None if self.limit is None else self.value > self.limit


@dataclass(frozen=True, slots=True)
class BypassRule:
    """The settings of conditional disaggregation. Thresholds of eff_isl are in tokens."""

    policy: str = POLICIES[0]
    eff_isl_threshold: int = 2048
    eff_isl_ratio_threshold: float = 0.7

    def decide(
        self,
        isl_tokens: int,
        cached_tokens: int,
        prefill: BusyLine | None = None,
        decode: BusyLine | None = None,
    ) -> tuple[bool, BypassReason]:
        """Whether the prefill hop is left out, and why.

        ``prefill``: the load of the prefill worker that would be chosen, None where it is unknown
        or the policy does not read it. ``decode``: that of the decode worker, None without a gate.
        """
        reason: BypassReason = "prefill_calm"
        wanted = False
        if self.policy != "prefill-load":
            eff_isl = max(0, isl_tokens - cached_tokens)
            if eff_isl >= self.eff_isl_threshold:
                reason = "long_prefill"
            elif not eff_isl / max(isl_tokens, 1) < self.eff_isl_ratio_threshold:
                reason = "little_cached"
            else:
                wanted, reason = True, "short_prefill"
        if not wanted and self.policy in LOAD_POLICIES and prefill is not None and prefill.is_over:
            wanted, reason = True, "prefill_busy"
        if not wanted or decode is None or decode.is_over is False:
            return wanted, reason
        return False, "decode_busy" if decode.is_over else "decode_size_unknown"


@dataclass(frozen=True, slots=True)
class Bypass:
    """The verdict of conditional disaggregation on one request, and what it was made of.

    ``decode`` is the worker that would do everything, with ``cached_tokens`` of the prompt;
    ``prefill_load`` and ``decode_load`` as :meth:`BypassRule.decide` read them. ``drawn``: another
    decode worker was as likely to be looked at, and would have had the other verdict; it is looked
    for in dry runs and small fleets.
    """

    bypassed: bool
    reason: BypassReason
    rule: BypassRule
    isl_tokens: int
    cached_tokens: int = 0
    decode: str | None = None
    prefill_load: BusyLine | None = None
    decode_load: BusyLine | None = None
    drawn: bool = False

    @property
    def eff_isl(self) -> int:
        """Prompt tokens that the decode worker would compute."""
        return max(0, self.isl_tokens - self.cached_tokens)

    @property
    def ratio(self) -> float:
        return self.eff_isl / max(self.isl_tokens, 1)

    @property
    def message(self) -> str:
        """The verdict as a sentence."""
        verb = "left out" if self.bypassed else "kept"
        return f"prefill hop {verb}: {_WHY[self.reason](self)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _short(bypass: Bypass) -> str:
    return (
        f"{bypass.decode} computes {bypass.eff_isl:,} of {bypass.isl_tokens:,} prompt tokens"
        f" < {bypass.rule.eff_isl_threshold:,} and {_percent(bypass.ratio)}"
        f" < {_percent(bypass.rule.eff_isl_ratio_threshold)}"
    )


def _long(bypass: Bypass) -> str:
    return (
        f"{bypass.decode} would compute {bypass.eff_isl:,} of {bypass.isl_tokens:,} prompt tokens,"
        f" not below {bypass.rule.eff_isl_threshold:,}"
    )


def _little(bypass: Bypass) -> str:
    return (
        f"{bypass.decode} would compute {bypass.eff_isl:,} of {bypass.isl_tokens:,} prompt tokens,"
        f" {_percent(bypass.ratio)}, not below {_percent(bypass.rule.eff_isl_ratio_threshold)}"
    )


def _calm(bypass: Bypass) -> str:
    load = bypass.prefill_load
    if load is None or load.limit is None:
        return "the load of the prefill worker is unknown"
    return f"{load.worker} has {load.value:,g} active prefill tokens, not above {load.limit:,g}"


def _prefill_busy(bypass: Bypass) -> str:
    load = bypass.prefill_load
    if load is None:
        return "the prefill worker is busy"
    return f"{load.worker} has {load.value:,g} active prefill tokens > {load.limit:,g}"


def _decode_busy(bypass: Bypass) -> str:
    load = bypass.decode_load
    if load is None:
        return "the decode worker is busy"
    return f"{load.worker} would have {load.value:,g} active KV blocks > {load.limit:,g}"


_WHY: dict[BypassReason, Any] = {
    "short_prefill": _short,
    "prefill_busy": _prefill_busy,
    "long_prefill": _long,
    "little_cached": _little,
    "prefill_calm": _calm,
    "decode_busy": _decode_busy,
    "decode_size_unknown": lambda bypass: (
        f"{bypass.decode} does not publish how many KV blocks it has"
    ),
    "prefill_pinned": lambda bypass: "the request is pinned to a prefill worker",
    "not_tokenized": lambda bypass: "the prompt is not tokenized here",
    "no_decode_worker": lambda bypass: "no eligible decode worker can prefill",
}

"""What the tuning guide recommends for the lengths of live requests: `config show --advise`.

The guide is that of Dynamo 0.9. It names two kinds of workload by the tokens of prompts and
outputs, and values for each; for others it has general values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from dynctl.documents.route_result import CandidateRow, DecisionResult, RouteResult
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.wire.dynamo.frontend_metrics import Lengths
from router_core import probabilities

#: Mean tokens: longer prompts and shorter outputs are prefill-heavy, the opposite decode-heavy.
LONG_PROMPT: Final = 2000
SHORT_OUTPUT: Final = 200
SHORT_PROMPT: Final = 500
LONG_OUTPUT: Final = 1000

#: A smaller change of a probability is none.
_SMALLEST_SHIFT: Final = 0.005
_NAMES: Final = (
    "prefill_load_scale",
    "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold",
    "router_temperature",
)
_WHY: Final = {
    "prefill-heavy": (
        "cached prefixes save the most time here",
        "a lower threshold keeps requests away from workers that are nearly full",
        "a lower threshold keeps prompts from waiting behind other prompts",
        "the worker with the best cache answers",
    ),
    "decode-heavy": (
        "load counts for more than cached prefixes",
        "a higher threshold uses more of each worker",
        "a higher threshold lets more prompts wait on each worker",
        "some randomness spreads the load",
    ),
    "mixed": (
        "the general value of the guide",
        "the general value of the guide",
        "the general value of the guide",
        "the general value of the guide",
    ),
}
#: Workload -> lowest and highest value of each setting.
_RANGES: Final[Mapping[str, tuple[tuple[float, float], ...]]] = {
    "prefill-heavy": ((1.5, 2.0), (0.7, 0.7), (500, 500), (0.0, 0.1)),
    "decode-heavy": ((0.5, 0.8), (0.95, 0.95), (2000, 2000), (0.3, 0.5)),
    "mixed": ((1.5, 1.5), (0.85, 0.85), (10_000, 10_000), (0.1, 0.1)),
}
_PRESETS: Final = {"prefill-heavy": "ttft", "decode-heavy": "throughput"}


class AdvisedSetting(msgspec.Struct, frozen=True):
    """A value of the guide, from ``low`` to ``high``. ``now``: the value in force, None where it is
    not set or unknown; ``fits``: whether it is in the range.

    ``advised``: the value that is recommended after it was tried on ``tried`` recorded decisions;
    None: the setting in force stays, for the reason in ``result``. It would have ``changed`` that
    many of them, whose workers have ``tokens`` more cached, and ``refused`` that many; ``idle``: it
    was tried and would have done neither."""

    name: str
    flag: str
    low: float
    high: float
    now: float | None
    fits: bool
    why: str
    advised: float | None = None
    tried: int = 0
    changed: int = 0
    refused: int = 0
    tokens: int = 0
    idle: bool = False
    result: str = ""


class ModelAdvice(msgspec.Struct, frozen=True):
    """The advice for one model. ``workload``: ``prefill-heavy``, ``decode-heavy``, ``mixed`` or
    ``unknown``; ``input_tokens`` and ``output_tokens`` are means of ``requests`` requests since the
    frontend started. ``preset``: the one with values for this workload; after the trial None
    where one of its values is not recommended, with the reason in ``not_preset``."""

    model: str
    workload: str
    why: str
    requests: int = 0
    input_tokens: float | None = None
    output_tokens: float | None = None
    preset: str | None = None
    settings: list[AdvisedSetting] = []
    not_preset: str = ""


def advise(lengths: Mapping[str, Lengths] | None, values: Mapping[str, Any]) -> list[ModelAdvice]:
    """The advice for each model. ``lengths``: None where the source has no running frontend;
    ``values``: the settings in force."""
    if lengths is None:
        why = "only a running frontend exports the lengths of requests: --frontend URL"
        return [ModelAdvice("", "unknown", why)]
    if not lengths:
        # As observed with Dynamo 1.6.1.
        why = "no request has been counted yet (Dynamo does not count prompts of token ids)"
        return [ModelAdvice("", "unknown", why)]
    return [_advice(model, one, values) for model, one in sorted(lengths.items())]


def _advice(model: str, lengths: Lengths, values: Mapping[str, Any]) -> ModelAdvice:
    prompt, output = lengths.input_tokens, lengths.output_tokens
    if prompt is None or output is None:
        missing = "prompts" if prompt is None else "outputs"
        why = f"the frontend exports no lengths of {missing}"
        return ModelAdvice(model, "unknown", why, lengths.requests, prompt, output)
    means = f"prompts have {prompt:,.0f} tokens and outputs {output:,.0f} (means)"
    if prompt > LONG_PROMPT and output < SHORT_OUTPUT:
        workload = "prefill-heavy"
        why = f"{means}: more than {LONG_PROMPT:,} and fewer than {SHORT_OUTPUT:,}"
    elif prompt < SHORT_PROMPT and output > LONG_OUTPUT:
        workload = "decode-heavy"
        why = f"{means}: fewer than {SHORT_PROMPT:,} and more than {LONG_OUTPUT:,}"
    else:
        workload = "mixed"
        why = f"{means}: neither prefill-heavy nor decode-heavy"
    settings = [
        _setting(name, low, high, values.get(name), reason)
        for name, (low, high), reason in zip(_NAMES, _RANGES[workload], _WHY[workload], strict=True)
    ]
    preset = _PRESETS.get(workload)
    return ModelAdvice(model, workload, why, lengths.requests, prompt, output, preset, settings)


def _setting(name: str, low: float, high: float, now: Any, why: str) -> AdvisedSetting:
    fits = now is not None and low <= now <= high
    return AdvisedSetting(name, ROUTER_OPTIONS[name].flags[0], low, high, now, fits, why)


# -- tried on recorded decisions ---------------------------------------------------------


def tried(
    advice: ModelAdvice,
    decisions: Sequence[RouteResult] | None,
    total_blocks: Mapping[str, int],
) -> ModelAdvice:
    """The advice after its values were tried on recorded decisions of the model.

    A value is recommended only where it changes recorded decisions and refuses none of them, nor a
    prompt of mean length beside one other. ``decisions``: None where the source keeps none; those
    in brief and of other models or modes are left out. ``total_blocks``: KV blocks of each worker,
    by name.
    """
    if not advice.settings:
        return advice
    hops = [
        _Hop(hop, one.block_size)
        for one in decisions or ()
        if one.model == advice.model and one.mode == "kv" and getattr(one, "whole", True)
        for hop in (one.prefill, one.decode)
        if hop is not None and hop.candidates
    ]
    settings = [_tried_setting(row, advice, hops, total_blocks) for row in advice.settings]
    # A value of the preset that changes no recorded decision does no harm beside others.
    against = [one for one in settings if not (one.fits or one.advised is not None or one.idle)]
    if not any(one.fits or one.advised is not None for one in settings):
        against = settings
    if advice.preset is None or not against:
        return msgspec.structs.replace(advice, settings=settings)
    why = "; ".join(f"{one.name} {one.low:g}: {one.result}" for one in against)
    not_preset = f"--preset {advice.preset} is not recommended: {why}"
    return msgspec.structs.replace(advice, settings=settings, preset=None, not_preset=not_preset)


def _tried_setting(
    row: AdvisedSetting,
    advice: ModelAdvice,
    hops: Sequence[_Hop],
    total_blocks: Mapping[str, int],
) -> AdvisedSetting:
    value = row.high if row.now is not None and row.now > row.high else row.low
    if row.fits:
        return msgspec.structs.replace(row, result="in force")
    if not hops:
        return msgspec.structs.replace(row, result="not tried: no decisions are recorded")
    if row.name.startswith("active_"):
        return _tried_threshold(row, value, advice, hops, total_blocks)
    scored = [one for one in hops if one.hop.winner is not None and len(one.hop.candidates) > 1]
    if not scored:
        result = "not tried: no recorded decision had two candidates"
        return msgspec.structs.replace(row, result=result)
    effects = [_effect(one, row.name, value) for one in scored]
    changed = sum(is_changed for is_changed, _ in effects)
    tokens = round(sum(gained for _, gained in effects))
    # Load counts for more than caches only where outputs are long.
    helps = changed > 0 and (tokens >= 0 or advice.workload == "decode-heavy")
    return msgspec.structs.replace(
        row,
        advised=value if helps else None,
        tried=len(scored),
        changed=changed,
        tokens=tokens,
        idle=not changed,
        result=f"changes {changed:,} of {_choices(len(scored))}, {tokens:+,} cached tokens",
    )


class _Hop(NamedTuple):
    """A recorded hop, and the tokens in a block."""

    hop: DecisionResult
    block_size: int


def _choices(number: int) -> str:
    return f"{number:,} recorded choice{'' if number == 1 else 's'}"


def _tried_threshold(
    row: AdvisedSetting,
    value: float,
    advice: ModelAdvice,
    hops: Sequence[_Hop],
    total_blocks: Mapping[str, int],
) -> AdvisedSetting:
    """A busy threshold: the decisions that it would have refused or changed, and whether a prompt
    of mean length makes its worker busy."""
    of_tokens = row.name == "active_prefill_tokens_threshold"
    busy = _over_tokens if of_tokens else _over_blocks
    # A decode hop computes no prompts.
    judged = [one.hop for one in hops if not (of_tokens and one.hop.stage == "decode")]
    verdicts = [[busy(one, value, total_blocks) for one in hop.candidates] for hop in judged]
    known = [
        (hop, verdict) for hop, verdict in zip(judged, verdicts, strict=True) if None not in verdict
    ]
    if not known:
        why = "not tried: the KV blocks of the workers are unknown"
        return msgspec.structs.replace(row, result=why)
    refused = sum(all(verdict) for _, verdict in known)
    changed = sum(
        any(
            busy_now and hop.winner is not None and _is_winner(one, hop)
            for one, busy_now in zip(hop.candidates, verdict, strict=True)
        )
        for hop, verdict in known
    )
    prompt = advice.input_tokens or 0.0
    result = f"refuses none of {_choices(len(known))}, changes {changed:,}"
    advised: float | None = value if changed else None
    if refused:
        advised, result = None, f"would have refused {refused:,} of {_choices(len(known))}"
    elif of_tokens and prompt > value:
        advised = None
        result = f"one prompt of {prompt:,.0f} tokens makes its worker busy: the next is refused"
    return msgspec.structs.replace(
        row,
        advised=advised,
        tried=len(known),
        changed=changed,
        refused=refused,
        idle=not changed and not refused and not (of_tokens and prompt > value),
        result=result,
    )


def _is_winner(row: CandidateRow, hop: DecisionResult) -> bool:
    winner = hop.winner
    return winner is not None and (row.worker_id, row.dp_rank) == (
        winner.worker_id,
        winner.dp_rank,
    )


def _over_tokens(row: CandidateRow, limit: float, _: Mapping[str, int]) -> bool | None:
    booked = row.booked_prefill_tokens
    return (booked if isinstance(booked, int) else row.active_prefill_tokens) > limit


def _over_blocks(row: CandidateRow, share: float, total: Mapping[str, int]) -> bool | None:
    """With the blocks of the request itself, which the row counts: never too few."""
    blocks = total.get(row.worker)
    if row.decode_blocks is None or not blocks:
        return None
    return row.decode_blocks > share * blocks


def _effect(one: _Hop, name: str, value: float) -> tuple[bool, float]:
    """Whether another candidate would win, or could be drawn more often, and how many more tokens
    it has cached (negative: fewer)."""
    hop = one.hop
    rows = hop.candidates
    if name == "router_temperature":
        chances = probabilities([row.cost for row in rows], value)
    else:
        chances = probabilities(_costs_at_scale(hop, value), hop.temperature)
    before = probabilities([row.cost for row in rows], hop.temperature)
    shifts = [now - was for now, was in zip(chances, before, strict=True)]
    if max(map(abs, shifts)) < _SMALLEST_SHIFT:
        return False, 0.0
    blocks = sum(shift * (row.overlap_blocks or 0) for shift, row in zip(shifts, rows, strict=True))
    return True, blocks * one.block_size


def _costs_at_scale(hop: DecisionResult, scale: float) -> list[float]:
    """The costs of the candidates with another weight of prefill blocks."""
    now = next((term.weight for term in hop.terms if term.name == "prefill_blocks"), None)
    if now is None:
        return [row.cost for row in hop.candidates]
    return [
        # Equal costs stay equal: rounding is not a difference.
        round(row.cost + (scale - now) * row.terms["prefill_blocks"] * row.multiplier, 6)
        for row in hop.candidates
    ]

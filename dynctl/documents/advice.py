"""What the tuning guide recommends for the lengths of live requests: `config show --advise`.

The guide is that of Dynamo 0.9. It names two kinds of workload by the tokens of prompts and
outputs, and values for each; for others it has general values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
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
    return [_advice(model, of_model, values) for model, of_model in sorted(lengths.items())]


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


def try_advice(
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
    hops = [hop for decision in decisions or () for hop in _hops(decision, advice.model)]
    settings = [_try_setting(row, advice, hops, total_blocks) for row in advice.settings]
    against = _against_preset(settings)
    if advice.preset is None or not against:
        return msgspec.structs.replace(advice, settings=settings)
    why = "; ".join(f"{row.name} {row.low:g}: {row.result}" for row in against)
    not_preset = f"--preset {advice.preset} is not recommended: {why}"
    return msgspec.structs.replace(advice, settings=settings, preset=None, not_preset=not_preset)


class _RecordedHop(NamedTuple):
    """A recorded hop, and the tokens in a block."""

    hop: DecisionResult
    block_size: int


def _hops(decision: RouteResult, model: str) -> Iterator[_RecordedHop]:
    """The hops of a decision that values can be tried on: of the model, whole, in mode kv."""
    if decision.model == model and decision.mode == "kv" and getattr(decision, "whole", True):
        for hop in (decision.prefill, decision.decode):
            if hop is not None and hop.candidates:
                yield _RecordedHop(hop, decision.block_size)


def _against_preset(settings: list[AdvisedSetting]) -> list[AdvisedSetting]:
    """The settings for which a preset with the values of the guide is not recommended."""
    if not any(row.fits or row.advised is not None for row in settings):
        return settings
    # A value of the preset that changes no recorded decision does no harm beside others.
    return [row for row in settings if not row.fits and row.advised is None and not row.idle]


def _try_setting(
    row: AdvisedSetting,
    advice: ModelAdvice,
    hops: Sequence[_RecordedHop],
    total_blocks: Mapping[str, int],
) -> AdvisedSetting:
    if row.fits:
        return msgspec.structs.replace(row, result="in force")
    if not hops:
        return msgspec.structs.replace(row, result="not tried: no decisions are recorded")
    value = row.high if row.now is not None and row.now > row.high else row.low
    if row.name == "active_prefill_tokens_threshold":
        return _try_token_threshold(row, value, advice.input_tokens or 0.0, hops)
    if row.name == "active_decode_blocks_threshold":
        return _try_block_threshold(row, value, hops, total_blocks)
    return _try_weight(row, value, advice.workload, hops)


def _try_weight(
    row: AdvisedSetting, value: float, workload: str, hops: Sequence[_RecordedHop]
) -> AdvisedSetting:
    """A setting of the cost: the decisions that it would have changed, and their cached tokens."""
    scored = [hop for hop in hops if hop.hop.winner is not None and len(hop.hop.candidates) > 1]
    if not scored:
        result = "not tried: no recorded decision had two candidates"
        return msgspec.structs.replace(row, result=result)
    effects = [_effect(hop, row.name, value) for hop in scored]
    changed = sum(is_changed for is_changed, _ in effects)
    tokens = round(sum(gained for _, gained in effects))
    # Load counts for more than caches only where outputs are long.
    helps = changed > 0 and (tokens >= 0 or workload == "decode-heavy")
    return msgspec.structs.replace(
        row,
        advised=value if helps else None,
        tried=len(scored),
        changed=changed,
        tokens=tokens,
        idle=not changed,
        result=f"changes {changed:,} of {_choices(len(scored))}, {tokens:+,} cached tokens",
    )


def _choices(number: int) -> str:
    return f"{number:,} recorded choice{'' if number == 1 else 's'}"


#: A hop, and for each of its candidates whether it would have been busy.
_Verdict = tuple[DecisionResult, list[bool]]


def _try_token_threshold(
    row: AdvisedSetting, limit: float, prompt: float, hops: Sequence[_RecordedHop]
) -> AdvisedSetting:
    """The busy threshold of prefill tokens. ``prompt``: mean tokens of prompts."""
    verdicts = [
        (hop, [_prefill_tokens(candidate) > limit for candidate in hop.candidates])
        for hop, _ in hops
        if hop.stage != "decode"  # computes no prompts
    ]
    tried = _try_threshold(row, limit, verdicts)
    if tried.refused or not tried.tried or prompt <= limit:
        return tried
    result = f"one prompt of {prompt:,.0f} tokens makes its worker busy: the next is refused"
    return msgspec.structs.replace(tried, advised=None, idle=False, result=result)


def _try_block_threshold(
    row: AdvisedSetting, share: float, hops: Sequence[_RecordedHop], total_blocks: Mapping[str, int]
) -> AdvisedSetting:
    """The busy threshold of KV blocks, on the hops with workers whose blocks are known."""
    verdicts: list[_Verdict] = []
    for hop, _ in hops:
        busy = [_over_blocks(candidate, share, total_blocks) for candidate in hop.candidates]
        if None not in busy:
            verdicts.append((hop, [bool(verdict) for verdict in busy]))
    return _try_threshold(row, share, verdicts)


def _try_threshold(
    row: AdvisedSetting, value: float, verdicts: Sequence[_Verdict]
) -> AdvisedSetting:
    """A busy threshold: the decisions that it would have refused or changed."""
    if not verdicts:
        why = "not tried: the KV blocks of the workers are unknown"
        return msgspec.structs.replace(row, result=why)
    refused = sum(all(busy) for _, busy in verdicts)
    changed = sum(
        any(_is_winner(candidate, hop) for candidate in compress(hop.candidates, busy))
        for hop, busy in verdicts
    )
    result = f"refuses none of {_choices(len(verdicts))}, changes {changed:,}"
    if refused:
        result = f"would have refused {refused:,} of {_choices(len(verdicts))}"
    return msgspec.structs.replace(
        row,
        advised=value if changed and not refused else None,
        tried=len(verdicts),
        changed=changed,
        refused=refused,
        idle=not changed and not refused,
        result=result,
    )


def _is_winner(row: CandidateRow, hop: DecisionResult) -> bool:
    winner = hop.winner
    return winner is not None and (row.worker_id, row.dp_rank) == (
        winner.worker_id,
        winner.dp_rank,
    )


def _prefill_tokens(row: CandidateRow) -> int:
    booked = row.booked_prefill_tokens
    return booked if isinstance(booked, int) else row.active_prefill_tokens


def _over_blocks(row: CandidateRow, share: float, total: Mapping[str, int]) -> bool | None:
    """With the blocks of the request itself, which the row counts: never too few."""
    blocks = total.get(row.worker)
    if row.decode_blocks is None or not blocks:
        return None
    return row.decode_blocks > share * blocks


def _effect(recorded: _RecordedHop, name: str, value: float) -> tuple[bool, float]:
    """Whether another candidate would win, or could be drawn more often, and how many more tokens
    it has cached (negative: fewer)."""
    hop = recorded.hop
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
    return True, blocks * recorded.block_size


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

"""What the tuning guide recommends for the lengths of live requests: `config show --advise`.

The guide is that of Dynamo 0.9. It names two kinds of workload by the tokens of prompts and
outputs, and values for each; for others it has general values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.wire.dynamo.frontend_metrics import Lengths

#: Mean tokens: longer prompts and shorter outputs are prefill-heavy, the opposite decode-heavy.
LONG_PROMPT: Final = 2000
SHORT_OUTPUT: Final = 200
SHORT_PROMPT: Final = 500
LONG_OUTPUT: Final = 1000

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
    """A recommended value, from ``low`` to ``high``. ``now``: the value in force, None where it is
    not set or unknown; ``fits``: whether it is in the range."""

    name: str
    flag: str
    low: float
    high: float
    now: float | None
    fits: bool
    why: str


class ModelAdvice(msgspec.Struct, frozen=True):
    """The advice for one model. ``workload``: ``prefill-heavy``, ``decode-heavy``, ``mixed`` or
    ``unknown``; ``input_tokens`` and ``output_tokens`` are means of ``requests`` requests since the
    frontend started. ``preset``: the one with values for this workload."""

    model: str
    workload: str
    why: str
    requests: int = 0
    input_tokens: float | None = None
    output_tokens: float | None = None
    preset: str | None = None
    settings: list[AdvisedSetting] = []


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

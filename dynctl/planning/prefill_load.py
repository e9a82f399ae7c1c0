"""How long prefills take: durations by which the load of running prefills falls with time.

Two models, both built in:

- an *estimate* (``--router-prefill-load-model aic`` or ``ais``) from the accelerator, the number of
  them that share the model (``--ais-tp-size``) and the model's ``config.json``. It is a roofline:
  the longer of computing and reading, at :data:`COMPUTE_EFFICIENCY` of the peak and
  :data:`MEMORY_EFFICIENCY` of the bandwidth. Dynamo reads measured kernel times of AIConfigurator
  (AISimulate) instead; dynctl has no such database, so its numbers differ from Dynamo's.
- *measured* (``measured``): a straight line through the prefills that this process saw, by model
  and role, of which the last ones count most. Until there are enough, the estimate where the
  accelerator and the model are given, else none.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final, Protocol

from dynctl.base.errors import UsageProblem
from dynctl.base.quantities import percent
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.settings.router_settings import as_typed
from dynctl.wire.model_config import WEIGHT_BYTES, ModelShape, UnknownSize, model_shape
from router_core import (
    Decision,
    PredictedPrefill,
    RouterConfig,
    RoutingPlan,
    Worker,
    WorkerWithDpRank,
)

#: Parts of the peak that a prefill reaches. Assumptions, not measurements: matrix products of long
#: prompts reach about half of the peak in common engines, and reading reaches more.
COMPUTE_EFFICIENCY: Final = 0.5
MEMORY_EFFICIENCY: Final = 0.8

#: Seconds after which a request that waits for a load to fall is tried again.
AGAIN_S: Final = 0.5
#: Groups of workers that are measured; the one unused for longest goes.
_MOST_GROUPS: Final = 256
#: Prefills before the line is used, and the weight of the past with each new one: the last 200.
_ENOUGH: Final = 20
_KEEP: Final = 1.0 - 1.0 / 200
#: A prefill counts as at most so many times longer or shorter than predicted.
_OUTLIER: Final = 4.0
#: Ranks whose last prefill is kept.
_MOST_RANKS: Final = 8_192
#: A prefill that ends so soon after another, relative to it, ran with it.
_SAME_STEP: Final = 0.1
#: Groups that a description lists, those measured last.
_MOST_LISTED: Final = 8
#: Below this relative spread of the prompt lengths the slope of a line is not known.
_LEAST_SPREAD: Final = 0.05


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Published peaks of one accelerator: ``tera`` are dense 10^12 operations per second by number
    format (without sparsity), ``bandwidth`` is that of its memory in 10^9 bytes per second."""

    tera: Mapping[str, float]
    bandwidth: float


#: System -> its accelerator, under the names of AIConfigurator where it has them. Sources: the
#: vendors' data sheets (NVIDIA A100 80 GB, H100, H200, H20, L4, L40S, HGX B200 and B300, GB200
#: NVL72; AMD MI300X, MI325X), where needed halved from the values with sparsity.
ACCELERATORS: Final[Mapping[str, Accelerator]] = {
    "a100_sxm": Accelerator({"bf16": 312, "int8": 624}, 2_039),
    "a100_pcie": Accelerator({"bf16": 312, "int8": 624}, 1_935),
    "h100_sxm": Accelerator({"bf16": 989, "fp8": 1_979, "int8": 1_979}, 3_350),
    "h100_pcie": Accelerator({"bf16": 756, "fp8": 1_513, "int8": 1_513}, 2_000),
    "h200_sxm": Accelerator({"bf16": 989, "fp8": 1_979, "int8": 1_979}, 4_800),
    "h20_sxm": Accelerator({"bf16": 148, "fp8": 296, "int8": 296}, 4_000),
    "b200_sxm": Accelerator({"bf16": 2_250, "fp8": 4_500, "int8": 4_500, "fp4": 9_000}, 8_000),
    "b300_sxm": Accelerator({"bf16": 2_250, "fp8": 4_500, "fp4": 13_500}, 8_000),
    "gb200": Accelerator({"bf16": 2_500, "fp8": 5_000, "int8": 5_000, "fp4": 10_000}, 8_000),
    "l4": Accelerator({"bf16": 121, "fp8": 242, "int8": 242}, 300),
    "l40s": Accelerator({"bf16": 362, "fp8": 733, "int8": 733}, 864),
    "mi300x": Accelerator({"bf16": 1_307, "fp8": 2_615, "int8": 2_615}, 5_300),
    "mi325x": Accelerator({"bf16": 1_307, "fp8": 2_615, "int8": 2_615}, 6_000),
}


class PrefillModel(Protocol):
    """Predicts the durations of prefills."""

    def predict(self, worker: Worker, tokens: int, cached: int) -> PredictedPrefill | None:
        """The prefill of ``tokens`` prompt tokens on ``worker``, after ``cached`` ones; None where
        nothing is known yet."""

    def observe(self, worker: Worker, tokens: int, seconds: float) -> None:
        """A prefill of ``tokens`` took ``seconds``."""

    def describe(self) -> list[str]:
        """The model in sentences, with its numbers."""


class Estimate:
    """A roofline of one accelerator and one model. ``tp``: accelerators that share the model."""

    def __init__(self, system: str, shape: ModelShape, tp: int, name: str) -> None:
        self._system, self._shape, self._tp, self._name = system, shape, tp, name
        accelerator = ACCELERATORS[system]
        tera = accelerator.tera
        #: The format is computed as bf16 where the accelerator has no faster arithmetic for it.
        self._format = shape.arithmetic if shape.arithmetic in tera else "bf16"
        self._linear = tera[self._format] * 1e12 * tp * COMPUTE_EFFICIENCY
        self._attention = tera["bf16"] * 1e12 * tp * COMPUTE_EFFICIENCY
        self._bandwidth = accelerator.bandwidth * 1e9 * tp * MEMORY_EFFICIENCY

    def seconds(self, tokens: int, cached: int) -> float:
        """The duration of one prefill.

        Computed: two operations for each weight and token, two for each pair of a new token and one
        before it and each number of their keys and values, and the output matrix for one token.
        Read: the weights once, and the cached keys and values. Source: the roofline model
        (Williams, Waterman, Patterson 2009) with the usual count of transformer operations.
        """
        if tokens <= 0:
            return 0.0
        shape = self._shape
        output = shape.hidden * shape.vocabulary
        pairs = tokens * cached + tokens * (tokens + 1) / 2
        compute = 2.0 * (shape.active_weights * tokens + output) / self._linear
        compute += 2.0 * shape.layers * shape.attention_width * pairs / self._attention
        weights = (shape.touched_weights(tokens) + output) * WEIGHT_BYTES[shape.weights]
        read = (weights + shape.kv_bytes_per_token * cached) / self._bandwidth
        return max(compute, read)

    def predict(self, worker: Worker, tokens: int, cached: int) -> PredictedPrefill | None:
        return PredictedPrefill(
            f"estimate for {self._system}, tp {self._tp}", tokens, cached,
            self.seconds(tokens, cached),
        )  # fmt: skip

    def observe(self, worker: Worker, tokens: int, seconds: float) -> None:
        """An estimate does not learn."""

    def describe(self) -> list[str]:
        shape, accelerator = self._shape, ACCELERATORS[self._system]
        peak = f"{accelerator.tera[self._format]:,g} TFLOPS {self._format}"
        milliseconds = ", ".join(
            f"{tokens:,} tokens {_milliseconds(self.seconds(tokens, 0))}"
            for tokens in (512, 2_048, 8_192, 32_768)
        )
        return [
            f"prefill load model: built-in estimate for {self._tp} {self._system} "
            f"({peak} at {percent(COMPUTE_EFFICIENCY)}, {accelerator.bandwidth:,g} GB/s at "
            f"{percent(MEMORY_EFFICIENCY)} each; the two parts are assumptions, and the backend "
            "does not change it)",
            f"{self._name}: {shape.active_weights / 1e9:,.3g} billion weights a token "
            f"({shape.weights}), {shape.layers} layers, {shape.kv_bytes_per_token:,.0f} bytes of "
            "KV cache a token",
            f"predicted prefill: {milliseconds}",
        ]


def _milliseconds(seconds: float) -> str:
    """``seconds`` in milliseconds, with three significant digits."""
    rounded = float(f"{seconds * 1e3:.3g}")
    return f"{rounded:,.0f} ms" if rounded >= 1e3 else f"{rounded:g} ms"


class Measured:
    """Lines through measured prefills, one for each model and role; ``before`` predicts until one
    has enough."""

    def __init__(self, before: Estimate | None = None) -> None:
        self._before = before
        self._lines: OrderedDict[tuple[str, str], _Line] = OrderedDict()

    def predict(self, worker: Worker, tokens: int, cached: int) -> PredictedPrefill | None:
        line = self._lines.get((worker.model, worker.role.value))
        seconds = None if line is None else line.seconds(tokens)
        if line is None or seconds is None:
            return None if self._before is None else self._before.predict(worker, tokens, cached)
        role = worker.role.value
        text = f"measured on {line.count:,} prefills of {role} workers of {worker.model}"
        return PredictedPrefill(text, tokens, cached, seconds)

    def observe(self, worker: Worker, tokens: int, seconds: float) -> None:
        key = (worker.model, worker.role.value)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= _MOST_GROUPS:
                self._lines.popitem(last=False)
            line = self._lines[key] = _Line()
        self._lines.move_to_end(key)
        line.add(tokens, seconds)

    def describe(self) -> list[str]:
        until = "the estimate is used" if self._before is not None else "active prefill stays full"
        own = (
            "prefill load model: measured, a line through the prefills that this process sees, by "
            f"model and role; until {_ENOUGH} are measured, {until}"
        )
        lines = [
            f"{line.count:,} prefills of {role} workers of {model}: {text}"
            for (model, role), line in list(self._lines.items())[-_MOST_LISTED:]
            if (text := line.describe())
        ]
        return [own, *lines, *(self._before.describe() if self._before is not None else ())]


@dataclass(slots=True)
class _Run:
    """Prefills of one rank that an engine computed together. Times are those of the service."""

    worker: Worker
    began: float
    ended: float
    tokens: int


class PrefillTimes:
    """How long prefills took, for the model and for metrics.

    The prefills of a rank run one after the other, so one begins when it is sent, or when the one
    before it ends. Those that end (almost) at once were one step of the engine and count as one.
    """

    def __init__(self) -> None:
        self._runs: dict[WorkerWithDpRank, _Run] = {}
        #: (model, role) -> prefills with a prediction, and the seconds predicted and measured.
        self.rows: dict[tuple[str, str], tuple[int, float, float]] = {}

    def ended(self, model: PrefillModel, decision: Decision, sent: float, now: float) -> None:
        """The prefill of a decision, sent at ``sent``, had its first output at ``now``."""
        worker, ref = decision.worker, decision.ref
        if worker is None or ref is None:
            return
        tokens, _ = prefill_tokens(decision)
        before = self._runs.get(ref)
        began = sent if before is None else max(sent, before.ended)
        if decision.predicted is not None:
            key = (worker.model, worker.role.value)
            count, predicted, measured = self.rows.get(key, (0, 0.0, 0.0))
            row = (count + 1, predicted + decision.predicted.seconds, measured + now - began)
            self.rows[key] = row
        if before is not None:
            overlaps = sent < before.ended
            if overlaps and now - before.ended < _SAME_STEP * (before.ended - before.began):
                before.ended, before.tokens = now, before.tokens + tokens
                return
            model.observe(before.worker, before.tokens, before.ended - before.began)
        elif len(self._runs) >= _MOST_RANKS:
            self._runs.clear()
        self._runs[ref] = _Run(worker, began, now, tokens)


class _Line:
    """``seconds = start + pace * tokens`` by least squares, of which the past counts less and less.

    Robust: a value far from the prediction is moved to its bound first, so that one slow response
    changes little and a lasting change is followed. The first values are judged by the median line
    through them (Theil and Sen). Memory is constant.
    """

    __slots__ = ("_first", "_n", "_x", "_xx", "_xy", "_y", "count")

    def __init__(self) -> None:
        self.count = 0
        self._first: list[tuple[float, float]] = []
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Take one prefill; one of no tokens or no duration is ignored."""
        if tokens <= 0 or not 0.0 < seconds < math.inf:
            return
        self.count += 1
        if self.count < _ENOUGH:
            self._first.append((float(tokens), seconds))
        elif self.count == _ENOUGH:
            first = [*self._first, (float(tokens), seconds)]
            self._first.clear()
            slopes = [(b - y) / (a - x) for x, y in first for a, b in first if a > x]
            pace = max(0.0, median(slopes)) if slopes else 0.0
            start = median(y - pace * x for x, y in first)
            for x, y in first:
                self._take(x, y, max(start + pace * x, 1e-9))
        else:
            self._take(float(tokens), seconds, self.seconds(tokens) or seconds)

    def _take(self, x: float, y: float, expected: float) -> None:
        y = min(max(y, expected / _OUTLIER), expected * _OUTLIER)
        keep = _KEEP
        self._n = self._n * keep + 1.0
        self._x = self._x * keep + x
        self._y = self._y * keep + y
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * y

    def seconds(self, tokens: int) -> float | None:
        """The predicted duration; None while too little is measured."""
        if self.count < _ENOUGH:
            return None
        start, pace = self._fit()
        return start + pace * tokens

    def describe(self) -> str:
        """The line in numbers; empty while too little is measured."""
        if self.count < _ENOUGH:
            return ""
        start, pace = self._fit()
        return f"{start * 1e3:,.3g} ms + {pace * 1e6:,.3g} ms per 1,000 tokens"

    def _fit(self) -> tuple[float, float]:
        """``(start, pace)``."""
        mean, level = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean * mean
        if spread > (_LEAST_SPREAD * mean) ** 2:
            pace = (self._xy / self._n - mean * level) / spread
            start = level - pace * mean
            if pace > 0 and start >= 0:
                return start, pace
        # Without a slope, or with a line that crosses 0: in proportion to the tokens.
        return 0.0, self._xy / self._xx


def prefill_model(
    config: RouterConfig, sources: Mapping[str, str] = MappingProxyType({})
) -> PrefillModel | None:
    """The model of the settings, None if it is off.

    ``sources``: where each setting comes from, so that an error names what the user typed. Raises
    UsageProblem with that name, for an unknown accelerator or a directory without a usable
    ``config.json``.
    """
    if config.router_prefill_load_model == "none":
        return None
    estimate = _estimate(config, partial(as_typed, sources=sources))
    if config.router_prefill_load_model == "measured":
        return Measured(estimate)
    if estimate is None:
        raise UsageProblem(
            f"{_flag('router_prefill_load_model')} {config.router_prefill_load_model}: "
            f"{_flag('ais_system')} and {_flag('ais_model_path')} are required"
        )
    return estimate


def _estimate(config: RouterConfig, typed: Callable[[str], str]) -> Estimate | None:
    system, path = config.ais_system, config.ais_model_path
    if system is None or path is None:
        return None
    # Only here: these load the libraries of tokenizers, which take memory and time.
    from dynctl.tokenization import TokenizerError, read_model_config
    from dynctl.tokenization.model_directory import read_json_object

    if system not in ACCELERATORS:
        near = get_close_matches(system, ACCELERATORS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageProblem(
            f"{typed('ais_system')} {system}: unknown accelerator; expected one of "
            f"{', '.join(ACCELERATORS)}",
            f"{hint}or use {_flag('router_prefill_load_model')} measured, which needs none",
        )
    directory = Path(path)
    try:
        beside = read_json_object(directory / "hf_quant_config.json")
        shape = model_shape(read_model_config(directory), beside.get("quantization"))
    except (TokenizerError, UnknownSize) as error:
        raise UsageProblem(
            f"{typed('ais_model_path')} {path}: {error}",
            "specify the directory of the model, with its config.json",
        ) from None
    return Estimate(system, shape, config.ais_tp_size or 1, directory.name)


def _flag(name: str) -> str:
    return ROUTER_OPTIONS[name].flags[0]


def prefill_tokens(decision: Decision) -> tuple[int, int]:
    """Prompt tokens that the winner computes, and those that it has cached."""
    cached = min(decision.isl_tokens, decision.cached_tokens)
    return decision.isl_tokens - cached, cached


def predicted_plan(model: PrefillModel, plan: RoutingPlan) -> RoutingPlan:
    """The plan with the predicted duration of its prefill."""
    if plan.prefill is not None:
        decision = _with_prediction(model, plan.prefill)
        return plan if decision is plan.prefill else replace(plan, prefill=decision)
    if plan.decode is None:
        return plan
    decision = _with_prediction(model, plan.decode)
    return plan if decision is plan.decode else replace(plan, decode=decision)


def _with_prediction(model: PrefillModel, decision: Decision) -> Decision:
    if decision.worker is None or not decision.parameters.track_prefill_tokens:
        return decision
    seconds = model.predict(decision.worker, *prefill_tokens(decision))
    return decision if seconds is None else replace(decision, predicted=seconds)

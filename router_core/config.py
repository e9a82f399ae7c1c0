"""The router's settings: names, types, defaults, bounds, presets and meaning.

Names and meanings follow the Dynamo 1.6 frontend. A preset changes defaults only: a value that is
set wins over it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Final

from router_core.conditional_disagg import LOAD_POLICIES, POLICIES, BypassRule
from router_core.errors import ConfigError, is_a
from router_core.forms import brief
from router_core.taints import parse_domains


@dataclass(frozen=True, slots=True)
class Only:
    """A setting has an effect only while ``setting`` has one of ``values``.

    Without ``values``: only while an optional setting is set, a switch is true, a number is not 0.
    ``instead``: this condition is enough too.
    """

    setting: str
    values: tuple[Any, ...] = ()
    instead: Only | None = None

    def holds(self, config: RouterConfig) -> bool:
        """Whether the other settings let this one have its effect."""
        value = getattr(config, self.setting)
        if self.values:
            holds = value in self.values
        elif SETTINGS[self.setting].optional:
            holds = value is not None
        else:
            holds = bool(value)
        return holds or (self.instead is not None and self.instead.holds(config))


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of :class:`RouterConfig`: its type, default and bounds, and where it has an effect.

    ``needs`` names the feature that a setting belongs to where that feature is not built yet (for
    ``unbuilt_values`` only, where there are some): such a setting is checked and has no effect.
    ``without`` says what happens instead. ``only``: the other settings that it depends on.
    ``dry_run``: why a dry run cannot show its effect (that of ``dry_run_values`` only, where there
    are some). ``dynamo``: it has an effect only with the workers of a Dynamo deployment. Every
    warning about a setting without an effect comes from these five. ``own``: Dynamo's router has no
    such setting. ``weighs``: the term of the cost (:mod:`router_core.terms`) that it multiplies.
    """

    name: str
    type: type
    default: Any
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    needs: str = ""
    unbuilt_values: tuple[Any, ...] = ()
    without: str = "ignored"
    only: tuple[Only, ...] = ()
    dry_run: str = ""
    dry_run_values: tuple[Any, ...] = ()
    dynamo: bool = False
    own: bool = False
    weighs: str | None = None

    @property
    def has_effect(self) -> bool:
        """Whether the setting has an effect at all."""
        return not self.needs or bool(self.unbuilt_values)

    def is_built(self, value: Any) -> bool:
        """Whether ``value`` has its effect; what is off or not set by default needs no feature."""
        if value == self.default and (value is None or value is False):
            return True
        if self.unbuilt_values:
            return value not in self.unbuilt_values
        return not self.needs

    def parse(self, text: str) -> Any:
        """Parse a value.

        ``none``, ``null`` and the empty string unset an optional setting. Raises ConfigError.
        """
        raw = text.strip()
        if self.optional and raw.lower() in ("", "none", "null"):
            return None
        if self.type is bool:
            truth = {"1": True, "true": True, "yes": True, "on": True}
            truth |= {"0": False, "false": False, "no": False, "off": False}
            if raw.lower() not in truth:
                raise ConfigError(
                    f"{self.name}: expected true or false (1/0, yes/no, on/off), got {text!r}"
                )
            return truth[raw.lower()]
        if self.type is int or self.type is float:
            try:
                value = self.type(raw)
            except ValueError:
                kind = "a whole number" if self.type is int else "a number"
                raise ConfigError(f"{self.name}: expected {kind}, got {text!r}") from None
            return self._check_value(value, raw)
        return self.check(raw.replace("_", "-") if self.choices else raw)

    def check(self, value: Any) -> Any:
        """Return ``value`` if it is inside the bounds; raises ConfigError with bounds and value."""
        return self._check_value(value, value)

    def _check_value(self, value: Any, given: Any) -> Any:
        """As :meth:`check`; errors show ``given``, the value as the user wrote it."""
        if value is None:
            if self.optional:
                return None
            raise ConfigError(f"{self.name}: a value is required, got none")
        value = self._with_type(value)
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{self.name}: expected one of {', '.join(self.choices)}, got {brief(value)}"
            )
        if self.type in (int, float):
            self._check_bounds(value, str(given)[:40])
        return value

    def _with_type(self, value: Any) -> Any:
        """The value as the setting's type. Integers are floats too; booleans are not numbers."""
        if isinstance(value, int) and abs(value) > MOST_INTEGER:
            raise ConfigError(f"{self.name}: expected at most {MOST_INTEGER}, got a huge integer")
        if isinstance(value, bool):
            fits = self.type is bool
        elif self.type is float and isinstance(value, int):
            return float(value)
        else:
            fits = isinstance(value, self.type)
        if not fits:
            raise ConfigError(f"{self.name}: expected {self.type.__name__}, got {brief(value)}")
        return value

    def _check_bounds(self, value: float, shown: str) -> None:
        if not math.isfinite(value):
            raise ConfigError(f"{self.name}: expected a finite number, got {value}")
        if self.low is not None and value < self.low:
            raise ConfigError(f"{self.name}: expected at least {self.low:g}, got {shown}")
        if self.high is not None and value > self.high:
            raise ConfigError(f"{self.name}: expected at most {self.high:g}, got {shown}")
        if self.type is float and abs(value) > MOST_NUMBER:
            raise ConfigError(f"{self.name}: expected at most {MOST_NUMBER:g}, got {value:g}")


#: The largest values of settings without a bound of their own: products with block and token
#: counts stay finite, and integers fit into 64 bits.
MOST_NUMBER = 1e9
MOST_INTEGER = 2**64 - 1

ROUTER_MODES = (
    "kv",
    "round-robin",
    "random",
    "power-of-two",
    "least-loaded",
    "direct",
    "device-aware-weighted",
)
ENFORCEMENTS = ("required", "preferred", "fallback")
QUEUE_POLICIES = ("fcfs", "wspt", "lcfs")


_IN_KV = (Only("router_mode", ("kv",)),)
_NOT_IN_KV = (Only("router_mode", tuple(mode for mode in ROUTER_MODES if mode != "kv")),)
_WITH_DOMAIN = Only("kv_transfer_domain")
_WITH_EVENTS = Only("use_kv_events")
_WITHOUT_EVENTS = Only("use_kv_events", (False,))
_BY_ISL = (POLICIES[0], POLICIES[2])
_SKIPPING = (*_IN_KV, Only("conditional_disagg_enabled"))
_MODELLED = (Only("router_prefill_load_model", ("ais", "aic", "measured")),)
_TRACKING_PREFILL = Only("router_track_prefill_tokens")
_QUEUED = (
    *_IN_KV,
    Only("router_queue_threshold", instead=Only("router_policy_config")),
    _TRACKING_PREFILL,
)
#: What the router counts is in the cost of mode kv, and compared with busy thresholds in all modes.
_COUNTING_BLOCKS = Only("router_mode", ("kv",), Only("active_decode_blocks_threshold"))
_COUNTING_TOKENS = Only(
    "router_mode",
    ("kv",),
    Only("active_prefill_tokens_threshold", (), Only("active_prefill_tokens_threshold_frac")),
)
#: Modes other than kv read taints and KV-transfer policies by this setting alone.
_WITH_TAINTS = Only("router_mode", ("kv",), instead=Only("router_taints_in_all_modes"))
#: The prefill term has the credit; without it, and on the decode hop of a request that may skip
#: prefill, the decode term has.
_CREDITING = Only(
    "prefill_load_scale",
    instead=Only(
        "router_track_prefill_tokens",
        (False,),
        instead=Only("conditional_disagg_enabled"),
    ),
)
_NOT_DIRECT = (Only("router_mode", tuple(mode for mode in ROUTER_MODES if mode != "direct")),)
_WITH_SESSIONS = (*_NOT_DIRECT, Only("router_session_affinity_ttl_secs"))
_SOFT_SESSIONS = (*_WITH_SESSIONS, Only("router_session_affinity_mode", ("soft",)))
_BOUND = "requests bind a session to a worker, and a dry run sends none"
_FILLED = "the index of a dry run is filled already"
_WAITING = "it bounds requests that wait, and a dry run does not wait"
_RUNNING = "it acts on running requests, and a dry run sends none"
_PREDICTED = "running requests keep the durations that were predicted when they began"


def _setting(default: Any, **metadata: Any) -> Any:
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How a router decides; raises ConfigError for a value out of bounds.

    Blocks are KV-cache blocks, tokens are prompt tokens, fractions are of 1. ``SETTINGS`` has the
    type, default and bounds of every field.
    """

    router_mode: str = _setting("kv", choices=ROUTER_MODES)
    """Rule that chooses the worker."""
    overlap_score_credit: float = _setting(1.0, low=0.0, only=(*_IN_KV, _CREDITING))
    """Blocks of prefill credited per cached block."""
    overlap_score_credit_decay: float = _setting(
        0.0,
        low=0.0,
        only=(
            *_IN_KV,
            _TRACKING_PREFILL,
            Only("overlap_score_credit"),
            Only("prefill_load_scale"),
        ),
    )
    """How fast the credit falls on workers with more active prefill than the least loaded."""
    prefill_load_scale: float = _setting(1.0, low=0.0, only=(*_IN_KV, _TRACKING_PREFILL))
    """Weight of prefill blocks in the cost (0.9: the overlap score weight)."""
    decode_active_request_weight: float = _setting(0.0, low=0.0, only=_IN_KV)
    """Cost in blocks of each active request of a worker."""
    router_temperature: float = _setting(0.0, low=0.0, only=_IN_KV)
    """0 picks the lowest cost; above 0 samples, the higher the more evenly."""
    router_track_active_blocks: bool = _setting(True, only=(_COUNTING_BLOCKS,))
    """Count the blocks of running requests as decode load."""
    router_track_output_blocks: bool = _setting(False, dry_run=_RUNNING)
    """Also count the blocks that generation adds."""
    router_assume_kv_reuse: bool = _setting(
        True, only=(_COUNTING_BLOCKS, Only("router_track_active_blocks"))
    )
    """Count a prompt block that running requests share once per worker."""
    router_track_prefill_tokens: bool = _setting(True, only=(_COUNTING_TOKENS,))
    """Count prompt tokens that wait for their first output token as prefill load."""
    active_decode_blocks_threshold: float | None = _setting(None, low=0.0, high=1.0)
    """A rank is busy above this fraction of its KV blocks."""
    active_prefill_tokens_threshold: int | None = _setting(None, low=0)
    """A rank is busy above this many active prefill tokens."""
    active_prefill_tokens_threshold_frac: float | None = _setting(None, low=0.0)
    """A rank is busy above this multiple of its max_num_batched_tokens (may exceed 1)."""
    kv_transfer_domain: str | None = _setting(None, only=(_WITH_TAINTS,))
    """Topology domain of the router's own KV-transfer policy, for workers that publish none."""
    kv_transfer_enforcement: str = _setting(
        "required", choices=ENFORCEMENTS, only=(_WITH_TAINTS, _WITH_DOMAIN)
    )
    """``required`` never crosses the domain, ``preferred`` makes crossing cost more, ``fallback``
    crosses only when the domain has no decode worker."""
    kv_transfer_preferred_weight: float | None = _setting(
        None,
        low=0.0,
        high=1.0,
        only=(_WITH_TAINTS, _WITH_DOMAIN, Only("kv_transfer_enforcement", ("preferred",))),
    )
    """Weight of the preference, 0 to 1."""
    decode_capacity_guard: bool = _setting(
        True,
        only=(_WITH_TAINTS, *_NOT_DIRECT, Only("router_pair_selection", ("greedy",))),
        own=True,
    )
    """Choose only prefill workers whose domain has an eligible decode worker."""
    router_pair_selection: str = _setting(
        "greedy", choices=("greedy", "best"), only=_IN_KV, own=True
    )
    """``greedy`` chooses the best prefill worker, then decode; ``best`` the pair with the lowest
    sum of both costs."""
    router_kv_transfer_weight: float | None = _setting(
        None,
        low=0.0,
        only=(*_IN_KV, Only("router_kv_transfer_qos")),
        own=True,
        weighs="transfer",
    )
    """Cost in blocks of a second of KV transfer between prefill and decode worker."""
    router_kv_transfer_qos: str | None = _setting(
        None, only=(*_IN_KV, Only("router_kv_transfer_weight")), own=True
    )
    """YAML file with latency and bandwidth of each topology level."""
    router_own_domains: str | None = _setting(
        None,
        only=(*_IN_KV, Only("router_kv_transfer_weight"), Only("router_kv_transfer_qos")),
        own=True,
    )
    """The frontend's own topology domains, ``zone=a,rack=r1``: the latency from there counts on the
    first hop."""
    conditional_disagg_enabled: bool = _setting(False, only=_IN_KV)
    """Conditional disaggregation: a decode worker that has enough of a prompt cached computes the
    rest by itself, without the prefill hop (see :mod:`router_core.conditional_disagg`)."""
    conditional_disagg_policy: str = _setting(POLICIES[0], choices=POLICIES, only=_SKIPPING)
    """What leaves out the prefill hop: a short rest of the prompt, a busy prefill worker, or
    either."""
    conditional_disagg_eff_isl_threshold: int = _setting(
        2048,
        low=0,
        only=(*_SKIPPING, Only("conditional_disagg_policy", _BY_ISL)),
    )
    """The decode worker computes fewer prompt tokens than this by itself."""
    conditional_disagg_eff_isl_ratio_threshold: float = _setting(
        0.7,
        low=0.0,
        high=1.0,
        only=(*_SKIPPING, Only("conditional_disagg_policy", _BY_ISL)),
    )
    """The decode worker computes less than this fraction of the prompt by itself."""
    conditional_disagg_prefill_busy_threshold: float | None = _setting(
        None,
        low=0.0,
        only=(*_SKIPPING, Only("conditional_disagg_policy", LOAD_POLICIES)),
    )
    """A prefill worker is busy above this multiple of its max_num_batched_tokens; None: the router
    queue's threshold."""
    conditional_disagg_decode_busy_threshold: float | None = _setting(None, low=0.0, only=_SKIPPING)
    """The prefill hop is kept where the decode worker would have more active blocks than this
    fraction of its KV blocks."""
    conditional_disagg_require_can_prefill: bool = _setting(True, only=_SKIPPING)
    """Leave out the prefill hop only for decode workers that can prefill; Dynamo does not look."""
    router_taints_in_all_modes: bool = _setting(True, only=_NOT_IN_KV, own=True)
    """Apply taints and KV-transfer policies in modes other than kv too (off: as in Dynamo 1.6)."""
    router_on_degraded: str = _setting(
        "discount",
        choices=("discount", "approximate", "load-only", "full"),
        only=(*_IN_KV, _WITH_EVENTS),
    )
    """What cached blocks count for while a rank's index is incomplete: ``discount`` half of them,
    ``approximate`` what this router sent there in the last ``router_ttl_secs``, ``load-only`` none,
    ``full`` all (as in Dynamo)."""
    router_session_affinity_ttl_secs: float | None = _setting(
        None, low=1.0, high=31_536_000.0, only=_NOT_DIRECT, dry_run=_BOUND
    )
    """Seconds after the last request of a session for which its worker answers the next."""
    router_session_affinity_mode: str = _setting(
        "hard", choices=("hard", "soft"), only=_WITH_SESSIONS, dry_run=_BOUND
    )
    """``hard``: the worker of a session answers while it is eligible; ``soft``: until it costs more
    than ``router_session_affinity_yield_blocks`` above the best (in mode kv, else as ``hard``)."""
    router_session_affinity_yield_blocks: float = _setting(
        64.0, low=0.0, only=(*_IN_KV, *_SOFT_SESSIONS), dry_run=_BOUND
    )
    """Blocks by which the worker of a session may cost more than the best one, before it moves."""
    active_request_expiry_secs: float = _setting(300.0, low=1.0, dry_run=_RUNNING)
    """Seconds without progress after which a booking expires."""
    overload_status_code: int = _setting(
        529,
        low=400,
        high=599,
        dry_run="it is the status of an HTTP response, and a dry run sends no request",
    )
    """HTTP status when every eligible worker is busy."""
    use_kv_events: bool = _setting(True, dry_run=_FILLED)
    """Index what workers cache from their KV events (off: approximate mode, an estimate)."""
    router_approximate_cache_policy: str = _setting(
        "ttl", choices=("ttl", "lru"), only=(*_IN_KV, _WITHOUT_EVENTS), dry_run=_FILLED
    )
    """Approximate mode: what is forgotten: ``ttl`` blocks not routed for ``router_ttl_secs``,
    ``lru`` those least recently in use, once a worker has more than it declares."""
    router_ttl_secs: float = _setting(120.0, low=0.0, only=_IN_KV, dry_run=_FILLED)
    """Approximate mode: seconds for which a routed prefix counts as cached."""
    router_max_tree_size: int | None = _setting(None, low=1, only=_IN_KV, dry_run=_FILLED)
    """Approximate mode: blocks kept before pruning; None for 1,048,576."""
    router_prune_target_ratio: float = _setting(
        0.8, low=0.0, high=1.0, only=_IN_KV, dry_run=_FILLED
    )
    """Approximate mode: fraction of the blocks kept by pruning."""
    router_queue_threshold: float | None = _setting(
        None, low=0.0, only=(*_IN_KV, _TRACKING_PREFILL)
    )
    """Requests wait while every worker that could take them holds more active prefill tokens than
    this multiple of its max_num_batched_tokens."""
    router_queue_policy: str = _setting(
        "fcfs",
        choices=QUEUE_POLICIES,
        only=(*_IN_KV, Only("router_queue_threshold"), _TRACKING_PREFILL),
    )
    """Order of the router queue."""
    router_policy_config: str | None = _setting(None, only=(*_IN_KV, _TRACKING_PREFILL))
    """File with the policy classes of the router queue, in place of threshold and policy."""
    router_queue_max_requests: int = _setting(
        4096, low=0, high=1_000_000, only=_QUEUED, dry_run=_WAITING
    )
    """Requests that may wait in the router queue."""
    router_queue_max_wait_secs: float = _setting(
        300.0, low=0.0, high=86_400.0, only=_QUEUED, dry_run=_WAITING
    )
    """Seconds that a request may wait in the router queue."""
    host_cache_hit_weight: float = _setting(0.75, low=0.0, high=1.0, only=_IN_KV)
    """Credit of a block cached in host memory."""
    disk_cache_hit_weight: float = _setting(0.25, low=0.0, high=1.0, only=_IN_KV)
    """Credit of a block cached on disk."""
    router_replica_sync: bool = _setting(
        False, dry_run="it is between running routers, and a dry run sends nothing"
    )
    """Share active-request state between router replicas."""
    router_predicted_ttl_secs: float | None = _setting(
        None, low=0.0, only=(*_IN_KV, _WITH_EVENTS), dry_run=_FILLED
    )
    """Seconds for which a routed prefix counts as cached before its events arrive."""
    router_prefill_load_model: str = _setting(
        "none",
        choices=("none", "ais", "aic", "measured"),
        only=_IN_KV,
        dry_run=_PREDICTED,
        dry_run_values=("ais", "aic", "measured"),
    )
    """Model of how active prefill tokens fall with time: ``aic`` or ``ais`` an estimate for the
    accelerator and model of the ``ais_`` settings, ``measured`` the durations of earlier prefills
    (and the estimate before there are enough), ``none`` keeps them until the first output token."""
    ais_backend: str | None = _setting(
        None, choices=("vllm", "sglang", "trtllm"), only=_MODELLED, dry_run=_PREDICTED
    )
    """Prefill load model: the engine. The estimate is the same for each."""
    ais_backend_version: str | None = _setting(
        None, needs="a database of measured kernel times", only=_MODELLED
    )
    """Prefill load model: the backend's version."""
    ais_system: str | None = _setting(None, only=_MODELLED, dry_run=_PREDICTED)
    """Prefill load model: the accelerator, for example ``h200_sxm``."""
    ais_model_path: str | None = _setting(None, only=_MODELLED, dry_run=_PREDICTED)
    """Prefill load model: directory of the model, with its config.json."""
    ais_tp_size: int | None = _setting(None, low=1, high=1024, only=_MODELLED, dry_run=_PREDICTED)
    """Prefill load model: accelerators that share the model; None for 1."""
    encoder_cuda_to_cpu_ratio: float = _setting(
        8.0, low=1.0, only=(Only("router_mode", ("device-aware-weighted",)),)
    )
    """Throughput of a non-CPU worker relative to a CPU worker."""
    serve_indexer: bool = _setting(False, dynamo=True, dry_run="a dry run serves no index")
    """Serve this router's index to other routers."""
    use_remote_indexer: bool = _setting(
        False,
        dynamo=True,
        dry_run="it decides where an index is kept, not what the workers cache",
    )
    """Query a served indexer instead of keeping an index."""
    router_durable_kv_events: bool = _setting(
        False,
        dynamo=True,
        only=(_WITH_EVENTS,),
        dry_run="it is how a running router reads its events",
    )
    """Read KV events from JetStream (deprecated in Dynamo)."""
    router_reset_states: bool = _setting(
        False,
        dynamo=True,
        only=(Only("router_durable_kv_events"),),
        dry_run="it is what a running router does at its start",
    )
    """Remove KV events and snapshot from JetStream at start, for all routers."""

    def __post_init__(self) -> None:
        for setting in SETTINGS.values() if _SETTINGS_READY else ():
            setting.check(getattr(self, setting.name))
        if self.router_own_domains is not None:
            try:
                parse_domains(self.router_own_domains)
            except ConfigError as error:
                raise ConfigError(f"router_own_domains: {error}") from None
        preferred = self.kv_transfer_domain is not None and (
            self.kv_transfer_enforcement == "preferred"
        )
        if preferred and self.kv_transfer_preferred_weight is None:
            raise ConfigError(
                "kv_transfer_preferred_weight: required when kv_transfer_enforcement is "
                "preferred, expected 0 to 1, got none"
            )

    @property
    def applies_taints(self) -> bool:
        """Whether requests' constraints and KV-transfer policies are in force."""
        return self.router_taints_in_all_modes or self.router_mode == "kv"

    @property
    def skips_prefill(self) -> bool:
        """Whether conditional disaggregation is in force."""
        return self.conditional_disagg_enabled and self.router_mode == "kv"

    @property
    def bypass_rule(self) -> BypassRule:
        return BypassRule(
            self.conditional_disagg_policy,
            self.conditional_disagg_eff_isl_threshold,
            self.conditional_disagg_eff_isl_ratio_threshold,
        )

    @property
    def bypass_busy_threshold(self) -> float | None:
        """The multiple of max_num_batched_tokens above which a prefill worker is busy for
        conditional disaggregation; None where its policy reads no load, or none is set."""
        if self.conditional_disagg_policy not in LOAD_POLICIES:
            return None
        own = self.conditional_disagg_prefill_busy_threshold
        return self.router_queue_threshold if own is None else own

    def with_values(self, values: Mapping[str, Any]) -> RouterConfig:
        """A copy with ``values`` (by field name) checked and set; raises ConfigError."""
        for name in sorted(set(values) - set(SETTINGS)):
            find_setting(name)
        return replace(self, **values)


_SETTINGS_READY = False


def _describe() -> dict[str, Setting]:
    types: dict[str, tuple[type, bool]] = {
        "str": (str, False),
        "int": (int, False),
        "float": (float, False),
        "bool": (bool, False),
        "str | None": (str, True),
        "int | None": (int, True),
        "float | None": (float, True),
    }
    table = {}
    for item in fields(RouterConfig):
        kind, optional = types[str(item.type)]
        metadata = dict(item.metadata)
        table[item.name] = Setting(
            name=item.name, type=kind, default=item.default, optional=optional, **metadata
        )
    return table


#: Field name -> its Setting, in declaration order.
SETTINGS: dict[str, Setting] = _describe()
_SETTINGS_READY = True
#: Parameter of the cost -> the setting with its value, for each that ``weighs`` a term.
WEIGHT_SETTINGS: Final = {
    name.removeprefix("router_"): name
    for name, setting in SETTINGS.items()
    if setting.weighs is not None
}

#: Preset name -> the defaults it changes. ``dynamo-1.6`` is what live deployments run;
#: ``dynamo-0.9`` follows the 0.9 guides (round-robin, queue at 4.0, 503 on overload, size pruning).
PRESETS: dict[str, dict[str, Any]] = {
    "dynamo-1.6": {},
    "dynamo-0.9": {
        "router_mode": "round-robin",
        "router_queue_threshold": 4.0,
        "overload_status_code": 503,
        "router_max_tree_size": 2**20,
        "router_prune_target_ratio": 0.8,
    },
    "ttft": {
        "prefill_load_scale": 1.5,
        "active_decode_blocks_threshold": 0.7,
        "active_prefill_tokens_threshold": 500,
        "router_temperature": 0.0,
    },
    "throughput": {
        "prefill_load_scale": 0.7,
        "active_decode_blocks_threshold": 0.95,
        "active_prefill_tokens_threshold": 2000,
        "router_temperature": 0.3,
    },
}
DEFAULT_PRESET = "dynamo-1.6"


def find_setting(name: str) -> Setting:
    """The setting ``name``; raises ConfigError with similar names."""
    if name in SETTINGS:
        return SETTINGS[name]
    near = get_close_matches(name, SETTINGS, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"{name}: no such setting{hint}")


def preset(name: str) -> RouterConfig:
    """The defaults of the preset ``name``; raises ConfigError with the known presets."""
    if name not in PRESETS:
        raise ConfigError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return RouterConfig(**PRESETS[name])


def legacy_overlap_weight(weight: float) -> dict[str, float]:
    """The settings that the 0.9 overlap score weight means; 0 switches the cache credit off.

    Raises ConfigError for a weight below 0 or that is not a finite number.
    """
    if not is_a(weight, int, float) or not 0 <= weight < math.inf:
        raise ConfigError(f"overlap_score_weight: expected a number of at least 0, got {weight!r}")
    if weight == 0:
        return {"prefill_load_scale": 0.0, "overlap_score_credit": 0.0}
    return {"prefill_load_scale": weight}

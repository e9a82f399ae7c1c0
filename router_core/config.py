"""The router's settings: each with its default, bounds, flags, environment variables and help.

One table serves the command line, the environment, ``config show`` and validation, so a setting
cannot be called one thing here and another there. Presets change defaults only: what a person
sets explicitly always wins. Names and meanings follow the Dynamo 1.6 frontend; deprecated 0.9
spellings are kept as aliases that warn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from router_core.errors import ConfigError

#: Modes that other routers know and this one does not have yet: named, so that asking for one is
#: answered with "not built yet" and not with "unknown".
PLANNED_MODES = ("power-of-two", "device-aware-weighted", "direct")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one field of :class:`RouterConfig` beside its value.

    ``flags`` and ``env`` list the current name first; the rest are deprecated spellings that still
    work and warn. ``needs`` names the feature that the setting belongs to where that is not built
    yet (for ``unbuilt_values`` only, where there are some): such a setting is read, validated and
    answered with a warning. ``without`` says what happens instead.
    """

    name: str
    type: type
    default: Any
    help: str
    flags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    needs: str = ""
    unbuilt_values: tuple[Any, ...] = ()
    without: str = "ignored"

    @property
    def built(self) -> bool:
        """Whether the setting has an effect at all."""
        return not self.needs or bool(self.unbuilt_values)

    def is_built(self, value: Any) -> bool:
        """Whether setting it to ``value`` has the effect that it should have."""
        if self.unbuilt_values:
            return value not in self.unbuilt_values
        return not self.needs

    def parse(self, text: str) -> Any:
        """The value that a flag or an environment variable spells.

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
            return self.check(value)
        return self.check(raw.replace("_", "-") if self.choices else raw)

    def check(self, value: Any) -> Any:
        """``value`` if it is inside the bounds; raises ConfigError naming bounds and value."""
        if value is None:
            if self.optional:
                return None
            raise ConfigError(f"{self.name}: a value is required, got none")
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.type) or (self.type is int and isinstance(value, bool)):
            raise ConfigError(f"{self.name}: expected {self.type.__name__}, got {value!r}")
        if self.choices and value not in self.choices:
            planned = " (not built yet)" if value in PLANNED_MODES else ""
            raise ConfigError(
                f"{self.name}: expected one of {', '.join(self.choices)}, got {value!r}{planned}"
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{self.name}: expected a finite number, got {value}")
            if self.low is not None and value < self.low:
                raise ConfigError(f"{self.name}: expected at least {self.low:g}, got {value}")
            if self.high is not None and value > self.high:
                raise ConfigError(f"{self.name}: expected at most {self.high:g}, got {value}")
        return value


ROUTER_MODES = ("kv", "round-robin", "random", "least-loaded")
ENFORCEMENTS = ("required", "preferred", "fallback")


def _setting(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How a router decides. Every field is described by :func:`settings`.

    Blocks are KV-cache blocks, tokens are prompt tokens, fractions are of 1.
    """

    router_mode: str = _setting(
        "kv",
        "how a worker is chosen",
        flags=("--router-mode",),
        env=("DYN_ROUTER_MODE",),
        choices=ROUTER_MODES,
    )
    overlap_score_credit: float = _setting(
        1.0,
        "blocks of prefill credited per cached block",
        flags=("--router-kv-overlap-score-credit",),
        env=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",),
        low=0.0,
    )
    overlap_score_credit_decay: float = _setting(
        0.0,
        "how fast the credit fades on workers with more active prefill than the least loaded",
        flags=("--router-kv-overlap-score-credit-decay",),
        env=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",),
        low=0.0,
    )
    prefill_load_scale: float = _setting(
        1.0,
        "weight of prefill blocks in the cost (0.9: the overlap score weight)",
        flags=(
            "--router-prefill-load-scale",
            "--router-kv-overlap-score-weight",
            "--kv-overlap-score-weight",
        ),
        env=(
            "DYN_ROUTER_PREFILL_LOAD_SCALE",
            "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
            "DYN_KV_OVERLAP_SCORE_WEIGHT",
        ),
        low=0.0,
    )
    decode_active_request_weight: float = _setting(
        0.0,
        "cost of each request that is active on a worker",
        flags=("--router-decode-active-request-weight",),
        env=("DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",),
        low=0.0,
    )
    router_temperature: float = _setting(
        0.0,
        "0 picks the lowest cost; above 0 samples, more evenly the higher it is",
        flags=("--router-temperature",),
        env=("DYN_ROUTER_TEMPERATURE",),
        low=0.0,
    )
    router_track_active_blocks: bool = _setting(
        True,
        "count the blocks of running requests as decode load",
        flags=("--router-track-active-blocks", "--track-active-blocks"),
        env=("DYN_ROUTER_TRACK_ACTIVE_BLOCKS",),
    )
    router_track_output_blocks: bool = _setting(
        False,
        "also count blocks that generation adds",
        flags=("--router-track-output-blocks", "--track-output-blocks"),
        env=("DYN_ROUTER_TRACK_OUTPUT_BLOCKS",),
    )
    router_assume_kv_reuse: bool = _setting(
        True,
        "count a prompt block that running requests share once a worker",
        flags=("--router-assume-kv-reuse", "--assume-kv-reuse"),
        env=("DYN_ROUTER_ASSUME_KV_REUSE",),
    )
    router_track_prefill_tokens: bool = _setting(
        True,
        "count prompt tokens that wait for their first output token as prefill load",
        flags=("--router-track-prefill-tokens",),
        env=("DYN_ROUTER_TRACK_PREFILL_TOKENS",),
    )
    active_decode_blocks_threshold: float | None = _setting(
        None,
        "a rank is busy above this fraction of its KV blocks",
        flags=("--active-decode-blocks-threshold",),
        env=("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",),
        low=0.0,
        high=1.0,
    )
    active_prefill_tokens_threshold: int | None = _setting(
        None,
        "a rank is busy above this many active prefill tokens",
        flags=("--active-prefill-tokens-threshold",),
        env=("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",),
        low=0,
    )
    active_prefill_tokens_threshold_frac: float | None = _setting(
        None,
        "a rank is busy above this multiple of its max_num_batched_tokens (may exceed 1)",
        flags=("--active-prefill-tokens-threshold-frac",),
        env=("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",),
        low=0.0,
    )
    kv_transfer_domain: str | None = _setting(
        None,
        "the router's own transfer domain, for workers that publish no policy",
        flags=("--router-kv-transfer-topology-level",),
        env=("DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL",),
    )
    kv_transfer_enforcement: str = _setting(
        "required",
        "what the router's own domain means: required never crosses it, preferred costs, "
        "fallback crosses only when the domain has no decode worker",
        flags=("--kv-transfer-enforcement",),
        env=("DYN_ROUTER_KV_TRANSFER_ENFORCEMENT",),
        choices=ENFORCEMENTS,
    )
    kv_transfer_preferred_weight: float | None = _setting(
        None,
        "strength of preferred, 0 to 1",
        flags=("--kv-transfer-preferred-weight",),
        env=("DYN_ROUTER_KV_TRANSFER_PREFERRED_WEIGHT",),
        low=0.0,
        high=1.0,
    )
    decode_capacity_guard: bool = _setting(
        True,
        "choose prefill workers whose domain has an eligible decode worker first",
        flags=("--router-decode-capacity-guard",),
        env=("DYN_ROUTER_DECODE_CAPACITY_GUARD",),
    )
    active_request_expiry_secs: float = _setting(
        300.0,
        "a booking that shows no progress for this long is forgotten",
        flags=("--router-active-request-expiry-secs",),
        env=("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",),
        low=1.0,
    )
    overload_status_code: int = _setting(
        529,
        "HTTP status when every eligible worker is busy",
        flags=("--http-overload-status-code",),
        env=("DYN_HTTP_OVERLOAD_STATUS_CODE",),
        low=400,
        high=599,
    )
    use_kv_events: bool = _setting(
        True,
        "learn what workers cache from their KV events (off: approximate mode)",
        flags=("--router-kv-events", "--kv-events"),
        env=("DYN_ROUTER_USE_KV_EVENTS", "DYN_KV_EVENTS"),
        needs="approximate mode",
        unbuilt_values=(False,),
        without="workers are routed by load only",
    )
    router_ttl_secs: float = _setting(
        120.0,
        "approximate mode: how long a routed prefix is believed to be cached",
        flags=("--router-ttl-secs", "--router-ttl"),
        env=("DYN_ROUTER_TTL_SECS", "DYN_ROUTER_TTL"),
        low=0.0,
        needs="approximate mode",
    )
    router_max_tree_size: int | None = _setting(
        None,
        "approximate mode (0.9): blocks kept before pruning",
        flags=("--router-max-tree-size",),
        env=("DYN_ROUTER_MAX_TREE_SIZE",),
        low=1,
        needs="approximate mode",
    )
    router_prune_target_ratio: float = _setting(
        0.8,
        "approximate mode (0.9): fraction kept by a pruning",
        flags=("--router-prune-target-ratio",),
        env=("DYN_ROUTER_PRUNE_TARGET_RATIO",),
        low=0.0,
        high=1.0,
        needs="approximate mode",
    )
    router_queue_threshold: float | None = _setting(
        None,
        "queue when every worker holds more than this multiple of max_num_batched_tokens",
        flags=("--router-queue-threshold",),
        env=("DYN_ROUTER_QUEUE_THRESHOLD",),
        low=0.0,
        needs="the router queue",
    )
    router_queue_policy: str = _setting(
        "fcfs",
        "order of the router queue",
        flags=("--router-queue-policy",),
        env=("DYN_ROUTER_QUEUE_POLICY",),
        choices=("fcfs", "wspt", "lcfs"),
        needs="the router queue",
    )
    host_cache_hit_weight: float = _setting(
        0.75,
        "credit of a block cached in host memory",
        flags=("--router-host-cache-hit-weight",),
        env=("DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",),
        low=0.0,
        high=1.0,
        needs="cache tiers",
    )
    disk_cache_hit_weight: float = _setting(
        0.25,
        "credit of a block cached on disk",
        flags=("--router-disk-cache-hit-weight",),
        env=("DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",),
        low=0.0,
        high=1.0,
        needs="cache tiers",
    )
    router_replica_sync: bool = _setting(
        False,
        "share active-request state between router replicas",
        flags=("--router-replica-sync",),
        env=("DYN_ROUTER_REPLICA_SYNC",),
        needs="replica sync",
    )

    router_predicted_ttl_secs: float | None = _setting(
        None,
        "how long a routed prefix is believed to be cached before its events come",
        flags=("--router-predicted-ttl-secs",),
        env=("DYN_ROUTER_PREDICTED_TTL_SECS",),
        low=0.0,
        needs="predict-on-route",
    )
    router_prefill_load_model: str = _setting(
        "none",
        "how active prefill tokens decay with time",
        flags=("--router-prefill-load-model",),
        env=("DYN_ROUTER_PREFILL_LOAD_MODEL",),
        choices=("none", "ais", "aic"),
        needs="the prefill load model",
        unbuilt_values=("ais", "aic"),
        without="prefill load stays static",
    )
    ais_backend: str | None = _setting(
        None,
        "prefill load model: the backend",
        flags=("--ais-backend", "--aic-backend"),
        env=("DYN_AIS_BACKEND", "DYN_AIC_BACKEND"),
        needs="the prefill load model",
    )
    ais_backend_version: str | None = _setting(
        None,
        "prefill load model: the backend's version",
        flags=("--ais-backend-version", "--aic-backend-version"),
        env=("DYN_AIS_BACKEND_VERSION", "DYN_AIC_BACKEND_VERSION"),
        needs="the prefill load model",
    )
    ais_system: str | None = _setting(
        None,
        "prefill load model: the accelerator",
        flags=("--ais-system", "--aic-system"),
        env=("DYN_AIS_SYSTEM", "DYN_AIC_SYSTEM"),
        needs="the prefill load model",
    )
    ais_model_path: str | None = _setting(
        None,
        "prefill load model: the model",
        flags=("--ais-model-path", "--aic-model-path"),
        env=("DYN_AIS_MODEL_PATH", "DYN_AIC_MODEL_PATH"),
        needs="the prefill load model",
    )
    ais_tp_size: int | None = _setting(
        None,
        "prefill load model: tensor-parallel size",
        flags=("--ais-tp-size", "--aic-tp-size"),
        env=("DYN_AIS_TP_SIZE", "DYN_AIC_TP_SIZE"),
        low=1,
        needs="the prefill load model",
    )
    encoder_cuda_to_cpu_ratio: float = _setting(
        8.0,
        "throughput of a non-CPU worker relative to a CPU worker",
        flags=("--encoder-cuda-to-cpu-ratio",),
        env=("DYN_ENCODER_CUDA_TO_CPU_RATIO",),
        low=1.0,
        needs="the mode device-aware-weighted",
    )
    serve_indexer: bool = _setting(
        False,
        "answer other routers from this router's index",
        flags=("--serve-indexer",),
        env=("DYN_SERVE_INDEXER",),
        needs="the served indexer",
    )
    use_remote_indexer: bool = _setting(
        False,
        "ask a served indexer instead of keeping an index",
        flags=("--use-remote-indexer",),
        env=("DYN_USE_REMOTE_INDEXER",),
        needs="the served indexer",
    )
    router_durable_kv_events: bool = _setting(
        False,
        "read KV events from JetStream (deprecated in Dynamo)",
        flags=("--router-durable-kv-events",),
        env=("DYN_ROUTER_DURABLE_KV_EVENTS",),
        needs="the JetStream event plane",
    )
    router_reset_states: bool = _setting(
        False,
        "drop the router state kept in JetStream at start (0.9)",
        flags=("--router-reset-states",),
        env=("DYN_ROUTER_RESET_STATES",),
        needs="the JetStream event plane",
    )

    def __post_init__(self) -> None:
        for setting in SETTINGS.values() if _SETTINGS_READY else ():
            setting.check(getattr(self, setting.name))
        preferred = self.kv_transfer_domain is not None and (
            self.kv_transfer_enforcement == "preferred"
        )
        if preferred and self.kv_transfer_preferred_weight is None:
            raise ConfigError(
                "kv_transfer_preferred_weight: required when kv_transfer_enforcement is "
                "preferred; give --kv-transfer-preferred-weight 0..1"
            )

    def with_values(self, values: Mapping[str, Any]) -> RouterConfig:
        """A copy with ``values`` (by field name) checked and set; raises ConfigError."""
        unknown = sorted(set(values) - set(SETTINGS))
        if unknown:
            raise ConfigError(_unknown_setting(unknown[0]))
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


#: Field name -> its description, in declaration order.
SETTINGS: dict[str, Setting] = _describe()
_SETTINGS_READY = True

#: Preset name -> the defaults it changes. ``dynamo-1.6`` is what live deployments run;
#: ``dynamo-0.9`` follows the 0.9 guides (queue at 4.0, 503 on overload, size pruning).
PRESETS: dict[str, dict[str, Any]] = {
    "dynamo-1.6": {},
    "dynamo-0.9": {
        "router_queue_threshold": 4.0,
        "overload_status_code": 503,
        "router_max_tree_size": 2**20,
        "router_prune_target_ratio": 0.8,
    },
}
DEFAULT_PRESET = "dynamo-1.6"


def preset(name: str) -> RouterConfig:
    """The defaults called ``name``; raises ConfigError listing the presets."""
    if name not in PRESETS:
        raise ConfigError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return RouterConfig(**PRESETS[name])


def parse_assignments(
    config: RouterConfig, assignments: Iterable[str]
) -> tuple[RouterConfig, dict[str, Any]]:
    """``key=value`` texts applied to ``config``: the new config and what was set.

    Keys are field names, with ``-`` or ``_``, with or without the ``router_`` prefix. The 0.9
    ``overlap_score_weight`` sets prefill_load_scale, and the credit too when it is 0.
    """
    values: dict[str, Any] = {}
    for text in assignments:
        key, separator, raw = text.partition("=")
        if not separator:
            raise ConfigError(f"{text!r}: expected key=value, for example prefill_load_scale=1.5")
        name = key.strip().lower().lstrip("-").replace("-", "_")
        if name in ("overlap_score_weight", "kv_overlap_score_weight"):
            weight = SETTINGS["prefill_load_scale"].parse(raw)
            values |= legacy_overlap_weight(weight)
            continue
        candidates = (name, f"router_{name}", name.removeprefix("router_"))
        found = next((candidate for candidate in candidates if candidate in SETTINGS), None)
        if found is None:
            raise ConfigError(_unknown_setting(name))
        values[found] = SETTINGS[found].parse(raw)
    return config.with_values(values), values


def legacy_overlap_weight(weight: float) -> dict[str, float]:
    """What the 0.9 overlap score weight means today: 0 turns the cache term off altogether."""
    if weight == 0:
        return {"prefill_load_scale": 0.0, "overlap_score_credit": 0.0}
    return {"prefill_load_scale": weight}


def _unknown_setting(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, SETTINGS, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{name}: no such setting{hint} (`dynctl config show` lists them)"

"""Read the router settings in a worker's model card.

A frontend that finds ``router_config`` in a card uses it instead of its complete own configuration:
mode, kv router and thresholds. A missing key means Dynamo's default, not the frontend's setting.
Names as observed with Dynamo 1.6.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynctl.base.json_fields import describe
from router_core import SETTINGS, THRESHOLD_SETTINGS, ConfigError, legacy_overlap_weight

MAX_NAMED: Final = 40
"""The most settings that :class:`CardSettings` names one by one."""


@dataclass(frozen=True, slots=True)
class NotFollowed:
    """A setting of the card that this router does not follow: its path, its value, the reason."""

    setting: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.setting} {self.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class CardSettings:
    """``values``: by the names of dynctl, checked, ready for ``RouterConfig.with_values``.

    They contain every setting that a card decides, with Dynamo's default for a missing key. If the
    card's ``router_mode`` is not supported, it is missing: decisions cannot be predicted then. A
    setting that is read but not supported yet is both in ``values`` and in ``not_followed``.
    """

    values: Mapping[str, Any]
    not_followed: tuple[NotFollowed, ...] = ()


def read_router_config(card: Mapping[str, Any]) -> CardSettings:
    """The settings of a card's ``router_config``. Never raises: it names unusable settings."""
    reading = _SettingsReading()
    reading.mode(card.get("router_mode"))
    for name, value in _section(card, "kv_router_config", reading):
        reading.kv(name, value)
    for name, value in _section(card, "load_threshold_config", reading):
        if name in THRESHOLD_SETTINGS:
            reading.take(f"load_threshold_config.{name}", name, value)
        else:
            reading.other(f"load_threshold_config.{name}", name, value)
    for name, value in card.items():
        if name not in ("router_mode", "kv_router_config", "load_threshold_config"):
            reading.other(name, name, value)
    return CardSettings(reading.values, reading.not_followed())


#: Dynamo's mode -> the mode of dynctl; an unsupported mode has its planned name.
_MODES: Final = {
    "k_v": "kv",
    "round_robin": "round-robin",
    "random": "random",
    "least_loaded": "least-loaded",
    "power_of_two_choices": "power-of-two",
    "direct": "direct",
    "device_aware_weighted": "device-aware-weighted",
}
#: The supported keys of kv_router_config; dynctl uses the same names.
_KV: Final = (
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "decode_active_request_weight",
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "router_temperature",
    "use_kv_events",
    "router_replica_sync",
    "router_track_active_blocks",
    "router_track_output_blocks",
    "router_assume_kv_reuse",
    "router_track_prefill_tokens",
    "router_prefill_load_model",
    "router_ttl_secs",
    "router_approximate_cache_policy",
    "router_queue_threshold",
    "router_queue_policy",
    "router_predicted_ttl_secs",
    "use_remote_indexer",
    "serve_indexer",
    "conditional_disagg_enabled",
    "conditional_disagg_policy",
    "conditional_disagg_eff_isl_threshold",
    "conditional_disagg_eff_isl_ratio_threshold",
    "conditional_disagg_prefill_busy_threshold",
    "conditional_disagg_decode_busy_threshold",
)
#: Unsupported keys -> (values that change no decision, the effect of other values).
_UNSUPPORTED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "router_policy_config": ((None,), "a policy file replaces cost parameters and queues"),
    "shared_cache_type": ((None, "none"), "hits in a shared cache lower the cost"),
    "enforce_disagg": ((None, False), "requests are refused without a prefill worker"),
    "session_affinity_ttl_secs": (
        (None,),
        "requests of a session stay with their worker, which only the frontend knows",
    ),
    "router_tracking_hash": ((None, "public-xxh3-v1"), "active blocks have other hashes"),
}
#: Of these, what dynctl has for its own router; in a frontend of Dynamo it is not visible.
_VISIBLE_TO_IT: Final = frozenset({"session_affinity_ttl_secs"})
#: Setting -> (the value with which it has no effect, what of another value is not visible).
_INVISIBLE: Final[Mapping[str, tuple[Any, str]]] = {
    "use_kv_events": (True, "not built yet; what a frontend estimates is not visible"),
    "router_predicted_ttl_secs": (None, "what a frontend predicts is not visible"),
    "use_remote_indexer": (False, "the index of the frontend's indexer is not visible"),
}
#: Keys that never change a decision by themselves: internals of a router, and settings of a feature
#: that another key turns on.
_HARMLESS: Final = frozenset(
    {
        "router_event_threads",
        "skip_initial_worker_wait",
        "enable_session_prefix_index",
        "session_affinity_mode",
        "shared_cache_multiplier",
    }
)


class _SettingsReading:
    def __init__(self) -> None:
        #: A missing key means Dynamo's default.
        self.values: dict[str, Any] = {
            name: SETTINGS[name].default for name in (*_KV, *THRESHOLD_SETTINGS)
        }
        self._found: list[NotFollowed] = []

    def not_followed(self) -> tuple[NotFollowed, ...]:
        more = len(self._found) - MAX_NAMED
        if more <= 0:
            return tuple(self._found)
        rest = NotFollowed("...", "", f"and {more:,} more settings")
        return (*self._found[:MAX_NAMED], rest)

    def name(self, where: str, value: Any, reason: str) -> None:
        path = where if len(where) <= 80 else where[:80] + "..."
        self._found.append(NotFollowed(path, describe(value), reason))

    def mode(self, value: Any) -> None:
        mode = _MODES.get(value, value) if isinstance(value, str) else value
        try:
            self.values["router_mode"] = SETTINGS["router_mode"].check(mode)
        except ConfigError as error:
            self.name("router_mode", value, _reason(error))

    def kv(self, name: str, value: Any) -> None:
        where = f"kv_router_config.{name}"
        if name != "overlap_score_weight":
            if name in _KV:
                self.take(where, name, value)
            else:
                self.other(where, name, value)
        elif value is not None:
            # The old name of the scale; if both are set, the old name has precedence.
            try:
                weight = SETTINGS["prefill_load_scale"].check(value)
            except ConfigError as error:
                self.name(where, value, _reason(error))
            else:
                self.values |= legacy_overlap_weight(weight)

    def take(self, where: str, name: str, value: Any) -> None:
        """Read a setting that dynctl has under the same name."""
        setting = SETTINGS[name]
        if setting.choices and isinstance(value, str):
            value = value.replace("_", "-")
        try:
            checked = setting.check(value)
        except ConfigError as error:
            self.name(where, value, _reason(error))
            return
        self.values[name] = checked
        usual, effect = _INVISIBLE.get(name, (checked, ""))
        if checked != usual:
            self.name(where, value, effect)
        elif checked != setting.default and not setting.is_built(checked):
            self.name(where, value, f"needs {setting.needs}, not built yet; {setting.without}")

    def other(self, where: str, name: str, value: Any) -> None:
        """Report a setting that dynctl does not have."""
        if name in _HARMLESS:
            return
        if name in _UNSUPPORTED:
            harmless, effect = _UNSUPPORTED[name]
            if value not in harmless:
                why = "" if name in _VISIBLE_TO_IT else "not built yet; "
                self.name(where, value, f"{why}in Dynamo {effect}")
        else:
            self.name(where, value, "unknown setting with an unknown effect")


def _section(
    card: Mapping[str, Any], name: str, reading: _SettingsReading
) -> Iterator[tuple[str, Any]]:
    section = card.get(name)
    if section is None:
        return
    if not isinstance(section, Mapping):
        reading.name(name, section, "expected an object")
        return
    # The old weight comes after the scale that it overrides.
    yield from sorted(section.items(), key=lambda item: item[0] == "overlap_score_weight")


def _reason(error: ConfigError) -> str:
    return str(error).partition(": ")[2] or str(error)

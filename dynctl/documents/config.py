"""The settings of a router: `GET /v1/config` and `dynctl config`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.documents.advice import ModelAdvice
from dynctl.settings.router_options import ROUTER_OPTIONS
from router_core import SETTINGS, RouterConfig

SCHEMA = 1


#: Source of a setting that a live router has and does not export.
NOT_EXPORTED = "not exported"


class ConfigValue(msgspec.Struct, frozen=True):
    """One setting: its value and where that came from. ``known`` False: the router has a value and
    does not export it; ``value`` is None then.
    """

    name: str
    value: Any
    source: str
    help: str = ""
    built: bool = True
    known: bool = True


class ConfigDocument(msgspec.Struct, frozen=True):
    """The settings in force, and the busy thresholds of each model that has its own.

    ``serving``: the options of the process that steer routing and are not settings of the router.
    ``prefill_load``: the prefill load model in sentences, absent without one.
    """

    version: str
    preset: str | None
    settings: list[ConfigValue]
    thresholds: dict[str, dict[str, float | int | None]] = {}
    prefill_load: list[str] | UnsetType = UNSET
    serving: list[ConfigValue] = []
    kind: str = "RouterConfig"
    schema: int = SCHEMA

    @property
    def values(self) -> dict[str, Any]:
        """Setting name -> value."""
        return {row.name: row.value for row in self.settings}


class SettingRow(msgspec.Struct, frozen=True):
    """One setting: its value, where that came from, what it may be and how it is set.

    ``known``: as in ConfigValue. ``aliases``: its other flags and variables.
    """

    name: str
    value: Any
    source: str
    default: Any
    bounds: str
    flag: str
    env: str
    help: str
    built: bool = True
    known: bool = True
    aliases: list[str] = []


class ConfigReport(msgspec.Struct, frozen=True):
    """The answer of `config show`. ``prefill_load``: the prefill load model in sentences, absent
    without one. ``serving``: the other options of `serve` that steer routing. ``advice``: only with
    --advise."""

    source: str
    preset: str | None
    settings: list[SettingRow]
    warnings: list[str] = []
    prefill_load: list[str] | UnsetType = UNSET
    serving: list[SettingRow] = []
    advice: list[ModelAdvice] | UnsetType = UNSET
    kind: str = "RouterConfig"
    schema: int = SCHEMA


def config_document(
    config: RouterConfig,
    *,
    version: str,
    preset: str | None,
    sources: Mapping[str, str],
    started: RouterConfig | None = None,
    thresholds: Mapping[str, Mapping[str, float | int | None]] | None = None,
    unknown: Container[str] = (),
    prefill_load: list[str] | UnsetType = UNSET,
    serving: Iterable[ConfigValue] = (),
) -> ConfigDocument:
    """The settings of ``config``, and where each value comes from.

    ``sources``: the sources at start. A value that differs from ``started`` was set while running.
    ``unknown``: the settings whose values a live router does not export. ``serving``: as in
    ConfigDocument.
    """
    rows = []
    for name, setting in SETTINGS.items():
        text = ROUTER_OPTIONS[name].help
        if name in unknown:
            rows.append(
                ConfigValue(name, None, NOT_EXPORTED, text, setting.has_effect, known=False)
            )
            continue
        value = getattr(config, name)
        source = sources.get(name, "default")
        if started is not None and value != getattr(started, name):
            source = "set while running"
        rows.append(ConfigValue(name, value, source, text, setting.has_effect))
    own = {model: dict(values) for model, values in (thresholds or {}).items()}
    return ConfigDocument(version, preset, rows, own, prefill_load, list(serving))

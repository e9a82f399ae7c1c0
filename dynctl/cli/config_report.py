"""The settings of a router as the rows of a report."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec

from dynctl.documents.config import ConfigDocument, ConfigReport, SettingRow
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.settings.router_settings import (
    BYPASS_FIELDS,
    BYPASS_FLAG,
    BYPASS_VARIABLE,
    MISMATCH_FLAG,
    MISMATCH_VARIABLE,
    bounds,
)
from router_core import PRESETS, SETTINGS


def remote_report(
    title: str, document: ConfigDocument, steering: Sequence[SettingRow] = ()
) -> ConfigReport:
    """The settings of a router. ``steering``: the options whose values may follow them."""
    sources = {row.name: row.source for row in document.settings}
    unknown = {row.name for row in document.settings if not row.known}
    rows = setting_rows(document.values, sources, document.preset, unknown)
    options = {row.name: row for row in steering}
    serving = [
        msgspec.structs.replace(options[row.name], value=row.value, source=row.source)
        for row in document.serving
        if row.name in options
    ]
    return ConfigReport(
        title, document.preset, rows, prefill_load=document.prefill_load, serving=serving
    )


def setting_rows(
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    preset: str | None,
    unknown: Container[str] = (),
) -> list[SettingRow]:
    """One row for each setting that has a value. ``unknown``: those whose value is a default."""
    defaults = PRESETS.get(preset or "", {})
    return [
        SettingRow(
            name=name,
            value=values[name],
            source=sources[name],
            default=defaults.get(name, setting.default),
            bounds=bounds(setting),
            flag=ROUTER_OPTIONS[name].flags[0],
            env=ROUTER_OPTIONS[name].variable,
            help=ROUTER_OPTIONS[name].help,
            built=setting.has_effect,
            known=name not in unknown,
            aliases=_aliases(name),
        )
        for name, setting in SETTINGS.items()
        if name in values
    ]


def _aliases(name: str) -> list[str]:
    """The other flags and variables of a setting."""
    option = ROUTER_OPTIONS[name]
    aliases = [*option.flags[1:], *option.env[1:]]
    if name == "kv_transfer_enforcement":
        aliases += [MISMATCH_FLAG, MISMATCH_VARIABLE]
    if name in BYPASS_FIELDS.values():
        aliases += [BYPASS_FLAG, BYPASS_VARIABLE]
    return aliases

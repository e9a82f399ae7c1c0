"""The tables of docs/operations/settings.md, made from the router settings themselves."""

from __future__ import annotations

from collections.abc import Iterator

from dynctl.screens.config import setting_text
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.settings.router_settings import bounds
from router_core import DEFAULT_PRESET, PRESETS, SETTINGS, Setting


def settings_tables() -> str:
    """What has an effect, then what is only read."""
    built = [setting for setting in SETTINGS.values() if setting.has_effect]
    unbuilt = [setting for setting in SETTINGS.values() if not setting.has_effect]
    lines = [
        *_table(built),
        "",
        "Read, checked and without effect, since the feature is not built:",
    ]
    lines += ["", *_table(unbuilt, "belongs to")]
    return "\n".join(lines) + "\n"


def _table(settings: list[Setting], belongs: str = "") -> Iterator[str]:
    headings = ["setting", "default", "flag", "variable", "meaning"]
    headings[4:4] = [belongs] if belongs else ["bounds"]
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for setting in settings:
        variable = ROUTER_OPTIONS[setting.name].variable
        cells = [
            f"`{setting.name}`",
            _defaults(setting),
            _flag(setting),
            f"`{variable}`" if variable else "-",
            setting.needs if belongs else bounds(setting),
            ROUTER_OPTIONS[setting.name].help,
        ]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _defaults(setting: Setting) -> str:
    """The default, and that of each preset that has another."""
    shown = setting_text(setting.default)
    assert not PRESETS[DEFAULT_PRESET]
    for name, values in PRESETS.items():
        if values.get(setting.name, setting.default) != setting.default:
            shown += f" (`{name}`: {setting_text(values[setting.name])})"
    return shown


def _flag(setting: Setting) -> str:
    flag = ROUTER_OPTIONS[setting.name].flags[0]
    return f"`{flag}`, `--no-{flag.removeprefix('--')}`" if setting.type is bool else f"`{flag}`"

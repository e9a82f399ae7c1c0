"""The router's flags, made from ``ROUTER_OPTIONS`` and ``router_core.SETTINGS``."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from dynctl.cli.help import NOT_SUPPORTED, OLDER_NAMES
from dynctl.cli.option_groups import only_given
from dynctl.settings.router_options import ROUTER_OPTIONS, RouterOption
from dynctl.settings.router_settings import (
    BYPASS_FLAG,
    MISMATCH_FLAG,
    PRESET_FLAG,
    bounds,
    spellings,
)
from router_core import PRESETS, SETTINGS, Setting

PANEL = "Router settings"
POLICY_PANEL = "KV-transfer policy (for workers that publish none)"
BUSY_PANEL = "Busy thresholds"
QUEUE_PANEL = "Router queue"
BYPASS_PANEL = "Conditional disaggregation"
#: How help pages name a value of each type.
_METAVARS = {int: "N", float: "X", str: "TEXT", bool: ""}


def split_preset(flags: Mapping[str, str | bool]) -> tuple[dict[str, str | bool], str | None]:
    """The settings among the given flags, and the preset."""
    rest = {flag: value for flag, value in flags.items() if flag != PRESET_FLAG}
    name = flags.get(PRESET_FLAG)
    return rest, None if name is None else str(name)


def _flags() -> Iterator[tuple[str, Any]]:
    yield (
        PRESET_FLAG,
        Annotated[
            str | None,
            typer.Option(
                PRESET_FLAG,
                metavar="|".join(PRESETS),
                help="Defaults of this router. [default: dynamo-1.6]",
                rich_help_panel=PANEL,
            ),
        ],
    )
    for setting in SETTINGS.values():
        for spelling in spellings(setting.name):
            if spelling.kind == "flag":
                yield spelling.text, _annotation(setting, spelling.text, spelling.deprecated)
        if setting.name == "kv_transfer_enforcement":
            yield (
                MISMATCH_FLAG,
                Annotated[
                    str | None,
                    typer.Option(
                        MISMATCH_FLAG,
                        metavar="fail|fallback",
                        help="Alias of --kv-transfer-enforcement: fail means required.",
                        rich_help_panel=POLICY_PANEL,
                    ),
                ],
            )

        if setting.name == "conditional_disagg_enabled":
            yield (
                BYPASS_FLAG,
                Annotated[
                    str | None,
                    typer.Option(
                        BYPASS_FLAG,
                        metavar="JSON",
                        help="The settings of this panel as Dynamo's JSON object, without the "
                        "prefix of their names.",
                        rich_help_panel=BYPASS_PANEL,
                    ),
                ],
            )


def _annotation(setting: Setting, flag: str, deprecated: bool) -> Any:
    panel = PANEL if setting.has_effect else NOT_SUPPORTED
    if setting.name.startswith("kv_transfer"):
        panel = POLICY_PANEL
    if setting.name.endswith(("_threshold", "_threshold_frac")) and setting.has_effect:
        panel = BUSY_PANEL
    if setting.name.startswith(("router_queue", "router_policy_config")):
        panel = QUEUE_PANEL
    if setting.name.startswith("conditional_disagg"):
        panel = BYPASS_PANEL
    option = ROUTER_OPTIONS[setting.name]
    names = [flag]
    kind: Any = str
    metavar: str | None = "|".join(setting.choices) or option.metavar or _METAVARS[setting.type]
    if setting.type is bool:
        names = [f"{flag}/--no-{flag.removeprefix('--')}"]
        kind, metavar = bool, None
    if deprecated:
        return Annotated[kind | None, _older(names, flag, option, metavar)]
    default = setting.default
    shown = "none" if default is None else str(default).lower() if kind is bool else default
    limits = "" if setting.choices or kind is bool or not _has_bounds(setting) else bounds(setting)
    extra = "; ".join(text for text in (limits, f"default: {shown}", option.variable) if text)
    annotation = typer.Option(
        *names,
        metavar=metavar,
        help=f"{option.help[0].upper()}{option.help[1:]}. [{extra}]",
        rich_help_panel=panel,
        show_default=False,
    )
    return Annotated[kind | None, annotation]


def _older(names: list[str], flag: str, option: RouterOption, metavar: str | None) -> Any:
    """The option of an older name, which help pages list under the current one."""
    place = option.flags.index(flag)
    variable = option.env[place] if place < len(option.env) else ""
    return typer.Option(
        *names,
        metavar=metavar,
        help=f"Older name of {option.flags[0]}." + (f" [{variable}]" if variable else ""),
        rich_help_panel=OLDER_NAMES,
        show_default=False,
    )


def _has_bounds(setting: Setting) -> bool:
    return setting.low is not None or setting.high is not None


_FLAGS = {f"router_flag_{number}": flag for number, flag in enumerate(_flags())}

#: The router's flags; a command receives the given ones as a mapping of flags as spelled, with
#: ``--preset``.
ROUTER_FLAGS = only_given(
    {name: annotation for name, (_, annotation) in _FLAGS.items()},
    {name: flag for name, (flag, _) in _FLAGS.items()},
)

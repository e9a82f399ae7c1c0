"""The router's flags, made from ``ROUTER_OPTIONS`` and ``router_core.SETTINGS``."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from dynctl.cli.help import NOT_SUPPORTED
from dynctl.settings.router_options import ROUTER_OPTIONS
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
_PREFIX = "router_flag_"


def with_router_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the router's flags to a command; it receives the given ones as ``router_flags``.

    The mapping's keys are the flags as spelled, including ``--preset``.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    own = [parameter for parameter in own if parameter.name != "router_flags"]
    names = {_PREFIX + str(index): item for index, item in enumerate(_flags())}

    def command(*positional: Any, **arguments: Any) -> Any:
        given: dict[str, str | bool] = {}
        for name, (flag, _) in names.items():
            value = arguments.pop(name)
            if value is not None:
                given[flag] = value
        return function(*positional, router_flags=given, **arguments)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, (_, annotation) in names.items()
    ]
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__module__ = function.__module__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


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
                metavar="NAME",
                help=f"Defaults of {' or '.join(PRESETS)}. [default: dynamo-1.6]",
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
    panel = PANEL if setting.built else NOT_SUPPORTED
    if setting.name.startswith("kv_transfer"):
        panel = POLICY_PANEL
    if setting.name.endswith(("_threshold", "_threshold_frac")) and setting.built:
        panel = BUSY_PANEL
    if setting.name.startswith(("router_queue", "router_policy_config")):
        panel = QUEUE_PANEL
    if setting.name.startswith("conditional_disagg"):
        panel = BYPASS_PANEL
    option = ROUTER_OPTIONS[setting.name]
    names = [flag]
    kind: Any = str
    metavar: str | None = "|".join(setting.choices) or setting.type.__name__.upper()
    if setting.type is bool:
        names = [f"{flag}/--no-{flag.removeprefix('--')}"]
        kind, metavar = bool, None
    default = setting.default
    shown = "none" if default is None else str(default).lower() if kind is bool else default
    limits = "" if setting.choices or kind is bool or not _bounded(setting) else bounds(setting)
    extra = "; ".join(text for text in (limits, f"default: {shown}", option.env[0]) if text)
    annotation = typer.Option(
        *names,
        metavar=metavar,
        hidden=deprecated,
        help=f"{option.help[0].upper()}{option.help[1:]}. [{extra}]",
        rich_help_panel=panel,
        show_default=False,
    )
    return Annotated[kind | None, annotation]


def _bounded(setting: Setting) -> bool:
    return setting.low is not None or setting.high is not None

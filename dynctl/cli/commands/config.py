"""`dynctl config show`."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.option_groups import with_options
from dynctl.cli.router_flags import ROUTER_FLAGS, split_preset

if TYPE_CHECKING:
    from dynctl.documents.config import ConfigDocument, ConfigReport, SettingRow
    from dynctl.sources.source import Source
    from dynctl.wire.dynamo.frontend_metrics import Lengths

#: Decisions of each frontend on which advice is tried.
_TRIED = 50


@with_options(router_flags=ROUTER_FLAGS)
def show_config(
    options: GlobalOptions,
    *,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise", help="Show values that fit the lengths of the requests of a live frontend."
        ),
    ] = False,
    router_flags: Mapping[str, str | bool],
) -> int:
    """Show every router setting: value, source, bounds, flag and environment variable.

    With --frontend or --view: the settings of that router. Otherwise: the settings that
    `serve frontend` would use with these flags and this environment.
    """
    from dynctl.base.errors import UsageProblem
    from dynctl.screens.render import emit, talk
    from dynctl.settings.contexts.precedence import VARIABLE, apply_context
    from dynctl.sources import connect, names_source

    if names_source(options):
        if router_flags:
            raise UsageProblem(
                f"{next(iter(router_flags))} is for a frontend to start; "
                "remove it to see the settings of a running frontend"
            )
        source = connect(options)
        report = remote_report(source.title, source.config())
        if advise:
            report = _advised(report, source.lengths(), source)
    else:
        if os.environ.get(VARIABLE):
            apply_context(options)  # raises UsageProblem for an unknown context
        report = _local(router_flags)
        if advise:
            report = _advised(report, None, None)
    for warning in report.warnings:
        talk(f"warning: {warning}")
    emit(report, options)
    return 0


def _advised(
    report: ConfigReport, lengths: Mapping[str, Lengths] | None, source: Source | None
) -> ConfigReport:
    import msgspec

    from dynctl.documents.advice import advise, tried

    values = {row.name: row.value for row in report.settings if row.known}
    advice = advise(lengths, values)
    if source is not None and any(one.settings for one in advice):
        decisions = source.recent_decisions(_TRIED)
        rows = source.workers(index=False) if decisions else []
        blocks = {row.name: row.runtime_config.get("total_kv_blocks") or 0 for row in rows}
        advice = [tried(one, decisions, blocks) for one in advice]
    return msgspec.structs.replace(report, advice=advice)


def _local(router_flags: Mapping[str, str | bool]) -> ConfigReport:
    from msgspec import UNSET

    from dynctl.documents.config import ConfigReport
    from dynctl.settings.router_settings import resolve

    flags, preset = split_preset(router_flags)
    resolved = resolve(flags, os.environ, preset_name=preset)
    model = None
    if resolved.config.router_prefill_load_model != "none":
        from dynctl.planning.prefill_load import prefill_model

        model = prefill_model(resolved.config)
    if resolved.config.router_kv_transfer_qos is not None:
        from dynctl.serving.transfer_file import configured_table

        configured_table(resolved.config)  # raises UsageProblem for a wrong file
    values = {name: getattr(resolved.config, name) for name in resolved.sources}
    return ConfigReport(
        source="flags, environment and preset of this command",
        preset=resolved.preset,
        settings=_rows(values, resolved.sources, resolved.preset),
        warnings=list(resolved.warnings),
        prefill_load=UNSET if model is None else model.describe(),
    )


def remote_report(title: str, document: ConfigDocument) -> ConfigReport:
    """The settings of a router."""
    from dynctl.documents.config import ConfigReport

    sources = {row.name: row.source for row in document.settings}
    unknown = {row.name for row in document.settings if not row.known}
    rows = _rows(document.values, sources, document.preset, unknown)
    return ConfigReport(title, document.preset, rows, prefill_load=document.prefill_load)


def _rows(
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    preset: str | None,
    unknown: Container[str] = (),
) -> list[SettingRow]:
    from dynctl.documents.config import SettingRow
    from dynctl.settings.router_options import ROUTER_OPTIONS
    from dynctl.settings.router_settings import bounds
    from router_core import PRESETS, SETTINGS

    defaults = PRESETS.get(preset or "", {})
    return [
        SettingRow(
            name=name,
            value=values[name],
            source=sources[name],
            default=defaults.get(name, setting.default),
            bounds=bounds(setting),
            flag=ROUTER_OPTIONS[name].flags[0],
            env=ROUTER_OPTIONS[name].env[0],
            help=ROUTER_OPTIONS[name].help,
            built=setting.built,
            known=name not in unknown,
        )
        for name, setting in SETTINGS.items()
        if name in values
    ]

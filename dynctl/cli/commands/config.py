"""`dynctl config show`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.base import backends
from dynctl.base.options import GlobalOptions
from dynctl.cli.access_options import AccessOptions, health_of, index_peers, replicas_of
from dynctl.cli.commands.serve import DYNAMO, DynamoOptions
from dynctl.cli.option_groups import fields_of, with_options
from dynctl.cli.router_flags import ROUTER_FLAGS, split_preset
from dynctl.cli.serving_options import STEERING, ServingOptions
from dynctl.cli.shared_options import memory_of, one_choice

if TYPE_CHECKING:
    from dynctl.documents.config import ConfigReport, SettingRow
    from dynctl.sources.source import Source
    from dynctl.wire.dynamo.frontend_metrics import Lengths

#: Decisions of each frontend on which advice is tried.
_TRIED = 50
_OF_DYNAMO = ("namespace_prefix", "event_plane", "migration_limit", "migration_max_seq_len")


@with_options(
    dynamo=fields_of(DynamoOptions, only=_OF_DYNAMO, panel=DYNAMO),
    router_flags=ROUTER_FLAGS,
    serving=STEERING[0],
    access=STEERING[1],
)
def show_config(
    options: GlobalOptions,
    context: typer.Context,
    *,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise", help="Show values that fit the lengths of the requests of a live frontend."
        ),
    ] = False,
    dynamo: DynamoOptions,
    serving: ServingOptions,
    access: AccessOptions,
    router_flags: Mapping[str, str | bool],
) -> int:
    """Show every router setting: value, source, bounds, flag and environment variable.

    Below them: the other options of `serve frontend` that steer routing.

    With --frontend or --view: the settings of that router. Otherwise: the settings that
    `serve frontend` would use with these flags and this environment.
    """
    from dynctl.base.errors import UsageProblem
    from dynctl.screens.render import emit, talk
    from dynctl.settings.contexts.precedence import VARIABLE, apply_context
    from dynctl.sources.connect import connect, names_source

    if names_source(options):
        typed = [*router_flags, *(row.flag for row in _steering(context) if _is_typed(row))]
        if typed:
            raise UsageProblem(
                f"{typed[0]} is for a frontend to start; "
                "remove it to see the settings of a running frontend"
            )
        source = connect(options)
        from dynctl.cli.config_report import remote_report

        report = remote_report(source.title, source.config(), _steering(context))
        if advise:
            report = _with_advice(report, source.lengths(), source)
    else:
        if os.environ.get(VARIABLE):
            apply_context(options)  # raises UsageProblem for an unknown context
        one_choice("--event-plane", dynamo.event_plane or "zmq", ("zmq", "nats"))
        report = _local(router_flags, _steering(context))
        _check(serving, access, report)
        if advise:
            report = _with_advice(report, None, None)
    for warning in report.warnings:
        talk(f"warning: {warning}")
    emit(report, options)
    return 0


def _with_advice(
    report: ConfigReport, lengths: Mapping[str, Lengths] | None, source: Source | None
) -> ConfigReport:
    import msgspec

    from dynctl.documents.advice import advise, try_advice

    values = {row.name: row.value for row in report.settings if row.known}
    advice = advise(lengths, values)
    if source is not None and any(model.settings for model in advice):
        decisions = source.recent_decisions(_TRIED)
        rows = source.workers(index=False) if decisions else []
        blocks = {row.name: row.runtime_config.get("total_kv_blocks") or 0 for row in rows}
        advice = [try_advice(model, decisions, blocks) for model in advice]
    return msgspec.structs.replace(report, advice=advice)


def _steering(context: typer.Context) -> list[SettingRow]:
    """The options of this command that steer routing and are not settings of the router."""
    from dynctl.documents.config import SettingRow

    names = {name for group in STEERING for name in group.options} | set(_OF_DYNAMO)
    rows = []
    for parameter in context.command.params:
        if parameter.name not in names:
            continue
        option: Any = parameter
        variable = option.envvar or ""
        source = context.get_parameter_source(option.name)
        kind = "default" if source is None else source.name
        given = {"COMMANDLINE": f"flag {option.opts[0]}", "ENVIRONMENT": f"env {variable}"}
        bounded = option if hasattr(option, "min") else option.type  # by the version of Typer
        limits = [getattr(bounded, side, None) for side in ("min", "max")]
        low, high = ("" if limit is None else f"{limit:g}" for limit in limits)
        value = context.params[option.name]
        rows.append(
            SettingRow(
                name=option.opts[0].removeprefix("--").replace("-", "_"),
                value=list(value) if isinstance(value, tuple) else value,
                source=given.get(kind, "default"),
                default=option.default,
                bounds=f"{option.metavar} {low}..{high}" if low or high else option.metavar or "",
                flag=option.opts[0],
                env=variable,
                help=(option.help or "").rstrip("."),
            )
        )
    return rows


def _check(serving: ServingOptions, access: AccessOptions, report: ConfigReport) -> None:
    """Raise UsageProblem for values with which `serve frontend` would not start."""
    memory_of("--index-memory", serving.index_memory)
    index_peers(access.index_peer)
    health_of(access)
    values = {row.name: row.value for row in report.settings}
    replicas_of(access, values["router_replica_sync"])


def _is_typed(row: SettingRow) -> bool:
    return row.source.startswith("flag ")


def _local(router_flags: Mapping[str, str | bool], steering: list[SettingRow]) -> ConfigReport:
    from msgspec import UNSET

    from dynctl.cli.config_report import setting_rows
    from dynctl.documents.config import ConfigReport
    from dynctl.settings.router_settings import needs_dynamo, resolve

    flags, preset = split_preset(router_flags)
    resolved = resolve(flags, os.environ, preset_name=preset)
    warnings = list(resolved.warnings)
    if not any(os.environ.get(name) for name in backends.VARIABLES):
        warnings += needs_dynamo(resolved)
    model = None
    if resolved.config.router_prefill_load_model != "none":
        from dynctl.planning.prefill_load import prefill_model

        model = prefill_model(resolved.config, resolved.sources)
    if resolved.config.router_kv_transfer_qos is not None:
        from dynctl.serving.routing.transfer_file import configured_table

        configured_table(resolved.config)  # raises UsageProblem for a wrong file
    values = {name: getattr(resolved.config, name) for name in resolved.sources}
    return ConfigReport(
        source="flags, environment and preset of this command",
        preset=resolved.preset,
        settings=setting_rows(values, resolved.sources, resolved.preset),
        serving=steering,
        warnings=warnings,
        prefill_load=UNSET if model is None else model.describe(),
    )

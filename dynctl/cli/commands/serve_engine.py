"""`dynctl serve engine`: the options come from the simulated engine's option table."""

from typing import Annotated, Any

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.option_groups import only_given, with_options
from dynctl.cli.shared_options import read_as, worker_environment
from dynctl.simulation.engine.config import OPTIONS, Option, build_config, without_effect

_FAULTS = "Simulated failures"


def _key(option: Option) -> str:
    return "engine_" + option.flag.removeprefix("--").replace("-", "_")


def _annotation(option: Option) -> Any:
    kind: Any = option.type
    names = [option.flag]
    metavar: str | None = "|".join(option.choices) or option.metavar
    if kind is bool:
        names = [f"{option.flag}/--no-{option.flag.removeprefix('--')}"]
        metavar = None
    elif kind is tuple:
        kind = list[str]
    shown = ",".join(option.default) if isinstance(option.default, tuple) else option.default
    default = "" if shown in ("", None) else f"default: {str(shown).lower()}; "
    typed = typer.Option(
        *names,
        **read_as(option, metavar),
        help=f"{option.help} [{default}{option.env}]",
        show_default=False,
        rich_help_panel=_FAULTS if option.fault else None,
    )
    return Annotated[kind | None, typed]


_GIVEN = only_given(
    {_key(option): _annotation(option) for option in OPTIONS},
    {_key(option): option.flag.removeprefix("--") for option in OPTIONS},
)


@with_options(given=_GIVEN)
def engine(options: GlobalOptions, given: dict[str, Any]) -> int:
    """Run a simulated OpenAI engine: real tokens, cache and KV events, no GPU.

    Reads DYN_TOPOLOGY_* and DYN_KV_TRANSFER_* from the environment, as a worker does.
    """
    from dataclasses import replace

    from dynctl.base.worker_environment import TopologyEnvironmentError
    from dynctl.screens.render import talk
    from dynctl.simulation.engine.process import run_engine

    config = build_config(given)
    for warning in without_effect(config, given):
        talk(f"warning: {warning}")
    try:
        topology = worker_environment()
    except TopologyEnvironmentError as error:
        # A worker does not start without its topology; its exit code is 1.
        talk(f"error: {error}")
        return 1
    if topology is not None:
        config = replace(config, **topology.fields())
    return run_engine(config)

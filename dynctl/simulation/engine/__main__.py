"""`python -m dynctl.simulation.engine`: one simulated engine process.

`dynctl serve engine` starts the same engine; this entry point imports neither typer nor rich, so
that a fleet of engines needs little memory.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from dynctl.base.worker_environment import TopologyEnvironmentError, read_worker_environment
from dynctl.simulation.engine.config import OPTIONS, EngineConfigError, Option, build_config
from dynctl.simulation.engine.process import run_engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, read the worker environment, serve. Exit code 0, 1 (topology), 2 (options) or 130."""
    parser = _parser()
    given = {
        name.replace("_", "-"): value
        for name, value in vars(parser.parse_args(arguments)).items()
        if value is not None
    }
    try:
        config = build_config(given)
        topology = read_worker_environment(
            os.environ, now=time.monotonic, sleep=time.sleep, log=_log
        )
        if topology is not None:
            config = replace(config, **topology.fields())
        return run_engine(config)
    except TopologyEnvironmentError as error:
        _log(logging.ERROR, str(error))
        return 1
    except EngineConfigError as error:
        _log(logging.ERROR, str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dynctl.simulation.engine",
        description="A simulated OpenAI-compatible engine. DYN_TOPOLOGY_* and DYN_KV_TRANSFER_* "
        "are read from the environment.",
        allow_abbrev=False,
    )
    for option in OPTIONS:
        _add(parser, option)
    return parser


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    shown = ",".join(option.default) if isinstance(option.default, tuple) else option.default
    default = f" [default: {shown}]" if shown not in ("", False) else ""
    help_text = option.help.replace("%", "%%") + default
    if option.type is bool:
        parser.add_argument(
            option.flag, action=argparse.BooleanOptionalAction, default=None, help=help_text
        )
    elif option.type is tuple:
        parser.add_argument(
            option.flag, action="append", default=None, metavar=option.metavar, help=help_text
        )
    else:
        parser.add_argument(
            option.flag,
            type=option.type,
            default=None,
            choices=option.choices or None,
            metavar=None if option.choices else option.metavar,
            help=help_text,
        )


def _log(level: int, line: str) -> None:
    sys.stderr.write(f"{logging.getLevelName(level)} {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

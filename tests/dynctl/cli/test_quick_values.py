"""The short way gives what Typer gives, and Typer's converters are not loaded for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperCommand

from dynctl.cli.help import PlainCommand
from tests.waiting import patience


class Color(StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"


Reads = Callable[[Sequence[str]], Any]


def reader(cls: type[TyperCommand]) -> Reads:
    """Arguments -> what a command of this class is called with, or the error."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    got: dict[str, Any] = {}

    @app.command(cls=cls)
    def command(
        text: Annotated[str | None, typer.Option()] = None,
        color: Annotated[Color | None, typer.Option()] = None,
        whole: Annotated[int, typer.Option(min=1, max=9)] = 5,
        number: Annotated[float | None, typer.Option(min=0.5)] = None,
        path: Annotated[Path | None, typer.Option()] = None,
        there: Annotated[Path | None, typer.Option(exists=True)] = None,
        several: Annotated[list[str] | None, typer.Option()] = None,
        numbers: Annotated[list[int] | None, typer.Option()] = None,
        switch: Annotated[bool | None, typer.Option("--on/--off")] = None,
        word: Annotated[str, typer.Argument()] = "default",
        rest: Annotated[list[str] | None, typer.Argument()] = None,
    ) -> None:
        got.update(locals())

    def read(arguments: Sequence[str]) -> Any:
        got.clear()
        try:
            typer.main.get_command(app).main(list(arguments), "x", standalone_mode=False)
        except Exception as error:
            return type(error).__name__, str(error)
        return {name: (type(value), value) for name, value in got.items() if name != "got"}

    return read


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--text a --color dark-blue --whole 3 --number 1.5 --path a/../b --several a --several b",
        "--text= --path -",
        "--color DARK-BLUE",
        "--color green",
        "--whole 0",
        "--whole 10",
        "--whole 3.0",
        "--whole +3",
        "--whole x",
        "--number 0.4",
        "--number 1e3",
        "--number -1",
        "--number nan",
        "--number 2",
        "--there /nowhere",
        "--there /",
        "--numbers 1 --numbers 2",
        "--numbers x",
        "--on a b c",
        "--off",
        "--nonsense",
        "--text",
    ],
)
def test_values_and_errors_are_those_of_typer(line: str):
    assert reader(PlainCommand)(line.split()) == reader(TyperCommand)(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "workers list --demo -o name --timeout 3 --role decode",
        "--frontend http://127.0.0.1:1 --view x route hi",
        "context add x --file-kv y -A",
        "explain DYR0101 --help",
    ],
)
def test_an_ordinary_line_loads_no_converter(line: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("DYNCTL_CONFIG", str(tmp_path / "c.toml"))
    code = (
        "import sys; from dynctl.cli.app import run; run(sys.argv[1:]); "
        "sys.exit('pydantic' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, *line.split()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stderr

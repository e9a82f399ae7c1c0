"""One way to run a command line in this process, and to see all that it said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dynctl.cli.app import run
from tests.kube.command_line import unwrapped


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def dynctl(capsys: pytest.CaptureFixture[str]) -> Run:
    """``dynctl("route", "--demo", "hi")`` -> exit code, stdout, stderr."""

    def runs(*arguments: object) -> Ran:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, unwrapped(captured.err))

    return runs

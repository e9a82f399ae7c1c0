"""Run a command line in this process and parse its output, for tests on a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def unwrapped(text: str) -> str:
    """Messages with the lines joined that were wrapped at the terminal's width."""
    return re.sub(r"\n {6,7}(?=\S)", " ", text)


@dataclass(frozen=True, slots=True)
class Ran:
    """``code`` is the exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on stdout."""
        return json.loads(self.out)

    @property
    def checks(self) -> dict[str, Any]:
        """Code -> check, of a report in JSON."""
        return {check["code"]: check for part in self.json["sections"] for check in part["checks"]}

    @property
    def reported(self) -> set[str]:
        """The codes of what fails or warns."""
        return {code for code, one in self.checks.items() if one["state"] in ("fail", "warn")}

    def values(self, code: str) -> dict[str, str]:
        """Subject -> what was found, of one check."""
        return {one["subject"]: one["value"] for one in self.checks[code]["findings"]}

    @property
    def error(self) -> tuple[str, str]:
        """What stderr says and nothing else: the error, and its hint in one line."""
        first, *hint = self.err.splitlines()
        assert self.out == ""
        assert first.startswith("error: ")
        return first.removeprefix("error: "), " ".join(line.strip() for line in hint)


Run = Callable[..., Ran]
"""Arguments of the command line; ``width`` is that of the terminal."""

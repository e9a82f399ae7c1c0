"""The JSON file of a soak run, and the panels of its plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.soak.plot import Series

#: The run of docs/reliability.md.
RESULT: Final = Path(__file__).with_name("result.json")
#: Seconds between two samples.
SAMPLE_S: Final = 5.0
_SCALES: Final = {"memory": ("MB", 1e6), "requests": ("a second", SAMPLE_S)}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a line for each part, so that long series take no page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in result.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def series(result: Mapping[str, Any]) -> list[Series]:
    """The panels of the plot."""
    panels = []
    for name, values in result["samples"].items():
        unit, scale = _SCALES.get(name.partition(" ")[0], ("", 1.0))
        if name != "minutes":
            panels.append(Series(name, unit, [value / scale for value in values]))
    return panels

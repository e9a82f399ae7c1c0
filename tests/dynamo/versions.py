"""What differs between versions of Dynamo for a fleet on loopback, and what a run has found."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.waiting import patience

FIRST_WITHOUT_NATS = (1, 2)
"""Older mock workers do not start without a NATS server."""
LAST_WITH_DURABLE_EVENTS = (1, 3)
"""Later versions have no option for KV events in NATS JetStream."""
RESULTS = Path(__file__).resolve().parent / "compatibility"
"""One file for each version that was tried: ``VERSION.json``."""


@functools.cache
def version_of(python: str) -> str:
    """The version of ai-dynamo that a Python has. Raises OSError or SubprocessError."""
    asked = "from importlib.metadata import version; print(version('ai-dynamo'))"
    done = subprocess.run(
        [python, "-c", asked], capture_output=True, text=True, timeout=patience(60), check=True
    )
    return done.stdout.strip()


def minor(version: str) -> tuple[int, int]:
    """``1.7.0.dev20261026`` is (1, 7)."""
    major, second, *_ = version.split(".")
    return int(major), int(second)


def older_environment(version: str, directory: Path, model: str, files: Path) -> dict[str, str]:
    """The variables that this version needs beside those of the newest.

    Up to 1.5 the response address is an interface. Up to 1.3 a worker registers ``hf://MODEL``,
    which the frontend reads from the cache of Hugging Face: ``directory`` gets one.
    """
    found: dict[str, str] = {}
    if minor(version) < (1, 6):
        found["DYN_TCP_RESPONSE_STREAM_HOST"] = "lo"
    if minor(version) < (1, 4):
        cache = directory / "hub"
        kept = cache / f"models--{model.replace('/', '--')}"
        (kept / "snapshots" / "0").mkdir(parents=True)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text("0")
        for file in files.iterdir():
            (kept / "snapshots" / "0" / file.name).symlink_to(file)
        found |= {"HF_HOME": str(directory), "HF_HUB_CACHE": str(cache)}
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """``right`` of ``of`` were as predicted or read. ``note``: what else is to know about it."""

    right: int
    of: int
    note: str = ""


def recorded() -> Mapping[str, Mapping[str, Row]]:
    """Version -> feature -> row, newest version first."""
    found = {}
    for path in RESULTS.glob("*.json"):
        read = json.loads(path.read_text())
        found[read["version"]] = {name: Row(**row) for name, row in read["rows"].items()}
    return dict(sorted(found.items(), key=lambda one: minor(one[0]), reverse=True))


def record(version: str, name: str, row: Row) -> None:
    """Write one row of a version, and keep its others."""
    RESULTS.mkdir(exist_ok=True)
    rows = {**recorded().get(version, {}), name: row}
    body = {"version": version, "rows": {key: asdict(rows[key]) for key in sorted(rows)}}
    (RESULTS / f"{version}.json").write_text(json.dumps(body, indent=1) + "\n")

"""What the person said that concerns every command: where to look, and how to answer."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class OutputFormat(StrEnum):
    """How an answer is written; all of them render the same value."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """``timeout`` is in seconds; at most one of ``frontend``, ``view`` and ``demo`` is set."""

    frontend: tuple[str, ...] = ()
    view: Path | None = None
    demo: bool = False
    output: OutputFormat = OutputFormat.TABLE
    timeout: float = 10.0
    token: str | None = None
    no_color: bool = False
    debug: bool = False

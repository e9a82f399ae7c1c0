"""What a Dynamo worker's log says of topology when it starts (1.6.1, and texts of 1.2 on).

The line of success is Python's repr of the configuration::

    Topology config: TopologyConfig(topology_domains={'zone': 'a'}, kv_transfer_domain='zone',
    kv_transfer_enforcement='required', kv_transfer_preferred_weight=None) (from /etc/..)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_CONFIG: Final = re.compile(r"Topology config: TopologyConfig\((?P<fields>.*?)\)(?: \(from |$)")
_ENABLED: Final = "DYN_TOPOLOGY_ENABLED is set"
_TIMED_OUT: Final = "was not populated within"
_NOT_PERSISTED: Final = "Failed to persist metadata"
_LONGEST: Final = 300
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
"""Dynamo colours its log in pods, too."""


@dataclass(frozen=True, slots=True)
class StartLines:
    """``config``: the fields of the configuration, None without such a line.

    ``timed_out``, ``not_persisted``: the last line that says so, without its time and target and
    shortened; empty without one.
    """

    config: Mapping[str, Any] | None = None
    timed_out: str = ""
    not_persisted: str = ""


def read_start_log(lines: Iterable[str]) -> StartLines:
    """The last of each kind of line counts: one log may hold several starts."""
    config: Mapping[str, Any] | None = None
    timed_out = not_persisted = ""
    for line in lines:
        if (found := _CONFIG.search(line)) is not None:
            config = _fields(found["fields"]) or config
        elif _TIMED_OUT in line:
            timed_out = _message(line, _ENABLED if _ENABLED in line else _TIMED_OUT)
        elif _NOT_PERSISTED in line:
            not_persisted = _message(line, _NOT_PERSISTED)
    return StartLines(config, timed_out, not_persisted)


def _message(line: str, start: str) -> str:
    """What the line says from these words on, where the refusal of a server may be long."""
    return _COLOUR.sub("", line[line.index(start) :]).strip()[:_LONGEST]


def _fields(text: str) -> dict[str, Any] | None:
    """``a='x', b={'y': 'z'}`` as a mapping; None where it is no such thing."""
    if len(text) > 16_384:
        return None
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call):
            return None
        return {
            word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None
        }
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None

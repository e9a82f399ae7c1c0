"""Read topology lines from the start of a Dynamo worker's log (1.6.1, and texts since 1.2).

The line of success has Python's repr of the configuration::

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
"""Dynamo writes colours in pods, too."""


@dataclass(frozen=True, slots=True)
class StartLines:
    """The topology lines of a log.

    ``config``: the fields of the configuration, None if there is no such line. ``timed_out``,
    ``not_persisted``: the last such line, shortened, without its time and target; empty if there
    is none.
    """

    config: Mapping[str, Any] | None = None
    timed_out: str = ""
    not_persisted: str = ""


def read_start_log(lines: Iterable[str]) -> StartLines:
    """The last line of each kind: a log may contain several starts."""
    config: Mapping[str, Any] | None = None
    timed_out = not_persisted = ""
    for line in lines:
        if (match := _CONFIG.search(line)) is not None:
            config = _fields(match["fields"]) or config
        elif _TIMED_OUT in line:
            timed_out = _message(line, _ENABLED if _ENABLED in line else _TIMED_OUT)
        elif _NOT_PERSISTED in line:
            not_persisted = _message(line, _NOT_PERSISTED)
    return StartLines(config, timed_out, not_persisted)


def _message(line: str, start: str) -> str:
    """The line from ``start`` on, shortened: a server's refusal may be long."""
    return _COLOUR.sub("", line[line.index(start) :]).strip()[:_LONGEST]


def _fields(text: str) -> dict[str, Any] | None:
    """``a='x', b={'y': 'z'}`` as a mapping; None for any other text."""
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

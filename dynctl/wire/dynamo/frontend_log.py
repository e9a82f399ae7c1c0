"""Read routing decisions from the log of a Dynamo frontend: selected workers and refusals.

::

    <time>  INFO dynamo_kv_router::scheduling::selector: Selected worker router_mode="kv"
      request_id="4aec.." worker_id=2324035517153284967 worker_type=prefill dp_rank=0 logit=26.5625
      effective_cached_blocks=0.0 host_pinned_blocks=0 disk_blocks=0 total_kv_blocks=Some(128)
    <time>  WARN dynamo_kv_router::scheduling::queue: scheduling failed: no endpoints available ..

Both as observed with Dynamo 1.6.1. A dynctl frontend writes the same lines; with the preset
``dynamo-0.9`` it writes that release's line, which has no request id. The form of JSON lines
(``DYN_LOGGING_JSONL``) is modelled: the same fields beside ``message``, or below ``fields``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from dynctl.base.json_fields import U32_MAX, U64_MAX

#: Longer log lines are ignored.
MAX_LINE: Final = 64 * 1024

_SELECTED: Final = "Selected worker"
_FAILED: Final = "scheduling failed:"
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_FIELD: Final = re.compile(r'\b([a-z_]+)=(?:"([^"]*)"|([^\s",]+))')
_OLD_FIELD: Final = re.compile(r"\b(logit|cached blocks): ([0-9.]+)")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?")
_LONGEST: Final = 256


@dataclass(frozen=True, slots=True)
class SelectedLine:
    """The selected worker of a hop. ``worker_type``: prefill, or decode (also if aggregated).

    ``request_id`` is empty if the line has none. ``at``: seconds since the epoch, None if the line
    has no time. ``logit`` is the cost of the worker in blocks.
    """

    request_id: str
    worker_id: int
    dp_rank: int
    worker_type: str
    logit: float | None
    cached_blocks: float | None
    at: float | None


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A request that no worker could serve; ``request_id`` as above."""

    request_id: str
    message: str
    at: float | None


def read_line(line: str) -> SelectedLine | RefusedLine | None:
    """The routing decision in a line; None for any other line."""
    if len(line) > MAX_LINE or (_SELECTED not in line and _FAILED not in line):
        return None
    line = _COLOURS.sub("", line).strip()
    fields, message, at = _json(line) if line.startswith("{") else _text(line)
    request = str(fields.get("request_id", ""))[:_LONGEST]
    if _FAILED in message:
        reason = message.partition(_FAILED)[2].strip()
        return RefusedLine(request, reason[:_LONGEST], at) if reason else None
    worker, rank = _whole(fields.get("worker_id"), U64_MAX), _whole(fields.get("dp_rank"), U32_MAX)
    if _SELECTED not in message or worker is None:
        return None
    return SelectedLine(
        request,
        worker,
        rank or 0,
        str(fields.get("worker_type", ""))[:_LONGEST],
        _number(fields.get("logit")),
        _number(fields.get("effective_cached_blocks", fields.get("cached blocks"))),
        at,
    )


def _text(line: str) -> tuple[Mapping[str, Any], str, float | None]:
    fields = {name: quoted or bare for name, quoted, bare in _FIELD.findall(line)}
    fields |= dict(_OLD_FIELD.findall(line))
    match = _TIME.search(line[:64])
    return fields, line, _seconds(match[0]) if match is not None else None


def _json(line: str) -> tuple[Mapping[str, Any], str, float | None]:
    try:
        document = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}, "", None
    if not isinstance(document, dict):
        return {}, "", None
    inner = document.get("fields")
    fields = {**document, **inner} if isinstance(inner, dict) else document
    message, at = fields.get("message"), fields.get("time", fields.get("timestamp"))
    return fields, message if isinstance(message, str) else "", _seconds(at)


def _seconds(text: object) -> float | None:
    """An RFC 3339 time as seconds since the epoch; one without a zone is UTC, as Dynamo logs."""
    if not isinstance(text, str):
        return None
    # Python reads at most six digits of a second.
    text = re.sub(r"(\.\d{6})\d+", r"\1", text.strip())
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _whole(value: object, high: int) -> int | None:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= high):
        return None
    return int(text)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if number == number and abs(number) != float("inf") else None

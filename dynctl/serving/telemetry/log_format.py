"""Formats of log lines: text for people, one JSON object per line for machines.

Both escape control characters, because messages quote request ids, model names and taints that
clients choose: a client must not be able to forge a log line.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from functools import partial
from typing import TextIO

from dynctl.base.terminal import escaped

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

#: Loggers of dynctl, and of the libraries that report unhandled errors: a line in another format
#: would break log parsers.
LOGGERS = ("dynctl", "asyncio", "aiohttp")

#: Attributes of a record that become fields of its line, in this order.
FIELDS = ("decision", "request_id", "stage", "worker", "outcome", "code")

#: Attribute of a record with the name of its process; logging has an id in `process`.
_PROCESS = "dynctl_process"

#: Longest message; the rest is cut, so that a request cannot fill a disk.
MAX_MESSAGE = 8_192


class TextFormatter(logging.Formatter):
    """``2026-11-21T09:03:47.421300Z  INFO dynctl.decisions{decision=4aec}: message``."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = [f"{name}={_plain(value)}" for name, value in fields_of(record).items()]
        span = "{" + " ".join(pairs) + "}" if pairs else ""
        level = record.levelname.replace("WARNING", "WARN")
        head = f"{timestamp(record.created)} {level:>5} {record.name}{span}: "
        return head + _message(record) + _traceback(self, record)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, target, message, then the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "target": record.name,
            "message": _message(record),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(
    log_format: str = "text",
    level: str = "info",
    stream: TextIO | None = None,
    *,
    process: str | None = None,
) -> logging.Handler:
    """Send the logs of dynctl, and its libraries' warnings, to ``stream`` (stderr by default).

    ``process``, if given, is a field of each line.
    Returns the handler. Raises ValueError naming the choices. Another call replaces the
    handler.
    """
    if log_format not in FORMATS:
        raise ValueError(f"log format: expected one of {', '.join(FORMATS)}, got {log_format!r}")
    if level.lower() not in LEVELS:
        raise ValueError(f"log level: expected one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    if process is not None:
        handler.addFilter(partial(_add_process, process))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for old in list(logger.handlers):
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger(LOGGERS[0]).setLevel(level.upper())
    return handler


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields of :data:`FIELDS` that the record has from ``extra``."""
    fields = [(name, getattr(record, name, None)) for name in FIELDS]
    fields.insert(0, ("process", getattr(record, _PROCESS, None)))
    return {name: value for name, value in fields if value is not None}


def _add_process(process: str, record: logging.LogRecord) -> bool:
    setattr(record, _PROCESS, process)
    return True


def timestamp(seconds: float) -> str:
    """Wall-clock seconds as RFC 3339 in UTC with microseconds."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}... ({len(text):,} characters)"
    return escaped(text)


def _plain(value: object) -> str:
    text = escaped(str(value))
    return json.dumps(text, ensure_ascii=False) if re.search(r'[\s"{}=]', text) else text


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_info:
        return ""
    # Indented: a line break in an error's text is not a line of its own.
    lines = formatter.formatException(record.exc_info).split("\n")
    return "".join(f"\n  {escaped(line)}" for line in lines)

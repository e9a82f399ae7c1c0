"""The only writer to stdout: one result in, one of seven formats out.

Tables are for people (and fit their terminal); the others carry raw values. Off a terminal a list
is as wide as it needs to be, so that a pipe never sees a shortened name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from dynctl.base.errors import ReaderLeft, UsageProblem
from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.screens import registry as screens
from dynctl.screens.canvas import Canvas

#: What could move a cursor, hide text or turn its direction, but for what Canvas itself writes.
_UNSAFE: Final = re.compile(
    r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]"
    r"|\x1b(?!\[[012]m)"
)


def emit(
    result: Any, options: GlobalOptions, *, screen: Callable[[Any, Canvas], str] | None = None
) -> None:
    """Write ``result`` as the options ask; ``screen`` draws it instead of its usual table."""
    output = options.output
    if output is OutputFormat.JSON:
        text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
    elif output is OutputFormat.JSONL:
        text = "".join(msgspec.json.encode(i).decode() + "\n" for i in screens.items(result))
    elif output is OutputFormat.YAML:
        text = yaml_text(result)
    elif output is OutputFormat.NAME:
        text = _shown("".join(name + "\n" for name in screens.names(result)))
    elif output is OutputFormat.JUNIT:
        text = _junit(result)
    else:
        draw = screen or screens.draw
        text = _shown(draw(result, Canvas.of(options)))
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderLeft from None


def _shown(text: str) -> str:
    """``text`` as a terminal may have it: it quotes files, cards and labels of strangers."""
    return _UNSAFE.sub("?", text)


def _junit(result: Any) -> str:
    from dynctl.findings.report import Report
    from dynctl.screens.junit import junit

    if not isinstance(result, Report):
        raise UsageProblem(
            "-o junit: only checks are written as junit; this command's answer holds none",
            "-o json",
        )
    return junit(result)


def talk(message: str) -> None:
    """A line for the person, on stderr: never part of the answer."""
    sys.stderr.write(message + "\n")


def doubted(doubts: Iterable[str]) -> None:
    """What an answer about workers could not know, on stderr."""
    for doubt in doubts:
        talk(f"note: {doubt}")


def yaml_text(result: Any) -> str:
    """``result`` as one YAML document, keys in their own order."""
    import yaml

    plain = msgspec.to_builtins(result)
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))

"""What a client's error means: found by its status, its code or its literal text.

``dynctl explain 503`` and ``dynctl explain "Failed to generate completions"`` show these entries,
which are read from ``client_errors.toml``.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from dynctl.findings.report import ClientError, Runbook

#: Characters of a pasted text that are read; the rest says nothing more.
MAX_TEXT: Final = 16 * 1024
#: Fewer characters of a text would be found everywhere.
_SHORTEST: Final = 8
_PLAIN_STATUS: Final = re.compile(r"[1-5]\d\d")
_STATUS: Final = re.compile(
    r"(?:HTTP/[\d.]+\"?|\bstatus(?:[ _]?code)?|\bcode|\bHTTP)\W{0,4}([45]\d\d)\b", re.IGNORECASE
)
_CODE: Final = re.compile(r"""["']code["']\s*:\s*["']([A-Za-z_]{3,64})["']""")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: list[ClientError]


@cache
def client_errors() -> tuple[ClientError, ...]:
    """All entries, in the order of the file. Read and validated at the first use."""
    data = Path(__file__).with_name("client_errors.toml").read_bytes()
    return tuple(msgspec.toml.decode(data, type=_File).error)


def runbook(question: str) -> Runbook | None:
    """The entries for ``question``: a status, an error code, or a text that contains one of them.

    A code in the body counts before a text, and a text before the status. None if nothing in
    ``question`` is known.
    """
    question = question[:MAX_TEXT].strip()
    status = _status(question)
    for candidates in (_with_code(question), _with_text(question)):
        of_status = [error for error in candidates if status in error.status]
        if candidates:
            return Runbook(question, status, of_status or candidates)
    errors = [error for error in client_errors() if status in error.status]
    return Runbook(question, status, errors) if errors else None


def near(question: str) -> list[str]:
    """Known texts that are similar to ``question``."""
    texts = {text.lower(): text for error in client_errors() for text in error.texts}
    close = get_close_matches(question[:200].lower(), list(texts), n=3, cutoff=0.5)
    return [texts[text] for text in close]


def _status(question: str) -> int | None:
    match = _PLAIN_STATUS.fullmatch(question) or _STATUS.search(question)
    if match is None:
        return None
    return int(match[match.lastindex or 0])


def _with_code(question: str) -> list[ClientError]:
    match = _CODE.search(question)
    code = question if match is None else match[1]
    return [error for error in client_errors() if code in error.codes and not code.isdigit()]


def _with_text(question: str) -> list[ClientError]:
    words = _plain(question)
    return [error for error in client_errors() if any(_shows(text, words) for text in error.texts)]


def _shows(text: str, question: str) -> bool:
    """Whether ``question`` contains ``text``, where ``*`` is any value; or is a part of it."""
    known = _plain(text)
    if len(question) >= _SHORTEST and question in known:
        return True
    parts = [re.escape(part) for part in known.split("*")]
    return re.search(".{1,300}?".join(parts), question) is not None


def _plain(text: str) -> str:
    """Lower case, one space between words, and without the escapes of JSON."""
    return " ".join(text.replace('\\"', '"').replace("\\n", " ").lower().split())

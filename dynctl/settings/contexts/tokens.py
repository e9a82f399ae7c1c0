"""Where a token is: named by variable or by file, read when it is needed, never shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions

_LARGEST_BYTES: Final = 64 << 10
#: What may stand in a header.
_TOKEN: Final = re.compile(rb"[!-~]+")


def read_token(options: GlobalOptions) -> str | None:
    """The token that the options hold or name; None where they name none.

    Raises UsageProblem naming variable or file, never what is in it.
    """
    ways = {
        "--token": options.token,
        "--token-env": options.token_env,
        "--token-file": options.token_file,
    }
    given = [flag for flag, value in ways.items() if value is not None]
    if len(given) > 1:
        raise UsageProblem(f"{' and '.join(given)}: expected one of them")
    if options.token is not None:
        return options.token
    if options.token_env is not None:
        told = os.environ.get(options.token_env, "")
        return _checked(os.fsencode(told), f"--token-env {options.token_env}: this variable")
    if options.token_file is not None:
        return _checked(_content(options.token_file), f"--token-file {options.token_file}: this")
    return None


def _content(path: Path) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            return file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise UsageProblem(f"--token-file {path}: {error.strerror or error}") from None


def _checked(data: bytes, what: str) -> str:
    text = data.strip()
    if not text:
        raise UsageProblem(f"{what} holds no token")
    if len(text) > _LARGEST_BYTES or not _TOKEN.fullmatch(text):
        raise UsageProblem(f"{what} holds no token: expected one word of visible ASCII characters")
    return text.decode("ascii")

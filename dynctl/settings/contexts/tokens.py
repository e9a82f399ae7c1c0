"""Read the token that the options name by variable or by file. It is never shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from dynctl.base.errors import UsageProblem, file_problem
from dynctl.base.files import read_file
from dynctl.base.options import GlobalOptions
from dynctl.settings.contexts.precedence import in_context

TOKEN_VARIABLE: Final = "DYNCTL_TOKEN"  # noqa: S105  the name of a variable
_LARGEST_BYTES: Final = 64 << 10
#: The characters that an HTTP header may contain.
_TOKEN: Final = re.compile(rb"[!-~]+")


def bearer_token(options: GlobalOptions) -> str | None:
    """The token for frontends: of the options, the context, or $DYNCTL_TOKEN.

    Raises UsageProblem where its file or variable is missing.
    """
    return read_token(in_context(options)) or os.environ.get(TOKEN_VARIABLE) or None


def read_token(options: GlobalOptions) -> str | None:
    """The token of the options, None if they have none.

    Raises UsageProblem with the variable or the file, never with its content.
    """
    ways = {
        "--token": options.token,
        "--token-env": options.token_env,
        "--token-file": options.token_file,
    }
    flags = [flag for flag, value in ways.items() if value is not None]
    if len(flags) > 1:
        raise UsageProblem(f"{' and '.join(flags)}: expected one of them")
    if options.token is not None:
        return options.token
    if options.token_env is not None:
        value = os.environ.get(options.token_env, "")
        return _checked_token(os.fsencode(value), f"--token-env {options.token_env}: this variable")
    if options.token_file is not None:
        return _checked_token(
            _content(options.token_file), f"--token-file {options.token_file}: this file"
        )
    return None


def _content(path: Path) -> bytes:
    try:
        return read_file(path.expanduser(), _LARGEST_BYTES)
    except OSError as error:
        raise UsageProblem(f"--token-file {path}: {file_problem(error)}") from None


def _checked_token(data: bytes, what: str) -> str:
    text = data.strip()
    if not text:
        raise UsageProblem(f"{what} contains no token")
    if len(text) > _LARGEST_BYTES or not _TOKEN.fullmatch(text):
        raise UsageProblem(
            f"{what} contains no token: expected one word of visible ASCII characters"
        )
    return text.decode("ascii")

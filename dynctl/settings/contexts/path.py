"""The path of the contexts file. A module of its own: completing names imports nothing else."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "DYNCTL_CONFIG"
LARGEST_BYTES: Final = 1 << 20
CURRENT: Final = "current"
TABLE: Final = "contexts"


def config_file() -> str:
    """$DYNCTL_CONFIG, else the file in the user's configuration directory; it may not exist."""
    path = os.environ.get(VARIABLE, "")
    if path:
        return os.path.expanduser(path)
    # The XDG specification ignores relative paths.
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = base if base.startswith("/") else os.path.expanduser("~/.config")
    return os.path.join(folder, "dynctl", "config.toml")

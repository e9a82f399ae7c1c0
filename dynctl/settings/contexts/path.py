"""Where the file of the contexts is. Apart, so that completion of names loads nothing else."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "DYNCTL_CONFIG"
LARGEST_BYTES: Final = 1 << 20
CURRENT: Final = "current"
TABLE: Final = "contexts"


def config_place() -> str:
    """The file, whether it is there or not: $DYNCTL_CONFIG, else below the user's configuration."""
    told = os.environ.get(VARIABLE, "")
    if told:
        return os.path.expanduser(told)
    # What the specification says of relative ones: ignore them.
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = base if base.startswith("/") else os.path.expanduser("~/.config")
    return os.path.join(folder, "dynctl", "config.toml")

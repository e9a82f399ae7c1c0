"""Read the names of a kubeconfig's contexts, without a Kubernetes client.

For hints and completion: a file that cannot be read has no names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dynctl.base.yaml_reader import read_yaml_file

_LARGEST_BYTES: Final = 4 << 20
_MOST_FILES: Final = 32


def kube_context_names(kubeconfig: Path | None = None) -> list[str]:
    """Names in the order of the files that kubectl would read, each once."""
    return list(dict.fromkeys(name for path in _files(kubeconfig) for name in _names(path)))


def _files(kubeconfig: Path | None) -> list[Path]:
    if kubeconfig is not None:
        return [kubeconfig.expanduser()]
    paths = [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return [Path(part).expanduser() for part in (paths or ["~/.kube/config"])[:_MOST_FILES]]


def _names(path: Path) -> Iterator[str]:
    try:
        document = read_yaml_file(path, most_bytes=_LARGEST_BYTES, strict=False)
    except (OSError, ValueError):
        return
    entries = document.get("contexts") if isinstance(document, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str):
            yield name

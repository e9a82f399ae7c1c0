"""The topology mount of one worker, read where we run: ``verify --path DIR`` inside a pod."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Final

from dynctl.base.errors import Unreachable
from dynctl.verify.facts import MountFacts, TopologyFile
from dynctl.verify.gather.pods import MOST_BYTES, topology_file

_MOST_FILES: Final = 256


def read_mount(path: Path, domain: str) -> MountFacts:
    """Every visible regular file; symlinks are followed, as the Downward API lays them out.

    Raises Unreachable for a directory that is there and cannot be read.
    """
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in islice(entries, _MOST_FILES)]
        files = {
            name: _file(path / name)
            for name in sorted(names)
            if not name.startswith(".") and (path / name).is_file()
        }
    except FileNotFoundError:
        return MountFacts(str(path), domain, {}, absent="there is no such directory")
    except NotADirectoryError:
        return MountFacts(str(path), domain, {}, absent="that is no directory")
    except OSError as error:
        raise Unreachable(f"--path {path}: cannot be read: {error.strerror}") from error
    if domain and domain not in files:
        files[domain] = TopologyFile(None)
    return MountFacts(str(path), domain, files)


def _file(path: Path) -> TopologyFile:
    try:
        with path.open("rb") as stream:
            return topology_file(stream.read(MOST_BYTES + 1))
    except OSError as error:
        return TopologyFile("", f"cannot be read: {error.strerror}")

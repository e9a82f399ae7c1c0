"""A Downward API volume as the kubelet writes it: dated directories behind one `..data` link.

Each update makes a new dated directory and swaps `..data` to it, so that a reader sees either all
old or all new values; the visible names are links through `..data` that never change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


class DownwardApiVolume:
    def __init__(self, mount: Path, items: Mapping[str, str]) -> None:
        """``items``: file name -> label key, as in the volume's items."""
        self.mount = mount
        self._items = dict(items)
        self._writes = 0
        mount.mkdir(parents=True, exist_ok=True)

    def write(self, labels: Mapping[str, str]) -> None:
        """Project the pod's labels; a label that the pod lacks is an empty file."""
        self._writes += 1
        dated = self.mount / f"..2026_11_21_12_00_00.{self._writes:010d}"
        dated.mkdir()
        for path, key in self._items.items():
            (dated / path).write_text(labels.get(key, ""))
        link = self.mount / "..data_tmp"
        link.symlink_to(dated.name)
        os.replace(link, self.mount / "..data")
        for path in self._items:
            visible = self.mount / path
            if not visible.is_symlink():
                visible.symlink_to(f"..data/{path}")

"""The process in a pod's main container: waits for its topology, then serves, or exits.

Modelled on Dynamo 1.6.1 (waits 30 s, then exits 1 after about 31.5 s in all; reads once).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.kube.objects import Json, logs

PATIENCE_S = 30.0
_GONE_AFTER_S = 31.5


class State(StrEnum):
    """``EXITED`` comes with an exit code."""

    WAITING = "waiting"
    SERVING = "serving"
    EXITED = "exited"


class Process:
    """One run. ``root`` is the container's file system, ``env`` its plain variables.

    ``config``: what it read of topology once it serves, as fields of a card's runtime_config; None
    where it is not enabled. ``registered``: it has tried to publish itself; ``refused``: in vain.
    Then its health, which is that of its endpoint, never comes.
    """

    def __init__(self, root: Path, env: Mapping[str, str], started: float, *, worker: bool) -> None:
        self.started = started
        self.state = State.WAITING
        self.since = started
        self.exit_code = 0
        self.config: Json | None = None
        self.registered = not worker
        self.refused = False
        self.log = logs.head(started) if worker else ""
        self._env = env
        self._domain = env.get("DYN_KV_TRANSFER_DOMAIN", "")
        self._mount = env.get("DYN_TOPOLOGY_MOUNT_PATH") or "/etc/dynamo/topology"
        self._files = root / self._mount.lstrip("/")
        on = worker and env.get("DYN_TOPOLOGY_ENABLED", "").lower() in ("true", "1", "on", "yes")
        if not on:
            self._serve(started)
        elif not self._domain:
            self.log += logs.no_domain(started)
            self.exit(started, 1)
        else:
            self.look(started)

    @property
    def due(self) -> float | None:
        """When it gives up, where it waits."""
        return self.started + _GONE_AFTER_S if self.state is State.WAITING else None

    def look(self, now: float) -> bool:
        """Look at the files (again); whether that changed anything."""
        if self.state is not State.WAITING:
            return False
        patient = now <= self.started + PATIENCE_S
        domains = self._read() if patient else {}
        if self._domain in domains:
            self._wait(now)
            self.config = self._configured(domains)
            self.log += logs.configured(now, self.config, self._mount)
            self._serve(now)
            return True
        if now < self.started + _GONE_AFTER_S:
            return False
        self._wait(self.started + PATIENCE_S)
        self.log += logs.timed_out(self.started + PATIENCE_S, self._domain, self._mount)
        self.exit(now, 1)
        return True

    def _configured(self, domains: Mapping[str, str]) -> dict[str, Any]:
        weight = self._env.get("DYN_KV_TRANSFER_PREFERRED_WEIGHT")
        found: dict[str, Any] = {
            "topology_domains": dict(domains),
            "kv_transfer_domain": self._domain,
            "kv_transfer_enforcement": self._env.get("DYN_KV_TRANSFER_ENFORCEMENT") or "required",
        }
        if weight is not None:
            found["kv_transfer_preferred_weight"] = float(weight)
        return found

    def _read(self) -> dict[str, str]:
        """Every visible file with content, symlinks followed."""
        if not self._files.is_dir():
            return {}
        texts = {
            path.name: path.read_text().strip()
            for path in sorted(self._files.iterdir())
            if not path.name.startswith(".") and path.is_file()
        }
        return {name: text for name, text in texts.items() if text}

    def _wait(self, until: float) -> None:
        for second in range(min(30, math.ceil(until - self.started))):
            self.log += logs.waiting(
                self.started + second, self._domain, self._mount, int(PATIENCE_S) - second
            )

    def _serve(self, now: float) -> None:
        self.state, self.since = State.SERVING, now

    def exit(self, now: float, code: int) -> None:
        """The process has ended, by itself or by a signal."""
        self.state, self.since, self.exit_code = State.EXITED, now, code

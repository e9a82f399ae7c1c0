"""A moment of a living cluster at which other clusters begin: to bring one about takes longer than
most tests that use it."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kube.actors.acting import Hands
from tests.kube.actors.kubelet import Kubelet
from tests.kube.api_server import ApiServer

if TYPE_CHECKING:
    from tests.kube.actors.simulation import Simulation


class Moment:
    """The objects with their past, the files and logs of pods, and what the actors remember.

    Frontends are not part of it: they start again from the objects.
    """

    def __init__(self, sim: Simulation) -> None:
        self._now = sim.clock.now
        self._server = sim.server.kept()
        self._files = io.BytesIO()
        with tarfile.open(fileobj=self._files, mode="w") as archive:
            archive.add(sim.root, ".")
        memory = io.BytesIO()
        _Writer(memory, sim.root).dump([_remembered(actor) for actor in sim.remembering])
        self._memory = memory.getvalue()

    def begin(self, sim: Simulation) -> None:
        """Bring a new cluster, with the same definitions, to this moment."""
        sim.clock.to(self._now)
        self._files.seek(0)
        with tarfile.open(fileobj=self._files) as archive:
            archive.extractall(sim.root, filter="fully_trusted")
        for actor, memory in zip(
            sim.remembering, _Reader(io.BytesIO(self._memory), sim.root).load(), strict=True
        ):
            vars(actor).update(memory)
        sim.server.begin(self._server)
        for box in sim.kubelet.sandboxes.values():
            sim.kubelet.open_files(box)
        sim.frontends.step()


def _remembered(actor: object) -> dict[str, Any]:
    """What an actor has of its own; the functions are those of every actor."""
    return {
        name: value
        for name, value in vars(actor).items()
        if not isinstance(value, (Hands, ApiServer, Kubelet)) and not callable(value)
    }


class _Writer(pickle.Pickler):
    """Paths below ``root`` are written from there."""

    def __init__(self, file: io.BytesIO, root: Path) -> None:
        super().__init__(file)
        self._root = root

    def persistent_id(self, value: object) -> str | None:
        if isinstance(value, Path) and value.is_relative_to(self._root):
            return str(value.relative_to(self._root))
        return None


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, root: Path) -> None:
        super().__init__(file)
        self._root = root

    def persistent_load(self, path: str) -> Path:
        return self._root / path

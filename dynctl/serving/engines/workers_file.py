"""``--workers-file``: the fleet as YAML, read again when it changes.

::

    workers:
      - url: http://127.0.0.1:8001
        name: prefill-a0
        role: prefill
        zone: zone-a
      - {url: "http://127.0.0.1:8002", name: decode-a0, role: decode, domains: {zone: zone-a}}
"""

import asyncio
import logging
from pathlib import Path

from dynctl.base.errors import file_problem
from dynctl.base.yaml_reader import YamlError, YamlTooLarge, read_yaml_file
from dynctl.health import conditions as codes
from dynctl.serving.engines.fleet import Fleet, FleetFull
from dynctl.serving.engines.worker_spec import WorkerSpec, WorkerSpecError, worker_spec
from dynctl.serving.routing.service import RoutingService

_MAX_BYTES = 4 * 1024 * 1024

_log = logging.getLogger(__name__)


class WorkersFileError(WorkerSpecError):
    """An invalid workers file; the message has the file, the entry and what was expected."""


def read_workers_file(path: Path) -> list[WorkerSpec]:
    """The specs in a file; raises WorkersFileError."""
    try:
        document = read_yaml_file(path, most_bytes=_MAX_BYTES)
    except OSError as error:
        raise WorkersFileError(f"{path}: {file_problem(error)}") from None
    except YamlTooLarge as error:
        raise WorkersFileError(f"{path}: {error}") from None
    except YamlError as error:
        raise WorkersFileError(f"{path}: invalid YAML: {error}") from None
    rows = document
    if isinstance(document, dict):
        rows = document.get("workers") if document else []
    if not isinstance(rows, list):
        raise WorkersFileError(f"{path}: expected a list of workers, or `workers:` with one")
    specs: dict[str, WorkerSpec] = {}
    for number, row in enumerate(rows):
        where = f"{path}: workers[{number}]"
        spec = _spec_of(row, where)
        if spec.name in specs:
            raise WorkersFileError(f"{where}: the name {spec.name!r} occurs twice; set name=")
        specs[spec.name] = spec
    return list(specs.values())


def _spec_of(row: object, where: str) -> WorkerSpec:
    if not isinstance(row, dict):
        raise WorkersFileError(f"{where}: expected keys and values, at least url")
    try:
        return worker_spec(row, where=where)
    except WorkerSpecError as error:
        raise WorkersFileError(str(error)) from None


class WorkersFile:
    """Applies the file to the fleet when it changes; an invalid file is a condition."""

    def __init__(
        self, path: Path, fleet: Fleet, service: RoutingService, poll_s: float = 1.0
    ) -> None:
        self._path = path
        self._fleet = fleet
        self._service = service
        self._poll_s = poll_s
        self._seen: tuple[int, int, int] | None = None

    async def load(self) -> None:
        """Read it now; raises WorkersFileError (at start an invalid file is an error)."""
        self._seen = self._stamp()
        await self._take(read_workers_file(self._path))

    async def run(self) -> None:
        """Read it again whenever it changed, until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            stamp = self._stamp()
            if stamp == self._seen:
                continue
            subject = str(self._path)
            try:
                self._expect_no_pipe()
                await self._take(read_workers_file(self._path))
            except WorkersFileError as error:
                message = f"the fleet is unchanged: {error}"
                self._service.set_condition(codes.WORKERS_FILE_INVALID, subject, message)
            else:
                self._service.clear_condition(codes.WORKERS_FILE_INVALID, subject)
            # Only now: after an unexpected error the restarted task reads this file again.
            self._seen = stamp

    def _expect_no_pipe(self) -> None:
        """The event loop does not wait for a pipe; at the start one is read."""
        if self._path.is_fifo():
            raise WorkersFileError(f"{self._path}: is a pipe; expected a file")

    async def _take(self, specs: list[WorkerSpec]) -> None:
        wanted = {spec.name for spec in specs}
        for member in self._fleet:
            if member.source == "file" and member.spec.name not in wanted:
                _log.info("worker %s was removed from the workers file", member.spec.name)
                await self._fleet.remove(member.spec.name)
        try:
            await asyncio.gather(*(self._fleet.add(spec, "file") for spec in specs))
        except (WorkerSpecError, FleetFull) as error:
            raise WorkersFileError(f"{self._path}: {error}") from None

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

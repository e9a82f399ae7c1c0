"""Our own frontend on the planes of a real deployment, beside Dynamo's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.dynamo.fleet import DynamoFleet, Frontend
from tests.dynamo.processes import ProcessGroup
from tests.ports import free_port
from tests.waiting import until_now

FOREIGN = ("DYN_", "DYNCTL_", "ETCD_", "NATS_", "KUBE")


class OurFrontend(Frontend):
    """A running frontend of ours, and a client of it."""

    def workers(self) -> list[dict[str, Any]]:
        status, text = self.get("/v1/workers")
        assert status == 200, text
        rows: list[dict[str, Any]] = json.loads(text)["workers"]
        return rows

    def ready(self) -> dict[int, str]:
        """Worker id -> name of the workers that get requests."""
        return {int(one["id"]): one["name"] for one in self.workers() if one["status"] == "ready"}

    def conditions(self) -> dict[tuple[str, str], str]:
        """(code, subject) -> message of the conditions in force."""
        _, text = self.get("/health")
        return {(one["code"], one["subject"]): one["message"]
                for one in json.loads(text)["conditions"]}  # fmt: skip

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        _, text = self.get("/metrics")
        found = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def idle(self) -> bool:
        """Whether no request is booked on any worker, and every cache is read."""
        ranks = [rank for one in self.workers() for rank in one["ranks"]]
        return all(
            not rank["active_requests"] and rank["index"] in ("current", "absent", "load_only")
            for rank in ranks
        )


@contextmanager
def our_frontend(
    fleet: DynamoFleet, *args: str, environment: Mapping[str, str] | None = None
) -> Iterator[OurFrontend]:
    """Serve the workers of ``fleet``; ready when every worker of the fleet gets requests."""
    planes = {k: v for k, v in fleet.environment.items() if k.startswith(("DYN_", "ETCD", "NATS"))}
    expected = {worker.instance_id for worker in fleet.workers.values()}
    variables = {**planes, **(environment or {})}
    with frontend_of(fleet.directory, fleet.model, expected, args, variables) as found:
        yield found


@contextmanager
def frontend_of(
    directory: Path, model: str, expected: Set[int], args: Sequence[str], planes: Mapping[str, str]
) -> Iterator[OurFrontend]:
    """A frontend with these arguments and variables; ready when the workers with the ``expected``
    ids get requests."""
    port = free_port()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    cache = directory / "cache"
    cache.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "dynctl", "serve", "frontend", "--http-port", str(port), *args]
    group = ProcessGroup(directory)
    try:
        process = group.start(
            f"ours-{port}", command, {**clean, "XDG_CACHE_HOME": str(cache), **planes}
        )
        frontend = OurFrontend(process, port, model)
        wait(frontend, lambda: expected <= frontend.ready().keys(), "all workers to be ready")
        yield frontend
        # With time for it: one that is killed leaves what it has registered.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.kill(signal.SIGTERM)
    finally:
        group.close()


def wait(
    frontend: OurFrontend,
    condition: Any,
    what: str,
    seconds: float = 30,
    shown: Callable[[], object] = str,
) -> None:
    """Wait for it; on the deadline fail with the log's end, and with ``shown`` as it is then."""

    def holds() -> bool:
        assert frontend.process.alive, frontend.process.tail(60)
        try:
            return bool(condition())
        except OSError:
            return False  # it does not listen yet

    try:
        until_now(holds, seconds)
    except TimeoutError:
        raise AssertionError(f"waited for {what} {shown()}\n{frontend.process.tail(60)}") from None


def zones(fleet: DynamoFleet, ids: Sequence[int | None]) -> list[str | None]:
    """The zones of workers by instance id."""
    return [fleet.worker_of(one).plan.domains.get("zone") for one in ids]

"""The workers that clients of the selection service register: their records, and the router's
workers that these make.

A record may be incomplete; its worker gets requests when nothing is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dynctl.adapters.zmq.kv_event_source import EndpointError, KvEventSource
from dynctl.serving.routing.index_runtime import IndexRuntime
from dynctl.serving.routing.standalone_index import Key, endpoint_problem, written
from router_core import (
    TOPOLOGY_PREFIX,
    Cleared,
    KvEvent,
    ModelRuntimeConfig,
    Router,
    Worker,
    WorkerError,
    WorkerLost,
    WorkerUpserted,
)

MOST_WORKERS: Final = 16_384
MOST_PARTITIONS: Final = 1024


class SelectionError(Exception):
    """A request that cannot be answered: HTTP status and Dynamo's text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class WorkerRecord:
    """A worker as it was registered. ``fields``: Dynamo's, with defaults; ``reasons``: why it gets
    no requests; none for a schedulable one."""

    fields: dict[str, Any]
    reasons: list[str] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.fields["model_name"], self.fields["routing_group"]

    @property
    def ranks(self) -> range:
        start = self.fields["data_parallel_start_rank"] or 0
        size = self.fields["data_parallel_size"]
        return range(start, start + (1 if size is None else size))

    @property
    def listeners(self) -> dict[int, str]:
        """Rank -> address of its KV events."""
        if self.fields["kv_events_endpoints"]:
            return dict(self.fields["kv_events_endpoints"])
        one = self.fields["kv_events_endpoint"]
        return {self.ranks.start: one} if one is not None and len(self.ranks) == 1 else {}

    def document(self, lifecycle: str | None = None) -> dict[str, Any]:
        """The record as Dynamo shows it."""
        shown = dict(self.fields)
        shown["lifecycle"] = lifecycle or ("incomplete" if self.reasons else "schedulable")
        shown["taints"] = sorted(shown["taints"])
        if not shown["kv_events_endpoints"]:
            del shown["kv_events_endpoints"]
        else:
            by_rank = {str(rank): at for rank, at in shown["kv_events_endpoints"].items()}
            shown["kv_events_endpoints"] = by_rank
        if self.reasons and lifecycle is None:
            shown["not_schedulable_reasons"] = list(self.reasons)
        return shown


class SelectWorkers:
    """The records of all workers, and the workers of ``router`` that follow from them.

    ``runtime`` follows their KV events. ``clock``: monotonic seconds. ``ended``: gets the ids of
    the requests of a worker that is gone.
    """

    def __init__(
        self,
        router: Router,
        runtime: IndexRuntime,
        clock: Callable[[], float],
        ended: Callable[[Iterable[str]], None],
    ) -> None:
        self.records: dict[int, WorkerRecord] = {}
        #: Block size of each model and routing group that had a worker.
        self.partitions: dict[Key, int] = {}
        self._router = router
        self._runtime = runtime
        self._clock = clock
        self._ended = ended
        self._followed: dict[int, tuple[Any, ...]] = {}

    def upsert(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Register a worker, or replace it."""
        worker_id = fields["worker_id"]
        if worker_id not in self.records and len(self.records) >= MOST_WORKERS:
            raise SelectionError(409, f"{MOST_WORKERS:,} workers are registered, the maximum")
        record = WorkerRecord(dict(fields))
        self._reconcile(record)
        self.records[worker_id] = record
        return record.document()

    def patch(self, worker_id: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Change fields of a worker; None leaves one as it is."""
        record = self._record(worker_id)
        changed = {name: value for name, value in fields.items() if value is not None}
        record = WorkerRecord({**record.fields, **changed})
        self._reconcile(record)
        self.records[worker_id] = record
        return record.document()

    def delete(self, worker_id: int) -> dict[str, Any]:
        """Forget a worker and its bookings."""
        record = self._record(worker_id)
        self._lose(worker_id)
        del self.records[worker_id]
        return record.document("unschedulable")

    def documents(self, model: str | None = None, group: str | None = None) -> list[dict[str, Any]]:
        """The records, those of one model or group if given."""
        return [
            record.document()
            for record in self.records.values()
            if model in (None, record.key[0]) and group in (None, record.key[1])
        ]

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Status and body of ``/ready``."""
        count = sum(not record.reasons for record in self.records.values())
        body = {"ready": count > 0, "schedulable_workers": count, "workers": self.documents()}
        return (200 if count else 503), body

    def _record(self, worker_id: int) -> WorkerRecord:
        record = self.records.get(worker_id)
        if record is None:
            raise SelectionError(404, f"worker {worker_id} not found")
        return record

    def _reconcile(self, record: WorkerRecord) -> None:
        """Make the router's worker that of the record, if it is complete."""
        worker_id = record.fields["worker_id"]
        record.reasons = self._missing(record)
        worker: Worker | None = None
        if not record.reasons:
            try:
                made = self._worker(record)
                self._check_endpoints(record)
                worker = made
            except (WorkerError, SelectionError) as error:
                record.reasons = [f"reconciliation failed: {error}"]
        before = self._router.registry.get(worker_id)
        if worker is None or (before is not None and before.model != worker.model):
            self._lose(worker_id)
        if worker is None:
            return
        self.partitions.setdefault(record.key, worker.block_size)
        applied = self._router.apply(WorkerUpserted(worker), self._clock())
        if not applied.ok:
            record.reasons = [f"reconciliation failed: {applied.message}"]
            return
        self._follow(record, worker)

    def _missing(self, record: WorkerRecord) -> list[str]:
        """What a worker lacks for requests, in Dynamo's words."""
        fields, missing = record.fields, []
        if not fields["endpoint"]:
            missing.append("endpoint is required")
        if not fields["block_size"]:
            missing.append("block_size must be greater than 0")
        if not len(record.ranks):
            missing.append("data_parallel_size must be greater than 0")
        queues = self._router.config.router_queue_threshold is not None
        if queues and fields["max_num_batched_tokens"] is None:
            missing.append("max_num_batched_tokens is required while queueing is enabled")
        if self._router.config.use_kv_events:
            listeners = record.listeners
            missing += [
                f"kv_events endpoint is required for dp_rank {rank}"
                for rank in record.ranks[:1024]
                if not listeners.get(rank)
            ]
        return missing

    def _worker(self, record: WorkerRecord) -> Worker:
        fields, key = record.fields, record.key
        size = self.partitions.get(key)
        if size is not None and size != fields["block_size"]:
            raise SelectionError(
                409,
                f"block_size mismatch for {written(key)}: existing={size} "
                f"requested={fields['block_size']}",
            )
        if size is None and len(self.partitions) >= MOST_PARTITIONS:
            raise SelectionError(409, f"{MOST_PARTITIONS:,} models are registered, the maximum")
        own = [taint for taint in fields["taints"] if not taint.startswith(TOPOLOGY_PREFIX)]
        # A worker's own taints about its place are kept as they are, and its topology_domains make
        # none: both as Dynamo's service.
        placed = [taint.removeprefix(TOPOLOGY_PREFIX).partition("=") for taint in fields["taints"]
                  if taint.startswith(TOPOLOGY_PREFIX)]  # fmt: skip
        card = ModelRuntimeConfig(
            total_kv_blocks=fields["total_kv_blocks"],
            max_num_batched_tokens=fields["max_num_batched_tokens"],
            data_parallel_start_rank=record.ranks.start,
            data_parallel_size=len(record.ranks),
            enable_eagle=bool(fields["is_eagle"]),
            taints=frozenset(own),
            topology_domains={domain: value for domain, _, value in placed},
            validate=False,
        )
        worker_id = fields["worker_id"]
        return Worker(
            worker_id,
            str(worker_id),
            "\x00".join(key),
            block_size=fields["block_size"],
            runtime_config=card,
            kv_events=self._router.config.use_kv_events,
            endpoint=fields["endpoint"],
        )

    def _check_endpoints(self, record: WorkerRecord) -> None:
        worker_id = record.fields["worker_id"]
        for rank, endpoint in record.listeners.items():
            problem = endpoint_problem(endpoint)
            if problem is not None:
                where = f"worker {worker_id} dp_rank {rank}"
                raise SelectionError(400, f"invalid kv_events endpoint for {where}: {problem}")
        replay = record.fields["replay_endpoint"]
        problem = None if replay is None else endpoint_problem(replay)
        if problem is not None:
            raise SelectionError(400, f"invalid replay endpoint for worker {worker_id}: {problem}")

    def _follow(self, record: WorkerRecord, worker: Worker) -> None:
        """Follow the KV events of a worker, unless that is what happens already."""
        replay, listeners = record.fields["replay_endpoint"], record.listeners
        wanted = (worker.model, worker.block_size, replay, tuple(sorted(listeners.items())))
        if not self._router.config.use_kv_events or self._followed.get(worker.worker_id) == wanted:
            return
        self._runtime.unfollow(worker.worker_id)
        for rank in worker.ranks:
            # What the rank caches is read again, from the address that it has now.
            self._router.apply(KvEvent(worker.worker_id, rank, Cleared()), self._clock())
            source = KvEventSource(
                worker.worker_id,
                listeners[rank],
                worker.block_size,
                rank,
                replay,
                is_eagle=worker.runtime_config.enable_eagle,
                salt_each_block=True,
            )
            try:
                self._runtime.follow(source, f"worker {worker.worker_id}")
            except EndpointError as error:
                record.reasons = [f"reconciliation failed: {error}"]
        self._followed[worker.worker_id] = wanted

    def _lose(self, worker_id: int) -> None:
        self._runtime.unfollow(worker_id)
        self._followed.pop(worker_id, None)
        if self._router.registry.get(worker_id) is not None:
            ended = [
                booking.request_id
                for booking in self._router.load
                if self._on(booking.slot, worker_id)
            ]
            self._router.apply(WorkerLost(worker_id), self._clock())
            self._ended(ended)
            self._runtime.request_sweep()

    def _on(self, slot: int, worker_id: int) -> bool:
        return self._router.registry.ref(slot).worker_id == worker_id

"""What breaks in a live deployment: the view is right again within the lease, idle meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from dynctl.base.options import GlobalOptions
from tests.contract.etcd_server import EtcdServer
from tests.contract.nats_server import nats_server
from tests.dynamo.fleet import DynamoFleet, WorkerPlan, aggregated
from tests.dynamo.observed import Observed, observing, possible
from tests.waiting import patience

FILE_LEASE = 10.0
#: Above the lease: polling, the sweep of another process, and a busy machine.
MARGIN = 8.0
PROMPT = list(range(3, 103))


async def until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for it; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience(seconds), f"waited {seconds:g} s for {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def names(seen: Observed) -> set[int]:
    return {worker.worker_id for worker in seen.router.registry}


def test_workers_die_leave_and_come() -> None:
    plans = [*aggregated(3), WorkerPlan("late", late=True)]

    async def run() -> None:
        with DynamoFleet(plans, speedup=0) as fleet:
            async with observing(fleet) as seen:
                assert len(names(seen)) == 3
                await asyncio.to_thread(fleet.frontend.complete, PROMPT)
                await seen.quiet()

                killed = fleet.workers["worker-0"].instance_id
                await asyncio.to_thread(fleet.kill, "worker-0")
                await until(
                    lambda: killed not in names(seen), FILE_LEASE + MARGIN, "the lease to end"
                )

                left = fleet.workers["worker-1"].instance_id
                await asyncio.to_thread(fleet.kill, "worker-1", signal.SIGTERM)
                await until(lambda: left not in names(seen), 3, "a worker that said goodbye to go")

                late = await asyncio.to_thread(fleet.start_worker, "late")
                await until(lambda: late.instance_id in names(seen), 5, "the late worker")
                await seen.quiet()
                assert seen.observer.not_current() == {}
                answer = await asyncio.to_thread(fleet.frontend.complete, PROMPT)
                assert answer.ok
                await seen.quiet()
                expected = possible(seen.predict(PROMPT))
                placed = (await asyncio.to_thread(fleet.frontend.complete, PROMPT)).placement
                assert (placed.prefill, placed.decode) in expected

    asyncio.run(run())


def test_etcd_is_killed_and_comes_back(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    etcd.start()

    async def run() -> None:
        with DynamoFleet(
            aggregated(2), discovery="etcd", etcd_endpoints=etcd.url, speedup=0
        ) as fleet:
            options = GlobalOptions(discovery="etcd", etcd_endpoints=etcd.url)
            async with observing(fleet, options=options) as seen:
                assert len(names(seen)) == 2
                before = etcd.revision(), etcd.leases()
                await asyncio.to_thread(fleet.frontend.complete, PROMPT)
                await seen.quiet()
                assert possible(seen.predict(PROMPT))
                await asyncio.sleep(1.0)
                assert (etcd.revision(), etcd.leases()) == before, "observing writes nothing"

                await asyncio.to_thread(etcd.kill)
                await until(lambda: seen.observer.interrupted is not None, 10, "the loss")
                spent = time.process_time()
                await asyncio.sleep(2.0)
                assert time.process_time() - spent < 0.6, "waiting for etcd must cost no CPU"
                assert len(names(seen)) == 2, "what is known stays"

                await asyncio.to_thread(etcd.start)
                await until(lambda: seen.observer.interrupted is None, 15, "etcd to be back")
                assert len(names(seen)) == 2
                late = await asyncio.to_thread(fleet.start_worker, WorkerPlan("late"), wait=False)
                await until(lambda: len(names(seen)) == 3, 20, "a worker that came after")
                assert late.process.alive

    try:
        asyncio.run(run())
    finally:
        etcd.close()


def test_nats_restarts_and_what_was_missed_is_healed(tmp_path: Path) -> None:
    async def run() -> None:
        async with nats_server(tmp_path) as server:
            with DynamoFleet(
                aggregated(2), event_plane="nats", nats_server=f"nats://{server.address}", speedup=0
            ) as fleet:
                options = GlobalOptions(
                    discovery="file", file_kv=fleet.file_kv, nats_server=f"nats://{server.address}"
                )
                async with observing(fleet, options=options) as seen:
                    await asyncio.to_thread(fleet.frontend.complete, PROMPT)
                    await seen.quiet()
                    assert _cached(seen) > 0
                    await server.kill()
                    # What the workers publish meanwhile is lost.
                    other = [token + 7 for token in PROMPT]
                    await asyncio.to_thread(fleet.frontend.complete, other)
                    await asyncio.sleep(0.3)
                    missed = _cached(seen)
                    await server.start()
                    await until(lambda: _cached(seen) > missed, 15, "the lost events")
                    await seen.quiet()
                    assert seen.observer.not_current() == {}

    asyncio.run(run())


def test_observing_a_file_store_leaves_no_trace() -> None:
    async def run() -> None:
        with DynamoFleet(aggregated(2), speedup=0) as fleet:
            for worker in fleet.workers.values():
                # Their keep-alive would touch the files while we compare.
                os.kill(worker.process.pid, signal.SIGSTOP)
            try:
                os.kill(fleet.frontend.process.pid, signal.SIGSTOP)
                before = _tree(fleet.file_kv)
                planes_wait = asyncio.create_task(_look(fleet))
                await planes_wait
                assert _tree(fleet.file_kv) == before
            finally:
                for process in (
                    fleet.frontend.process,
                    *(w.process for w in fleet.workers.values()),
                ):
                    os.kill(process.pid, signal.SIGCONT)

    asyncio.run(run())


async def _look(fleet: DynamoFleet) -> None:
    async with observing(fleet, follow_index=False) as seen:
        assert len(names(seen)) == 2
        await asyncio.sleep(1.0)


def _cached(seen: Observed) -> int:
    registry, index = seen.router.registry, seen.router.index
    return sum(index.block_count(slot) for w in registry for slot in registry.slots(w.worker_id))


def _tree(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}

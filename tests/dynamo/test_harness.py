"""The harness itself: a real Dynamo comes up, answers, can be held and broken, and goes."""

import base64
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contract.etcd_server import EtcdServer
from tests.contract.nats_server import nats_server
from tests.dynamo.fleet import DYNAMO_PYTHON, DynamoFleet, WorkerPlan, aggregated, two_zones
from tests.waiting import patience

ROOT = Path(__file__).resolve().parents[2]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_aggregated_answers_and_leaves_nothing():
    with DynamoFleet(aggregated(2)) as fleet:
        pids, directory = fleet.pids, fleet.directory
        answer = fleet.frontend.chat("hello world", max_tokens=3)
        streamed = fleet.frontend.chat("hello world", max_tokens=3, stream=True)
        dry = fleet.frontend.dry_run(list(range(20, 60)))

        assert answer.ok
        assert answer.prompt_tokens == 11
        assert answer.placement.prefill == answer.placement.decode
        assert fleet.worker_of(answer.placement.decode).name in ("worker-0", "worker-1")
        assert streamed.placement.decode in {w.instance_id for w in fleet.workers.values()}
        assert dry.token_ids == list(range(20, 60))
        assert any(
            answer.request_id in line for line in fleet.frontend.log_lines("Selected worker")
        )
        assert len(pids) == 3
        assert all(is_running(pid) for pid in pids)

    assert not any(is_running(pid) for pid in pids)
    assert not directory.exists()


def test_required_zones_stay_together():
    with DynamoFleet(two_zones("required")) as fleet:
        assert fleet.frontend.worker_counts() == {"prefill": 2, "decode": 2}
        for number in range(4):
            placed = fleet.frontend.complete(list(range(number, number + 40))).placement
            prefill, decode = fleet.worker_of(placed.prefill), fleet.worker_of(placed.decode)
            assert (prefill.plan.role, decode.plan.role) == ("prefill", "decode")
            assert prefill.plan.domains == decode.plan.domains


def test_preferred_crosses_zones_where_it_must():
    plans = [plan for plan in two_zones("preferred", 0.85) if plan.name != "decode-a0"]
    with DynamoFleet(plans) as fleet:
        pinned = {"prefill_worker_id": fleet.workers["prefill-a0"].instance_id}
        placed = fleet.frontend.complete(list(range(40)), nvext=pinned).placement
        assert fleet.worker_of(placed.prefill).name == "prefill-a0"
        assert fleet.worker_of(placed.decode).name == "decode-b0"


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_requests_are_held_before_and_after_the_first_token(max_tokens):
    prompt = list(range(20, 60))
    with DynamoFleet(aggregated(1, kind="held")) as fleet:
        held = fleet.workers["worker-0"].held
        held.hold(prefill=True, decode=True)
        flight = fleet.frontend.begin(prompt, max_tokens=max_tokens)
        [request] = held.wait_for(1, "prefill")
        assert request.tokens == 40
        # Before the first token a prompt counts as prefill and decode load, then as decode alone.
        assert loads(fleet.frontend) == (40, 2)

        held.step(request.id)
        held.wait_for(1, "decode")
        fleet.wait_until(lambda: loads(fleet.frontend) == (0, 2), "the prefill load to be freed")
        assert not flight.done

        held.release()
        answer = flight.result()
        assert answer.ok
        assert answer.request_id == request.id
        assert held.requests("done")[0].id == request.id
        fleet.wait_until(lambda: loads(fleet.frontend) == (0, 0), "the decode load to be freed")


def test_replicas_know_of_many_requests_in_flight():
    with DynamoFleet(
        aggregated(2, kind="held"),
        frontends=[(), ()],
        frontend_args=("--router-replica-sync",),
    ) as fleet:
        workers = [worker.held for worker in fleet.workers.values()]
        for held in workers:
            held.hold(prefill=True)
        first, second = fleet.frontends
        follow_each_other(fleet)
        prompts = [list(range(start, start + 40)) for start in range(64)]
        flights = [
            (first if number % 2 else second).begin(prompt) for number, prompt in enumerate(prompts)
        ]
        booked = (64 * 40, 64 * 2)
        fleet.wait_until(lambda: loads(first) == booked == loads(second), "both to count all")
        fleet.wait_until(
            lambda: sum(len(held.requests("prefill")) for held in workers) == 64,
            "the workers to have all",
        )

        for held in workers:
            held.release()
        assert all(flight.result().ok for flight in flights)
        fleet.wait_until(lambda: loads(first) == (0, 0) == loads(second), "both to count none")


def test_a_client_that_leaves_is_seen_by_the_worker():
    with DynamoFleet(aggregated(1, kind="held")) as fleet:
        held = fleet.workers["worker-0"].held
        held.hold(prefill=True)
        flight = fleet.frontend.begin(list(range(40)))
        held.wait_for(1, "prefill")
        flight.disconnect()
        held.wait_for(1, "cancelled")


def test_prefill_and_decode_workers_hold_in_turn():
    with DynamoFleet(two_zones("required", kind="held")) as fleet:
        for worker in fleet.workers.values():
            worker.held.hold(prefill=worker.plan.role == "prefill", decode=True)
        pinned = {"prefill_worker_id": fleet.workers["prefill-b0"].instance_id}
        flight = fleet.frontend.begin(list(range(40)), nvext=pinned)
        fleet.workers["prefill-b0"].held.wait_for(1, "prefill")
        assert fleet.workers["decode-b0"].held.requests() == []

        fleet.workers["prefill-b0"].held.release()
        fleet.workers["decode-b0"].held.wait_for(1, "decode")
        fleet.workers["decode-b0"].held.release()
        placed = flight.result().placement
        assert fleet.worker_of(placed.decode).name == "decode-b0"


def test_published_blocks_reach_the_router():
    prompt = list(range(100, 164))
    with DynamoFleet(aggregated(2, kind="held")) as fleet:
        chosen = fleet.workers["worker-1"]
        chosen.held.store(prompt)

        def routed_there():
            placed = [fleet.frontend.dry_run(prompt).placement.decode for _ in range(8)]
            return set(placed) == {chosen.instance_id}

        fleet.wait_until(routed_there, "worker-1 to win with the prompt cached")
        chosen.held.remove(prompt)
        fleet.wait_until(lambda: not routed_there(), "the cached blocks to be gone")


def test_workers_come_late_and_go_in_either_way():
    plans = [*aggregated(2), WorkerPlan("late", late=True)]
    with DynamoFleet(plans, frontends=[(), ("--router-temperature", "0.5")]) as fleet:
        assert set(fleet.workers) == {"worker-0", "worker-1"}
        late = fleet.start_worker("late")
        assert all(each.worker_counts() == {"aggregated": 3} for each in fleet.frontends)

        fleet.kill("worker-0", signal.SIGTERM, wait_gone=True)
        fleet.kill("worker-1", wait_gone=True)
        answers = [each.complete(list(range(40))) for each in fleet.frontends]
        assert [answer.placement.decode for answer in answers] == [late.instance_id] * 2


async def test_services_can_be_etcd_and_nats(tmp_path):
    etcd = EtcdServer(tmp_path / "etcd")
    try:
        etcd.start()
        async with nats_server(tmp_path) as nats:
            with DynamoFleet(
                two_zones("required"),
                discovery="etcd",
                etcd_endpoints=etcd.url,
                event_plane="nats",
                nats_server=f"nats://{nats.address}",
                namespace="other",
            ) as fleet:
                placed = fleet.frontend.complete(list(range(40))).placement
                prefill, decode = fleet.worker_of(placed.prefill), fleet.worker_of(placed.decode)
                assert prefill.plan.domains == decode.plan.domains
                registered = etcd.post("/v3/kv/range", key=b64("v1/"), range_end=b64("v10"))
                keys = [base64.b64decode(each["key"]).decode() for each in registered["kvs"]]
                assert f"v1/instances/other/prefill/generate/{prefill.instance_id:x}" in keys
                assert all("/other/" in key for key in keys)
    finally:
        etcd.close()


def b64(text):
    return base64.b64encode(text.encode()).decode()


def test_a_worker_that_cannot_start_fails_with_its_log():
    broken = WorkerPlan("broken", args=("--no-such-flag",))
    started = []

    class Watched(DynamoFleet):
        def close(self):
            started.extend(self.pids)
            super().close()

    with pytest.raises(AssertionError, match=r"broken ended[\s\S]*--no-such-flag"):
        Watched([broken]).__enter__()
    assert started
    assert not any(is_running(pid) for pid in started)


def test_nothing_outlives_a_killed_test_run():
    """Even SIGKILL of the process that started the fleet ends every process of it."""
    script = (
        "import sys, time\n"
        "from tests.dynamo.fleet import DynamoFleet, aggregated\n"
        "with DynamoFleet(aggregated(1)) as fleet:\n"
        "    print(*fleet.pids, fleet.directory, flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "DYNCTL_DYNAMO_PYTHON": DYNAMO_PYTHON, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        *pids, directory = parent.stdout.readline().split()
        parent.kill()
    try:
        # Orphans are reaped by init, or by its substitute, which may take a moment.
        DynamoFleet([])._wait(
            lambda: not any(still_working(int(pid)) for pid in pids), 10, "orphans to end"
        )
    finally:
        subprocess.run(["rm", "-rf", directory], check=True)


def still_working(pid):
    """Running and not a zombie that is not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def follow_each_other(fleet):
    """Until each of two frontends sees a request of the other: events that a frontend publishes
    before the other one follows are lost, and never sent again."""
    for asked, other in (fleet.frontends, fleet.frontends[::-1]):
        seen = False
        while not seen:
            flight = asked.begin(list(range(100, 140)))
            fleet.wait_until(lambda asked=asked: loads(asked) != (0, 0), "its own request")
            end = time.monotonic() + patience(0.5)
            while not seen and time.monotonic() < end:
                seen = loads(other) != (0, 0)
                time.sleep(0.05)
            flight.disconnect()
            fleet.wait_until(lambda asked=asked: loads(asked) == (0, 0), "its request to end")
        fleet.wait_until(lambda other=other: loads(other) == (0, 0), "the other to see the end")


def loads(frontend):
    """(active prefill tokens, active decode blocks) as the frontend's metrics count them."""
    _, text = frontend.get("/metrics")
    found: dict[str, float] = {}
    for line in text.splitlines():
        for name in ("prefill_tokens", "decode_blocks"):
            if line.startswith(f"dynamo_frontend_worker_active_{name}{{"):
                found[name] = found.get(name, 0) + float(line.rsplit(" ", 1)[1])
    return found.get("prefill_tokens", 0), found.get("decode_blocks", 0)

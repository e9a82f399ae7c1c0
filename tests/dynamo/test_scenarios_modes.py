"""The router modes beside kv: dynctl decides on the same running requests as a real frontend."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from dynctl.base.options import GlobalOptions
from dynctl.sources.dynamo.source import DynamoSource
from router_core import (
    Booked,
    ModelRuntimeConfig,
    Router,
    RouterConfig,
    RoutingRequest,
    WorkerUpserted,
)
from router_core import Worker as RoutedWorker
from tests.dynamo.fleet import DynamoFleet, Frontend, Worker, WorkerPlan
from tests.dynamo.test_scenarios_load import Score, prompt, route

Finding = Callable[[str], None]
MODES = ("power-of-two", "least-loaded", "device-aware-weighted", "direct", "random")
COUNTING = ("power-of-two", "least-loaded", "device-aware-weighted")
RATIO = 2.0
NO_TAINT = {"routing_constraints": {"required_taints": ["nope"]}}


@dataclass
class Modes:
    """Three workers that hold requests, the first on a CPU, and a frontend for each mode."""

    fleet: DynamoFleet
    chance: random.Random

    def __getitem__(self, mode: str) -> Frontend:
        return self.fleet.frontends[MODES.index(mode)]

    @property
    def workers(self) -> list[Worker]:
        return list(self.fleet.workers.values())

    def seen(self) -> list[int]:
        """Requests that have arrived at each worker so far."""
        return [len(one.held.requests()) for one in self.workers]

    def arrived(self, count: int) -> None:
        self.fleet.wait_until(lambda: sum(self.seen()) == count, f"{count} requests")


@pytest.fixture(scope="module")
def modes() -> Iterator[Modes]:
    plans = [
        WorkerPlan("worker-0", kind="held", environment={"CUDA_VISIBLE_DEVICES": ""}),
        WorkerPlan("worker-1", kind="held"),
        WorkerPlan("worker-2", kind="held"),
    ]
    with DynamoFleet(
        plans,
        frontends=tuple(("--router-mode", mode) for mode in MODES),
        frontend_environment={"DYN_ENCODER_CUDA_TO_CPU_RATIO": f"{RATIO:g}"},
    ) as fleet:
        yield Modes(fleet, random.Random(21))


def modelled(modes: Modes, mode: str) -> Router:
    """A router in this mode over the same workers."""
    router = Router(RouterConfig(router_mode=mode, encoder_cuda_to_cpu_ratio=RATIO))
    for number, worker in enumerate(modes.workers):
        assert worker.instance_id is not None
        made = RoutedWorker(
            worker.instance_id,
            worker.name,
            "tiny",
            runtime_config=ModelRuntimeConfig(),
            device="cuda" if number else "cpu",
        )
        assert router.apply(WorkerUpserted(made), 0.0).ok
    return router


@pytest.mark.seed("dynamo-1.6: modes: power-of-two")
@pytest.mark.seed("router-guide: modes: Least-Loaded")
@pytest.mark.seed("router-guide: modes: Device-Aware Weighted")
@pytest.mark.parametrize("mode", COUNTING)
def test_the_same_running_requests_give_the_same_worker(
    modes: Modes, mode: str, finding: Finding
) -> None:
    """Sixteen requests that all stay in flight: each goes where dynctl's own mode may send it."""
    router, frontend, placed = modelled(modes, mode), modes[mode], []
    for worker in modes.workers:
        worker.held.hold(prefill=True)
    with ExitStack() as stack:
        for number in range(16):
            before = modes.seen()
            flight = frontend.begin(prompt(modes.chance, 2))
            stack.callback(flight.result)
            modes.arrived(sum(before) + 1)
            chosen = [now - was for now, was in zip(modes.seen(), before, strict=True)].index(1)
            placed.append(chosen)
            decision = router.plan(RoutingRequest(f"r{number}", "tiny", 37, 16)).final
            chances = [row.probability for row in decision.rows()]
            assert chances[chosen] > 0, (placed, decision.inputs, decision.budget)
            ref = decision.refs[chosen]
            booked = Booked(f"r{number}", "aggregated", ref.worker_id, 0)
            assert router.apply(booked, 0.0).ok
        for worker in modes.workers:
            worker.held.hold()
            worker.held.release()
    finding(f"mode {mode}: 16 of 16 requests where dynctl's own mode may send them: {placed}")


@pytest.mark.parametrize("mode", COUNTING)
def test_a_mode_that_is_set_is_predicted_or_declared(
    modes: Modes, mode: str, finding: Finding
) -> None:
    """Without a request in flight all tie, so the draw is the doubt, except between devices."""
    doubts = {"power-of-two": "DYR0728", "least-loaded": "DYR0701"}
    score = Score(f"mode {mode}", doubts.get(mode, "DYR0744"))
    for _ in range(6):
        tokens = prompt(modes.chance, 4)
        assign = [f"router_mode={mode}"]
        if mode == "device-aware-weighted":
            assign.append(f"encoder_cuda_to_cpu_ratio={RATIO}")
        expected = route(modes.fleet, tokens, modes[mode], assignments=assign)
        assert expected.mode == mode
        score.count(expected, modes[mode].complete(tokens))
    score.report(finding)
    assert score.named == 6


@pytest.mark.seed("router-guide: modes: Direct")
def test_direct(modes: Modes, finding: Finding) -> None:
    frontend, tokens = modes["direct"], prompt(modes.chance, 3)
    assign = ["router_mode=direct"]
    unpinned = route(modes.fleet, tokens, frontend, assignments=assign)
    assert (unpinned.ok, unpinned.status) == (False, 400)
    assert frontend.complete(tokens).status == 400
    for worker in modes.workers:
        expected = route(
            modes.fleet, tokens, frontend, assignments=assign, pin_decode=str(worker.instance_id)
        )
        assert expected.certain
        assert expected.winner.decode is not None
        answer = frontend.complete(tokens, nvext={"backend_instance_id": worker.instance_id})
        assert answer.placement.decode == expected.winner.decode.worker_id
    assert frontend.complete(tokens, nvext={"backend_instance_id": 12345}).status == 400
    finding("mode direct: 3 of 3 pins predicted, and the 400 without one")


@pytest.mark.parametrize("mode", MODES)
def test_taints_are_not_applied(modes: Modes, mode: str) -> None:
    frontend, tokens = modes[mode], prompt(modes.chance, 2)
    pin = modes.workers[1].instance_id if mode == "direct" else None
    nvext = NO_TAINT if pin is None else {**NO_TAINT, "backend_instance_id": pin}
    expected = route(
        modes.fleet,
        tokens,
        frontend,
        assignments=[f"router_mode={mode}"],
        required=["nope"],
        pin_decode=None if pin is None else str(pin),
    )
    assert frontend.complete(tokens, nvext=nvext).status == 200
    assert expected.ok


def test_the_device_of_a_worker_is_read(modes: Modes) -> None:
    options = GlobalOptions(discovery="file", file_kv=modes.fleet.file_kv)
    rows = DynamoSource(options, (modes["direct"].url,)).workers()
    devices = {row.worker_id: row.device for row in rows}
    assert [devices[one.instance_id] for one in modes.workers if one.instance_id] == [
        "cpu",
        "cuda",
        "cuda",
    ]

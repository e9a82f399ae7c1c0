"""`dynctl serve attach` before simulated engines, behind a real Dynamo frontend.

Two engines of one model, each with a sidecar; file discovery, ZMQ events.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.etcd_server import EtcdServer
from tests.dynamo.client import Answer, FrontendClient
from tests.dynamo.fleet import TINY_MODEL, DynamoFleet
from tests.dynamo.processes import Process, ProcessGroup
from tests.ports import free_port
from tests.waiting import patience, until_now

WORDS = "rivers stones north south east west water light day time way small large old new "
SHOWN = {"extra_fields": ["worker_id", "timing"]}
#: One pixel.
IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


class Attached:
    """A simulated engine and its sidecar, as processes of ours."""

    def __init__(
        self,
        group: ProcessGroup,
        fleet: DynamoFleet,
        name: str,
        plane: str = "zmq",
        role: str = "aggregated",
        model_path: Path = TINY_MODEL,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = {**fleet.environment, **(environment or {})}
        self._role = role
        self._model_path = model_path
        self._group = group
        self._plane = plane
        self.name = name
        self.ports = [free_port() for _ in range(4)]
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self.engine = self.start_engine()
        self.sidecar = self.start_sidecar()

    def start_engine(self) -> Process:
        port, events, replay, _ = self.ports
        arguments = ["serve", "engine", "--name", self.name, "--model", "tiny"]
        arguments += ["--model-path", str(TINY_MODEL), "--port", str(port), "--seed", "7"]
        arguments += ["--kv-events", f"tcp://127.0.0.1:{events}", "--speedup-ratio", "4"]
        arguments += ["--replay", f"tcp://127.0.0.1:{replay}", "--total-blocks", "512"]
        arguments += ["--role", self._role]
        self.engine = self._start("engine", arguments)
        return self.engine

    def start_sidecar(self, *more: str) -> Process:
        engine = f"{self.url},role={self._role}"
        arguments = ["serve", "attach", "--engine", engine, "--model-path", str(self._model_path)]
        arguments += ["--system-port", str(self.ports[3]), "--event-plane", self._plane, *more]
        self.sidecar = self._start("sidecar", arguments)
        return self.sidecar

    def _start(self, what: str, arguments: list[str]) -> Process:
        foreign = ("DYN_", "DYNCTL_", "ETCD_", "NATS_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        environment = clean | (self._environment if what == "sidecar" else {})
        command = [sys.executable, "-m", "dynctl", *arguments]
        return self._group.start(f"{what}-{self.name}", command, environment)

    def health(self) -> dict[str, Any]:
        with contextlib.suppress(httpx.HTTPError):
            return dict(fetched(f"http://127.0.0.1:{self.ports[3]}/health").json())
        return {}

    def conditions(self) -> set[str]:
        """The codes of what is wrong; of a sidecar that does not answer that too."""
        health = self.health()
        return {one["code"] for one in health["conditions"]} if health else {"no answer"}

    def requests(self) -> int:
        """The requests that reached the sidecar."""
        text = fetched(f"http://127.0.0.1:{self.ports[3]}/metrics").text
        name = "dynctl_attach_requests_total"
        found = [line for line in text.splitlines() if line.startswith(name)]
        return int(sum(float(line.rpartition(" ")[2]) for line in found))

    @property
    def instance_id(self) -> int:
        return registered_id(self.sidecar)

    def load(self) -> dict[str, Any]:
        return dict(fetched(f"{self.url}/load").json())

    def slow(self, factor: float) -> None:
        """The engine takes so many times longer from now on."""
        posted(f"{self.url}/engine/faults", {"slow_factor": factor})


def registered_id(sidecar: Process) -> int:
    """The id under which it registered last. Its log may have it after discovery."""

    def ids() -> list[str]:
        return re.findall(r"as instance ([0-9a-f]+)", "\n".join(sidecar.lines()))

    until_now(ids)
    return int(ids()[-1], 16)


def fetched(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False, timeout=patience(10))


def posted(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url, json=body, trust_env=False, timeout=patience(30))


@pytest.fixture(scope="module")
def fleet() -> Iterator[DynamoFleet]:
    with DynamoFleet([], frontend_args=["--migration-limit", "3"]) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def pair(fleet: DynamoFleet) -> Iterator[tuple[Attached, Attached]]:
    group = ProcessGroup(fleet.directory)
    try:
        both = Attached(group, fleet, "a"), Attached(group, fleet, "b")
        workers(fleet, 2)
        yield both
    finally:
        group.close()


def workers(fleet: DynamoFleet, count: int) -> None:
    """Wait until the frontend counts these workers, and accepts requests if there are any."""

    def counted() -> bool:
        found = sum(fleet.frontend.worker_counts().values())
        return found == count and (fleet.frontend.accepts() or not count)

    fleet.wait_until(counted, f"{count} workers", seconds=30)


def prompt(number: int, words: int = 40) -> str:
    return f"{number} " + " ".join((WORDS * 9).split()[number % 7 :][:words])


def ask(fleet: DynamoFleet, text: str, tokens: int = 6, **fields: Any) -> Answer:
    answer = fleet.frontend.complete(text, max_tokens=tokens, nvext=SHOWN, timeout=60, **fields)
    assert answer.ok, (answer.status, answer.body, fleet.logs())
    return answer


def text_of(answer: Answer) -> str:
    if answer.chunks:
        found = (chunk["choices"] for chunk in answer.chunks)
        return "".join(choices[0]["text"] for choices in found if choices)
    return str(answer.body["choices"][0]["text"])


def test_answers_are_those_of_the_engine(fleet: DynamoFleet, pair: tuple[Attached, Attached]):
    for number in range(4):
        text = prompt(number)
        body = {"model": "tiny", "prompt": text, "max_tokens": 12}
        own = posted(f"{pair[0].url}/v1/completions", body).json()
        expected = own["choices"][0]["text"]
        assert text_of(ask(fleet, text, 12)) == expected
        streamed = ask(fleet, text, 12, stream=True)
        assert text_of(streamed) == expected
        chat = fleet.frontend.chat(text, max_tokens=5, timeout=60)
        assert chat.body["usage"]["completion_tokens"] == 5


def test_a_cached_prefix_draws_the_next_request(
    fleet: DynamoFleet, pair: tuple[Attached, Attached]
):
    ids = {one.instance_id for one in pair}
    for number in range(10, 16):
        text = prompt(number, 60)
        first = ask(fleet, text).placement.decode
        assert first in ids

        def overlap(text: str = text, first: int | None = first) -> bool:
            return fleet.frontend.dry_run(text).placement.decode == first

        # The block's event reaches the frontend a moment later; then it is always the same one.
        until_now(lambda: all(overlap() for _ in range(5)))
        again = ask(fleet, text + " and more")
        assert again.placement.decode == first
        assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_the_engine_refuses_is_a_client_error(
    fleet: DynamoFleet, pair: tuple[Attached, Attached]
):
    answer = fleet.frontend.complete([5] * 9000, max_tokens=4, timeout=60)
    assert answer.status == 400
    # Its reason reaches the client.
    assert "context" in answer.body["message"]
    answer = fleet.frontend.complete([5] * 40, max_tokens=4, best_of=3)
    assert answer.status == 400
    assert "best_of" in answer.body["message"]


def test_an_image_is_refused_and_not_left_out(fleet: DynamoFleet, pair: tuple[Attached, Attached]):
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    content = [{"type": "text", "text": "What is this?"}, image]
    before = sum(one.requests() for one in pair)
    answer = fleet.frontend.chat([{"role": "user", "content": content}], max_tokens=4, timeout=60)
    assert answer.status == 400
    assert sum(one.requests() for one in pair) == before + 1  # the refusal is the sidecar's


def test_a_client_that_leaves_frees_the_engine(fleet: DynamoFleet, pair: tuple[Attached, Attached]):
    held = fleet.frontend.begin(prompt(20), max_tokens=4000)
    until_now(lambda: sum(one.load()["running"] for one in pair) == 1)
    held.disconnect()
    until_now(lambda: sum(one.load()["running"] for one in pair) == 0)


async def test_nothing_is_lost_in_a_drain_and_the_sidecar_comes_back(
    fleet: DynamoFleet, pair: tuple[Attached, Attached]
):
    """SIGTERM while requests run: they end whole, later ones go to the other engine."""
    first, second = pair
    for one in pair:
        one.slow(20.0)  # they run when the sidecar gets its signal
    asking = [
        asyncio.create_task(asyncio.to_thread(ask, fleet, prompt(30 + n), 200)) for n in range(6)
    ]
    await asyncio.to_thread(until_now, lambda: first.load()["running"] > 0)
    first.sidecar.kill(signal.SIGTERM, wait=False)
    await asyncio.to_thread(workers, fleet, 1)
    for one in pair:
        one.slow(1.0)
    answers = await asyncio.gather(*asking)
    assert [one.body["usage"]["completion_tokens"] for one in answers] == [200] * 6
    assert await asyncio.to_thread(first.sidecar.popen.wait, patience(30)) == 0
    other = await asyncio.to_thread(ask, fleet, prompt(40))
    assert other.placement.decode == second.instance_id
    first.start_sidecar()
    await asyncio.to_thread(workers, fleet, 2)


def test_a_second_sidecar_is_refused(fleet: DynamoFleet, pair: tuple[Attached, Attached]):
    first = pair[0].sidecar
    second = pair[0].start_sidecar("--system-port", "-1")
    pair[0].sidecar = first
    assert second.popen.wait(patience(60)) == 1
    assert "ENGINE_ALREADY_ATTACHED" in second.tail()
    workers(fleet, 2)


def test_a_tokenizer_with_another_checksum_is_not_registered(
    fleet: DynamoFleet, pair: tuple[Attached, Attached], tmp_path: Path
):
    """The engine is well; its sidecar has other files than the model that the fleet serves."""
    other = tmp_path / "other"
    shutil.copytree(TINY_MODEL, other)
    (other / "tokenizer.json").write_text((TINY_MODEL / "tokenizer.json").read_text() + "\n")
    group = ProcessGroup(fleet.directory)
    try:
        third = Attached(group, fleet, "e", model_path=other)
        until_now(lambda: "MODEL_FILES_DIFFER" in third.conditions(), 60)
        assert sum(fleet.frontend.worker_counts().values()) == len(pair)
        assert ask(fleet, prompt(55)).ok
    finally:
        group.close()


def test_an_engine_that_dies_leaves_the_fleet_and_comes_back_with_an_empty_cache(
    fleet: DynamoFleet, pair: tuple[Attached, Attached]
):
    first = pair[0]
    first.engine.kill()
    until_now(lambda: sum(fleet.frontend.worker_counts().values()) == 1, 20)
    until_now(lambda: first.conditions() == {"ENGINE_NOT_READY"})
    ask(fleet, prompt(50))
    first.start_engine()
    workers(fleet, 2)
    until_now(lambda: first.health().get("status") == "ready")


def test_a_killed_sidecar_leaves_nothing_longer_than_its_lease(
    fleet: DynamoFleet, pair: tuple[Attached, Attached]
):
    first = pair[0]
    first.sidecar.kill(signal.SIGKILL)
    until_now(lambda: sum(fleet.frontend.worker_counts().values()) == 1, 20)
    first.start_sidecar()
    workers(fleet, 2)
    kinds = {path.parent.name for path in Path(fleet.file_kv).rglob("*%2F*")}
    assert kinds == {"instances", "mdc", "event_channels", "event_sources"}
    cards = [json.loads(path.read_text()) for path in (fleet.file_kv / "v1" / "mdc").iterdir()]
    ids = {card["instance_id"] for card in cards if "card_json" in card}
    assert {first.instance_id, pair[1].instance_id} <= ids


def test_our_frontend_serves_the_same(fleet: DynamoFleet, pair: tuple[Attached, Attached]):
    group = ProcessGroup(fleet.directory)
    port = free_port()
    command = [sys.executable, "-m", "dynctl", "serve", "frontend", "--http-port", str(port)]
    foreign = ("DYN", "ETCD", "NATS")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    group.start("ours", command, clean | fleet.environment)
    ours = FrontendClient(port)
    try:

        def serves() -> bool:
            with contextlib.suppress(OSError):
                return ours.complete(prompt(60), max_tokens=1).ok
            return False

        until_now(serves, 30)
        for number in range(60, 64):
            expected = text_of(ask(fleet, prompt(number), 12))
            assert text_of(ours.complete(prompt(number), max_tokens=12)) == expected
    finally:
        group.close()


def test_one_request_through_a_prefill_and_a_decode_engine():
    with DynamoFleet([]) as fleet:
        group = ProcessGroup(fleet.directory)
        try:
            prefill = Attached(group, fleet, "p", role="prefill")
            decode = Attached(group, fleet, "d", role="decode")
            workers(fleet, 2)

            def handed_over() -> bool:
                """What is counted may not be in the routers of both hops yet."""
                first = fleet.frontend.complete(prompt(80), max_tokens=1, timeout=60)
                return first.ok and first.placement.prefill == prefill.instance_id

            until_now(handed_over, 30)
            before = prefill.requests(), decode.requests()
            for number, stream in ((81, False), (82, True)):
                text = prompt(number)
                answer = ask(fleet, text, 12, stream=stream)
                placed = answer.placement
                assert (placed.prefill, placed.decode) == (prefill.instance_id, decode.instance_id)
                body = {"model": "tiny", "prompt": text, "max_tokens": 12}
                own = posted(f"{decode.url}/v1/completions", body)
                assert text_of(answer) == own.json()["choices"][0]["text"]
            after = prefill.requests(), decode.requests()
            assert after == (before[0] + 2, before[1] + 2)
        finally:
            group.close()


def test_with_etcd_and_nats(tmp_path: Path):
    etcd = EtcdServer(tmp_path / "etcd")
    etcd.start()
    with contextlib.closing(etcd):
        planes: dict[str, Any] = {"discovery": "etcd", "etcd_endpoints": etcd.url}
        requests = {"DYN_REQUEST_PLANE": "nats"}
        with DynamoFleet([], event_plane="nats", environment=requests, **planes) as fleet:
            group = ProcessGroup(fleet.directory)
            try:
                one = Attached(group, fleet, "c", plane="nats")
                workers(fleet, 1)
                leases = etcd.leases()
                assert any("requests over NATS" in line for line in one.sidecar.lines())
                text = prompt(70, 60)
                assert ask(fleet, text).placement.decode == one.instance_id

                def hit() -> bool:
                    """The engine has the blocks and does not publish them again."""
                    return float(ask(fleet, text).timing["kv_hit_rate"]) > 0.5

                until_now(hit)

                # etcd is gone for a while, and the lease is lost: a condition, then registered
                # again under the same id.
                before = one.instance_id
                etcd.kill()
                until_now(lambda: "REGISTRATION_INTERRUPTED" in one.conditions(), 30)
                etcd.start()
                etcd.revoke(before)
                until_now(lambda: not one.conditions() and etcd.leases() == leases, 60)
                assert one.instance_id == before

                def served_again() -> bool:
                    answer = fleet.frontend.complete(text, max_tokens=2, nvext=SHOWN, timeout=60)
                    return answer.ok and answer.placement.decode == one.instance_id

                until_now(served_again, 60)
                one.sidecar.kill(signal.SIGTERM)
                workers(fleet, 0)
                until_now(lambda: etcd.leases() == leases - 1)
            finally:
                group.close()

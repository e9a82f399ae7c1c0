"""Our frontend serves the workers of a real Dynamo: the same answers, hand-off, cancellation,
migration, and what happens when workers or discovery are lost."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.contract.etcd_server import EtcdServer
from tests.contract.nats_server import NatsServer
from tests.dynamo.client import Placement
from tests.dynamo.fleet import (
    TINY_MODEL,
    DynamoFleet,
    Frontend,
    WorkerPlan,
    aggregated,
    two_zones,
)
from tests.dynamo.ours import OurFrontend, our_frontend, wait, zones
from tests.ports import free_port
from tests.waiting import patience, until_now

PROMPT = list(range(3, 103))
MESSAGES = [{"role": "user", "content": "Where do my blocks live? " * 8}]


# -- one pool --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[DynamoFleet, OurFrontend]]:
    # Only requests that come with a trace are traced; nothing collects the spans.
    traced = ("--otlp-endpoint", "http://127.0.0.1:9", "--otlp-sample-ratio", "0")
    logs = {"DYN_LOGGING_JSONL": "1"}
    with (
        DynamoFleet(aggregated(2), speedup=0, environment=logs) as fleet,
        our_frontend(fleet, *traced) as ours,
    ):
        yield fleet, ours


def test_a_trace_goes_on_in_the_worker(pool: tuple[DynamoFleet, OurFrontend]) -> None:
    fleet, ours = pool
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {
        "content-type": "application/json",
        "traceparent": f"00-{trace}-{caller}-01",
        "x-request-id": "the-id-of-a-client",
    }
    body = json.dumps({"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{ours.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=patience(30)) as answer:
        assert answer.status == 200

    def logged() -> list[dict[str, Any]]:
        logs = [worker.process.log.read_text() for worker in fleet.workers.values()]
        lines = [line for log in logs for line in log.splitlines() if trace in line]
        return [json.loads(line) for line in lines if line.endswith("}")]

    until_now(logged)
    line = logged()[0]
    assert (line["trace_id"], line["trace_flags"]) == (trace, "01")
    assert line["x_request_id"] == "the-id-of-a-client"
    assert line["parent_id"] not in ("", caller)  # a span of our frontend is between


def test_hundreds_of_requests_at_once(pool: tuple[DynamoFleet, OurFrontend]) -> None:
    _, ours = pool

    def ask(number: int) -> tuple[int, int]:
        stream = number % 2 == 0
        prompt = [3 + number % 300, *PROMPT]
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        answer = ours.complete(prompt, max_tokens=20, stream=stream, timeout=120, **options)
        usages = [c["usage"] for c in (*answer.chunks, answer.body) if c.get("usage")]
        return answer.status, usages[0]["completion_tokens"] if usages else 0

    with ThreadPoolExecutor(300) as threads:
        answers = list(threads.map(ask, range(600)))
    assert answers == [(200, 20)] * 600
    wait(ours, ours.idle, "bookings to end")


def test_a_second_prompt_goes_where_its_blocks_are(pool: tuple[DynamoFleet, OurFrontend]) -> None:
    fleet, ours = pool
    prompt = list(range(40, 140))

    def blocks(worker: int | None) -> int:
        rows = [row for row in ours.workers() if int(row["id"]) == worker]
        return sum(rank["cached_blocks"] for row in rows for rank in row["ranks"])

    before = {id_: blocks(id_) for id_ in ours.ready()}
    first = ours.complete(prompt).placement
    assert first.decode is not None
    wait(ours, lambda: blocks(first.decode) >= before[first.decode] + 6, "the blocks")
    wait(ours, ours.idle, "bookings to end")
    for _ in range(4):
        assert ours.complete(prompt).placement == first

    # Dynamo's frontend on the same workers finds the same blocks, a moment earlier or later.
    def found() -> bool:
        dry = [fleet.frontend.dry_run(prompt).placement.decode for _ in range(8)]
        return set(dry) == {first.decode}

    fleet.wait_until(found, "Dynamo's frontend to find the blocks")
    assert fleet.frontend.complete(prompt).placement.decode == first.decode


def test_commands_read_it_as_any_frontend(pool: tuple[DynamoFleet, OurFrontend]) -> None:
    _, ours = pool
    assert ours.chat(MESSAGES, max_tokens=3).ok

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "dynctl", *words, "--frontend", ours.url]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience(120), check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert len(re.findall(r"backend/\w+ +aggregated +ready", run("workers", "list"))) == 2
    assert "answer   backend/" in run("route", "--explain", "hello", "--model", "tiny")
    assert "answer   backend/" in run("why", "--last")
    assert "workers (2)" in run("top", "--once")
    assert json.loads(run("hits", "--predicted", "--for", "1", "-o", "json"))


# -- worker sets -----------------------------------------------------------------------------------


def test_worker_sets_of_two_versions_are_kept_apart(tmp_path: Path) -> None:
    """As during a rolling update: each set has its own chat template, as with Dynamo's frontend."""
    changed = tmp_path / "changed"
    shutil.copytree(TINY_MODEL, changed)
    config = changed / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values["chat_template"] = "another version " + values["chat_template"]
    config.write_text(json.dumps(values))
    at = ("--namespace", "prod-v2", "--cache", "--model-path", str(changed))
    plans = [
        WorkerPlan("old", kind="held", args=("--namespace", "prod-v1", "--cache")),
        WorkerPlan("new", kind="held", args=at),
    ]
    prefix = ("--namespace-prefix", "prod")
    with (
        DynamoFleet(plans, frontend_args=prefix) as fleet,
        our_frontend(fleet, *prefix) as ours,
    ):
        names = {worker.instance_id: name for name, worker in fleet.workers.items()}

        def tokens_of(frontend: Frontend) -> dict[str, int]:
            """Prompt tokens of one question by the worker that had it; until both had it."""
            found: dict[str, int] = {}
            for _ in range(64):
                answer = frontend.chat(MESSAGES, max_tokens=2)
                assert answer.ok, answer
                name, count = names[answer.placement.decode or 0], answer.body["usage"]
                assert found.setdefault(name, count["prompt_tokens"]) == count["prompt_tokens"]
                if len(found) == 2:
                    break
            return found

        expected = tokens_of(fleet.frontend)
        assert expected["new"] > expected["old"]
        # Although the first question is cached in one set, the next ones go to the other one too.
        assert tokens_of(ours) == expected
        assert not ours.conditions()


# -- caches with another arithmetic ----------------------------------------------------------------


def test_salted_prompts_of_speculative_workers_are_found_in_their_caches() -> None:
    plans = aggregated(3, kind="held", args=("--eagle", "--cache"))
    with DynamoFleet(plans) as fleet, our_frontend(fleet) as ours:

        def cached() -> int:
            return sum(rank["cached_blocks"] for row in ours.workers() for rank in row["ranks"])

        def found(prompt: list[int], salted: dict[str, Any], placed: Placement) -> bool:
            dry = [fleet.frontend.dry_run(prompt, **salted) for _ in range(3)]
            return all(one.placement == placed for one in dry)

        for number in range(2):
            prompt, before = [3 + number, *range(3, 67)], cached()
            salted: dict[str, Any] = {"nvext": {"cache_salt": f"tenant {number}"}}
            first = ours.complete(prompt, max_tokens=2, **salted).placement
            wait(ours, lambda before=before: cached() == before + 4, "its blocks")
            for _ in range(3):
                assert ours.complete(prompt, max_tokens=2, **salted).placement == first
                assert ours.dry_run(prompt, **salted).placement == first
            # Dynamo's frontend reads the same events, a moment earlier or later.
            theirs = partial(found, prompt, salted, first)
            fleet.wait_until(theirs, "Dynamo's frontend to find the blocks")


# -- clients leave, workers die --------------------------------------------------------------------


def test_a_client_that_leaves_stops_its_worker_and_a_lost_stream_ends_with_an_error() -> None:
    with DynamoFleet(aggregated(1, kind="held")) as fleet, our_frontend(fleet) as ours:
        held = fleet.workers["worker-0"].held
        for hold in ("prefill", "decode"):
            held.hold(**{hold: True})
            before = len(held.requests())
            flight = ours.begin(messages=MESSAGES, max_tokens=4)
            until_now(lambda before=before: len(held.requests()) > before)  # type: ignore[misc]
            if hold == "decode":
                flight.wait_first()
            flight.disconnect()
            until_now(lambda: held.requests()[-1].state == "cancelled")
        wait(ours, ours.idle, "bookings to end")
        flight = ours.begin(messages=MESSAGES, max_tokens=4)
        flight.wait_first()
        fleet.kill("worker-0")
        answer = flight.result()
        assert [one["error"]["code"] for one in answer.chunks if "error" in one] == [500]
        assert not ours.complete(PROMPT).ok
        wait(ours, lambda: not ours.ready(), "the dead worker to be left out")


def test_streams_go_on_when_their_worker_is_killed() -> None:
    plans = aggregated(3, kind="held")
    with DynamoFleet(plans) as fleet, our_frontend(fleet, "--migration-limit", "2") as ours:
        for worker in fleet.workers.values():
            worker.held.hold(decode=True)
        usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
        with ThreadPoolExecutor(1) as threads:
            stream = ours.begin(messages=MESSAGES, max_tokens=5, **usage)
            stream.wait_first()
            whole = threads.submit(ours.chat, MESSAGES, max_tokens=5, timeout=60)

            def busy() -> list[str]:
                return [n for n, w in fleet.workers.items() if w.held.requests("decode")]

            # Both may be on one worker; what is killed is held again on another one.
            until_now(lambda: sum(len(fleet.workers[n].held.requests("decode")) for n in busy())
                      == 2)  # fmt: skip
            first = busy()[0]
            fleet.kill(first)
            until_now(lambda: sum(len(fleet.workers[n].held.requests("decode")) for n in busy())
                      == 2)  # fmt: skip
            sent = [one.tokens for w in fleet.workers.values() for one in w.held.requests()]
            fleet.kill(busy()[0])
            [last] = fleet.workers.values()
            until_now(lambda: len(last.held.requests("decode")) == 2)
            last.held.release()
            streamed, unary = stream.result(), whole.result()
        assert (streamed.status, unary.status) == (200, 200)
        [counted] = [c["usage"] for c in streamed.chunks if c.get("usage")]
        prompt = counted["prompt_tokens"]
        assert prompt + 1 in sent  # what was generated was sent on
        assert counted["completion_tokens"] == unary.body["usage"]["completion_tokens"] == 5
        assert unary.body["usage"]["prompt_tokens"] == prompt
        ends = [c["choices"][0]["finish_reason"] for c in streamed.chunks if c.get("choices")]
        assert ends[-1] == "length"
        assert ends.count("length") == 1
        wait(ours, lambda: len(ours.ready()) == 1, "the dead workers to be left out")


def test_a_worker_that_leaves_is_gone_at_once_and_a_new_one_is_served() -> None:
    plans = [*aggregated(2), WorkerPlan("late", late=True)]
    with DynamoFleet(plans, speedup=0) as fleet, our_frontend(fleet) as ours:
        gone = fleet.workers["worker-0"].instance_id
        fleet.kill("worker-0", signal.SIGTERM)
        wait(ours, lambda: gone not in ours.ready(), "the worker to leave")
        late = fleet.start_worker("late")
        wait(ours, lambda: late.instance_id in ours.ready(), "the late worker")
        assert {ours.complete([n, *PROMPT]).status for n in range(3, 23)} == {200}


# -- several models of one instance ----------------------------------------------------------------


def served(frontend: Frontend) -> set[str]:
    return {one["id"] for one in json.loads(frontend.get("/v1/models")[1])["data"]}


def test_adapters_of_an_instance_are_served_as_by_dynamo_and_one_of_its_endpoints_is() -> None:
    """Dynamo has a router for each endpoint of the instance; ours serves one, and names the
    other."""
    args = ("--model", "tiny=", "--model", "second=", "--lora", "law", "--lora", "code")
    script = {"key": 1, "chunks": [{"token_ids": [5, 6], "finish_reason": "stop"}]}
    prompt = f"@@{json.dumps(script)}@@"
    plans = [WorkerPlan("one", kind="scripted", args=args)]
    with DynamoFleet(plans) as fleet, our_frontend(fleet) as ours:
        fleet.wait_until(
            lambda: served(fleet.frontend) == {"tiny", "second", "law", "code"}, "all cards"
        )
        assert served(ours) == {"tiny", "law", "code"}
        record = fleet.directory / "one.jsonl"
        for name in ("tiny", "law", "code"):
            made = []
            for frontend in (fleet.frontend, ours):
                frontend.model = name
                answer = frontend.complete(prompt, max_tokens=3)
                assert answer.ok, (name, answer.body)
                assert answer.body["model"] == name
                body = json.loads(record.read_text().splitlines()[-1])["body"]
                made.append((body["model"], body["routing"].get("lora_name"), body["token_ids"]))
            assert made[0] == made[1]
            assert made[0][1] == (None if name == "tiny" else name)
        ours.model = "second"
        assert ours.complete(prompt).status == 404
        [why] = [it for (code, _), it in ours.conditions().items() if code == "WORKER_REJECTED"]
        assert (
            "serves second at dynamo.backend1.generate and tiny at dynamo.backend.generate" in why
        )


def test_an_adapter_without_its_base_model_is_not_served() -> None:
    args = ("--lora", "law")
    with DynamoFleet([], serves=False) as fleet, our_frontend(fleet) as ours:
        alone = WorkerPlan("alone", kind="scripted", args=(*args, "--no-base"))
        fleet.start_worker(alone, wait=False)

        def rejected() -> bool:
            return any(
                "adapter law: the card of its base" in it for it in ours.conditions().values()
            )

        wait(ours, rejected, "a condition")
        ours.model = "law"
        assert ours.complete("x").status == 404
        assert served(ours) == served(fleet.frontend) == set()
        # Beside it an instance with both.
        fleet.start_worker(WorkerPlan("both", kind="scripted", args=args), wait=False)
        fleet.wait_until(
            lambda: served(fleet.frontend) == {"tiny", "law"}, "both cards", seconds=30
        )
        wait(ours, lambda: served(ours) == {"tiny", "law"}, "both cards")
        assert rejected()
        assert len(ours.workers()) == 1


# -- prefill and decode ----------------------------------------------------------------------------


@pytest.mark.parametrize(("enforcement", "weight"), [("required", None), ("preferred", 0.85)])
def test_prefill_and_decode_in_one_zone(enforcement: str, weight: float | None) -> None:
    plans = two_zones(enforcement, weight)
    with DynamoFleet(plans, speedup=0) as fleet, our_frontend(fleet) as ours:
        for number in range(12):
            prompt = [3 + number, *PROMPT]
            answer = ours.complete(prompt, max_tokens=3, stream=number % 2 == 0)
            assert answer.ok, answer
            placed = answer.placement
            assert placed.prefill != placed.decode
            one, two = zones(fleet, [placed.prefill, placed.decode])
            assert one == two
        whole = ours.chat(MESSAGES, max_tokens=4)
        assert whole.body["usage"]["completion_tokens"] == 4
        fleet.kill("decode-a0", signal.SIGTERM)
        wait(ours, lambda: len(ours.ready()) == 3, "the worker to leave")
        pinned = {"prefill_worker_id": fleet.workers["prefill-a0"].instance_id}
        answer = ours.complete(PROMPT, nvext=pinned)
        if enforcement == "required":
            assert answer.status == 503
        else:
            assert zones(fleet, [answer.placement.decode]) == ["zone-b"]


def test_a_bootstrap_pair_gets_both_halves_at_once() -> None:
    """Workers like SGLang's meet at the address of the prefill worker's card."""
    ports = [free_port(), free_port()]
    kind = ("--engine-type", "sglang")
    plans = [
        *(
            WorkerPlan(f"prefill-{n}", "prefill", args=(*kind, "--bootstrap-ports", str(port)))
            for n, port in enumerate(ports)
        ),
        *(WorkerPlan(f"decode-{n}", "decode", args=kind) for n in range(2)),
    ]
    with DynamoFleet(plans, speedup=0) as fleet, our_frontend(fleet) as ours:

        def ask(number: int) -> None:
            body: dict[str, Any] = {"max_tokens": 5, "stream": number % 2 == 0}
            answer = ours.complete([3 + number, *PROMPT], timeout=60, **body)
            assert answer.ok, (answer, fleet.logs())
            placed = answer.placement
            roles = [fleet.worker_of(one).plan.role for one in (placed.prefill, placed.decode)]
            assert roles == ["prefill", "decode"]

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(24)))
        whole = ours.chat(MESSAGES, max_tokens=4)
        theirs = fleet.frontend.chat(MESSAGES, max_tokens=4)
        assert whole.body["usage"]["completion_tokens"] == 4
        assert whole.body["usage"]["prompt_tokens"] == theirs.body["usage"]["prompt_tokens"]
        wait(ours, ours.idle, "bookings of both halves to end")
        assert not ours.conditions()


# -- other planes ----------------------------------------------------------------------------------


def test_etcd_and_nats_and_etcd_gone_for_a_while(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    etcd.start()
    try:
        with (
            DynamoFleet(
                aggregated(2),
                discovery="etcd",
                etcd_endpoints=etcd.url,
                event_plane="nats",
                environment={"DYN_REQUEST_PLANE": "nats"},
                speedup=0,
            ) as fleet,
            our_frontend(fleet) as ours,
        ):
            assert all(one["endpoint"].startswith("nats") for one in ours.workers())
            first = ours.complete(PROMPT, max_tokens=3)
            assert first.ok, first
            wait(ours, lambda: ours.dry_run(PROMPT).placement == first.placement, "the index")
            assert ours.chat(MESSAGES, stream=True, max_tokens=3).ok

            def rejected() -> list[str]:
                return [name for code, name in ours.conditions() if code == "WORKER_REJECTED"]

            # Entries that no Dynamo wrote cost nothing but a condition each.
            junk = [f"v1/{bucket}/dynamo/backend/generate/b0" for bucket in ("mdc", "instances")]
            for key in junk:
                etcd.put(key, b"{not json")
            wait(ours, lambda: len(rejected()) == len(junk), "the conditions")
            assert ours.complete(PROMPT).ok
            for key in junk:
                etcd.delete(key)
            wait(ours, lambda: not rejected(), "the conditions to end")

            def interrupted() -> bool:
                return any(code == "DISCOVERY_INTERRUPTED" for code, _ in ours.conditions())

            etcd.kill()
            wait(ours, interrupted, "the condition")
            assert ours.complete(PROMPT).ok
            etcd.start()
            wait(ours, lambda: not interrupted(), "discovery to be read again")
            assert ours.complete(PROMPT).ok
    finally:
        etcd.close()


def test_nats_gone_for_a_while(tmp_path: Path) -> None:
    """What was accepted is answered, a condition has the reason, and then all is as before."""
    nats = NatsServer(tmp_path)
    asyncio.run(nats.start())
    try:
        with (
            DynamoFleet(
                aggregated(2, kind="held"),
                event_plane="nats",
                nats_server=f"nats://{nats.address}",
                environment={"DYN_REQUEST_PLANE": "nats"},
            ) as fleet,
            our_frontend(fleet) as ours,
        ):
            for worker in fleet.workers.values():
                worker.held.hold(decode=True)
            streamed = ours.begin(messages=MESSAGES, max_tokens=4)
            streamed.wait_first()
            with ThreadPoolExecutor(1) as threads:
                whole = threads.submit(ours.chat, MESSAGES, max_tokens=4, timeout=60)
                held = [worker.held for worker in fleet.workers.values()]
                until_now(lambda: sum(len(one.requests("decode")) for one in held) == 2)
                asyncio.run(nats.kill())

                def interrupted() -> bool:
                    found = {code for code, _ in ours.conditions()}
                    return bool(found & {"STREAM_DISCONNECTED", "REQUEST_PLANE_LOST"})

                wait(ours, lambda: ("REQUEST_PLANE_LOST", "NATS") in ours.conditions(), "NATS lost")
                # The workers are not to blame, however many requests fail.
                with ThreadPoolExecutor(12) as clients:
                    refusals = list(clients.map(lambda _: ours.complete(PROMPT), range(12)))
                for refused in refusals:
                    assert refused.status == 503
                    assert "needs NATS, which is not reachable" in refused.body["error"]["message"]
                assert not [name for code, name in ours.conditions() if code == "WORKER_EJECTED"]
                for one in held:
                    one.hold()
                    one.release()
                assert (streamed.result().status, whole.result().status) == (200, 200)
            asyncio.run(nats.start())
            wait(ours, lambda: not interrupted(), "NATS to be read again")
            pins = [{"backend_instance_id": one.instance_id} for one in fleet.workers.values()]
            for pin in pins:  # each of them connects again by itself
                wait(ours, lambda: ours.complete(PROMPT, nvext=pin, timeout=60).ok, "an answer")  # noqa: B023
            assert {ours.complete([n, *PROMPT]).status for n in range(3, 13)} == {200}
            wait(ours, ours.idle, "bookings to end and caches to be read")
    finally:
        asyncio.run(nats.kill())

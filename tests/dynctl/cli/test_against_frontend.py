"""The command line against real processes: two engines and a frontend, all started by dynctl."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynctl.tokenization import DEMO_MODEL_DIR
from tests.forks import Program
from tests.waiting import patience, until_now

PROMPT = "Explain how a router decides which worker should serve a request, and why that matters."
TOKEN = "a-token-of-this-test"


def start(*arguments: str, errors: Path) -> tuple[Program, dict[str, Any]]:
    """A dynctl process, and the JSON line that it prints when it is ready."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "DYNCTL_"))}
    with errors.open("wb") as stderr:
        process = Program(["dynctl", *arguments], stdout=subprocess.PIPE, stderr=stderr, env=clean)
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], patience(60))
    line = process.stdout.readline() if ready else b""
    if not line:
        process.kill()
        process.wait()
        raise AssertionError(f"{arguments}: not ready\n{errors.read_text()}")
    found: dict[str, Any] = json.loads(line)
    return process, found


def all_read(url: str, token: str) -> None:
    """Until a frontend has read its engines: one may have been late for its first probe."""
    headers = {"authorization": f"Bearer {token}"}

    def ready() -> bool:
        answer = httpx.get(f"{url}/v1/workers", headers=headers, trust_env=False, timeout=10)
        return all(row["status"] == "ready" for row in answer.json()["workers"])

    until_now(ready, 20)


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a frontend before a prefill and a decode engine in zone-a."""
    logs = tmp_path_factory.mktemp("logs")
    processes = []
    try:
        workers = []
        for name, role in (("prefill-a0", "prefill"), ("decode-a0", "decode")):
            process, ready = start(
                "serve", "engine", "--name", name, "--role", role, "--speedup-ratio", "1000",
                errors=logs / f"{name}.log",
            )  # fmt: skip
            processes.append(process)
            spec = f"{ready['url']},name={name},zone=zone-a,kv-events={ready['kv_events']}"
            workers += ["--worker", f"{spec},replay={ready['replay']}"]
        process, ready = start(
            "serve", "frontend", "--announce", "--http-port", "0", "--api-token", TOKEN,
            "--model-path", str(DEMO_MODEL_DIR), "--router-kv-transfer-topology-level", "zone",
            "--router-kv-transfer-mismatch-policy", "fail", *workers,
            errors=logs / "frontend.log",
        )  # fmt: skip
        processes.append(process)
        all_read(ready["url"], TOKEN)
        yield ready["url"]
        for process in processes:
            process.terminate()
        # An engine holds KV that nobody pulled for up to 30 s before it goes.
        assert [process.wait(patience(60)) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def asks(dynctl, frontend, monkeypatch):
    """Run a command with the frontend and its token from the environment."""
    monkeypatch.setenv("DYNCTL_FRONTEND", frontend)
    monkeypatch.setenv("DYNCTL_TOKEN", TOKEN)
    return dynctl


def test_route_queries_the_frontend(asks):
    ran = asks("route", PROMPT, "--explain")
    assert (ran.code, ran.err) == (0, "")
    assert "answer   prefill-a0 -> decode-a0, both in zone-a" in ran.out
    assert "required dynamo.topology/zone=zone-a  (router policy)" in ran.out
    result = asks("route", PROMPT, "-o", "json").json
    assert result["winner"]["decode"]["worker"] == "decode-a0"


def test_route_with_constraints_pins_and_tokens(asks, tmp_path):
    line = ["route", PROMPT, "-o", "json"]
    refused = asks(*line, "--require-taint", "dynamo.topology/zone=zone-b")
    assert refused.code == 1
    assert refused.json["prefill"]["outcome"] == "no_eligible_worker"
    preferred = asks(*line, "--prefer-taint", "dynamo.topology/zone=zone-a=0.5").json
    assert preferred["prefill"]["candidates"][0]["multiplier"] == pytest.approx(0.63, abs=0.01)
    pinned = asks(*line, "--pin-prefill", "prefill-a0", "--pin-decode", "e-a0")
    assert pinned.code == 0
    tokens = tmp_path / "tokens"
    tokens.write_text("1 2 3")
    assert asks("route", "--tokens", tokens, "-o", "json").json["tokens"] == 3


def test_what_if_and_saved_views_work_on_the_frontends_state(asks, dynctl, tmp_path, monkeypatch):
    heavier = asks("route", PROMPT, "-o", "json", "--set", "load.prefill-a0.prefill_tokens=+1600")
    assert heavier.json["prefill"]["candidates"][0]["active_prefill_tokens"] == 1600
    path = tmp_path / "view.json"
    first = asks("route", PROMPT, "--explain", "--save-view", path)
    assert first.code == 0
    monkeypatch.delenv("DYNCTL_FRONTEND")
    assert dynctl("route", PROMPT, "--explain", "--view", path).out == first.out


def test_what_if_with_a_text_where_only_the_engines_have_a_tokenizer(dynctl, tmp_path):
    engine, ready = start(
        "serve", "engine", "--name", "one", "--speedup-ratio", "1000", errors=tmp_path / "engine"
    )
    try:
        frontend, served = start(
            "serve", "frontend", "--http-port", "0", "--announce", "--worker",
            f"{ready['url']},name=one,kv-events={ready['kv_events']},replay={ready['replay']}",
            errors=tmp_path / "frontend",
        )  # fmt: skip
        try:
            url = served["url"]
            until_now(lambda: "ready" in dynctl("workers", "list", "--frontend", url).out, 30)
            line = ["route", PROMPT, "--frontend", url, "-o", "json"]
            plain = dynctl(*line).json
            heavier = dynctl(*line, "--set", "load.one.prefill_tokens=+160")
            assert heavier.code == 0, heavier.err
            assert heavier.json["tokens"] == plain["tokens"]
            [candidate] = heavier.json["decode"]["candidates"]
            assert candidate["active_prefill_tokens"] == 160
            wrong = dynctl(*line, "--set", "router_temprature=1")
            assert (wrong.code, "router_temprature" in wrong.err) == (2, True)
        finally:
            frontend.terminate()
            frontend.wait(patience(20))
            assert frontend.stdout is not None
            frontend.stdout.close()
    finally:
        engine.terminate()
        engine.wait(patience(20))
        assert engine.stdout is not None
        engine.stdout.close()


def test_workers_list_and_show(asks):
    out = asks("workers", "list").out
    assert [line.split()[:4] for line in out.splitlines()[1:3]] == [
        ["prefill-a0", "prefill", "zone-a", "ready"],
        ["decode-a0", "decode", "zone-a", "ready"],
    ]
    shown = asks("workers", "show", "prefill-a0")
    assert "domains       zone=zone-a" in shown.out


def test_check_shows_the_conditions_of_the_frontend(asks, frontend):
    headers = {"authorization": f"Bearer {TOKEN}"}  # without it the subjects are left out
    answer = httpx.get(f"{frontend}/health", headers=headers).json()
    in_force = {(one["code"], one["subject"]): one["message"] for one in answer["conditions"]}
    assert in_force.keys() == {("DYT0902", "zone=zone-a")}
    ran = asks("check", "-o", "json")
    assert ran.code == 0
    checks = next(one["checks"] for one in ran.json["sections"] if one["name"] == "fleet")
    found = {
        (check["code"], one["subject"]): one["value"]
        for check in checks
        for one in check["findings"]
    }
    assert found == in_force
    assert asks("check", "--fail-on", "warn").code == 1
    assert "WARN DYT0902" in asks("check").out


def test_thresholds_are_set_live_and_unset(asks):
    dry = asks("thresholds", "set", "--active-prefill-tokens", "5", "--dry-run", "-o", "json").json
    assert dry["applied"] is False
    assert asks("thresholds", "get", "-o", "json").json["thresholds"][0][
        "active_prefill_tokens_threshold"
    ] is None  # fmt: skip
    ran = asks("thresholds", "set", "--active-prefill-tokens", "5", "--active-decode-blocks", ".5")
    assert "off -> 5" in ran.out
    row = asks("thresholds", "get", "-o", "json").json["thresholds"][0]
    assert row["active_prefill_tokens_threshold"] == 5
    cleared = asks(
        "thresholds", "set", "demo", "--active-prefill-tokens", "none",
        "--active-decode-blocks", "none", "-o", "json",
    ).json  # fmt: skip
    assert cleared["before"]["active_prefill_tokens_threshold"] == 5
    assert cleared["after"]["active_prefill_tokens_threshold"] is None
    assert cleared["after"]["active_decode_blocks_threshold"] is None


def test_config_show_and_version(asks, frontend):
    rows = asks("config", "show", "--frontend", frontend, "-o", "json").json["settings"]
    found = {row["name"]: row for row in rows}
    assert found["kv_transfer_domain"]["value"] == "zone"
    assert found["kv_transfer_domain"]["source"] == "flag --router-kv-transfer-topology-level"
    assert found["kv_transfer_enforcement"]["source"].startswith("flag --router-kv-transfer-mis")
    peers = asks("version", "-o", "json").json["peers"]
    assert [(peer["url"], peer["error"]) for peer in peers] == [(frontend, None)]


def test_why_explains_a_served_request(asks, frontend, tmp_path):
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    answer = httpx.post(
        f"{frontend}/v1/chat/completions", json=body, trust_env=False, timeout=patience(30)
    )
    assert answer.status_code == 200
    ran = asks("why", answer.headers["x-dynctl-decision"])
    assert (ran.code, ran.err) == (0, "")
    assert "answer   prefill-a0 -> decode-a0" in ran.out
    body["nvext"] = {"routing_constraints": {"required_taints": ["gpu=none"]}}
    refused = httpx.post(
        f"{frontend}/v1/chat/completions", json=body, trust_env=False, timeout=patience(30)
    )
    assert refused.status_code == 503
    saved = tmp_path / "refusal.json"
    saved.write_text(refused.text)
    for given in (refused.headers["x-dynctl-decision"], saved):
        ran = asks("why", given)
        assert ran.code == 1
        assert "lacks gpu=none" in ran.out
    last = asks("why", "--last", "-o", "json")
    assert last.code == 1
    assert last.json["id"] == refused.headers["x-dynctl-decision"]
    by_end = asks("why", refused.headers["x-dynctl-decision"][-8:], "-o", "json")
    assert by_end.json["id"] == refused.headers["x-dynctl-decision"]
    assert asks("why", "x", "--last").code == 2
    listed = asks("why", "-o", "name")
    assert (listed.code, listed.out) == (0, asks("decisions", "list", "-o", "name").out)
    assert refused.headers["x-dynctl-decision"] in listed.out.split()
    unknown = asks("why", "nobody")
    assert (unknown.code, "nobody" in unknown.err) == (2, True)
    assert "dynctl why without an ID lists the last decisions" in unknown.err


def test_a_missing_token_is_reported(dynctl, frontend):
    ran = dynctl("route", PROMPT, "--frontend", frontend)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines() == [
        f"error: {frontend}/v1/route needs a token (401)",
        "  set DYNCTL_TOKEN, or give --token TOKEN",
    ]
    assert TOKEN not in ran.err
    assert dynctl("route", PROMPT, "--frontend", frontend, "--token", TOKEN).code == 0


def test_replicas_are_queried_in_turn_and_all_set_or_none(asks, frontend):
    dead = "http://127.0.0.1:1"
    both = ["--frontend", dead, "--frontend", frontend]
    assert asks("workers", "list", "-o", "name", *both).out.split() == ["prefill-a0", "decode-a0"]
    ran = asks("thresholds", "set", "--active-prefill-tokens", "none", *both)
    assert ran.code == 3
    assert "thresholds were set on 0 of 2 frontends, nothing is changed" in ran.err


def test_advice_is_about_the_requests_of_the_frontend(frontend: str, asks: Any) -> None:
    def advice() -> dict[str, Any]:
        found = asks("config", "show", "--advise", "--frontend", frontend, "-o", "json")
        [one] = found.json["advice"]
        return dict(one)

    before = advice()["requests"]
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    for _ in range(2):
        httpx.post(
            f"{frontend}/v1/chat/completions", json=body, timeout=patience(60)
        ).raise_for_status()
    until_now(lambda: advice()["requests"] >= before + 2)
    one = advice()
    assert one["workload"] == "mixed"
    assert 10 < one["input_tokens"] < 200
    assert {row["name"]: row["now"] for row in one["settings"]}["prefill_load_scale"] == 1.0
    shown = asks("config", "show", "--advise", "--frontend", frontend).out
    assert "ADVISED" in shown
    assert "mixed; prompts have" in shown


def test_decisions_are_listed_filtered_and_explained_by_the_end_of_an_id(asks, frontend):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    answer = httpx.post(f"{frontend}/v1/chat/completions", json=body, timeout=patience(60))
    decision = answer.headers["x-dynctl-decision"]
    heading, first, *rest = asks("decisions").out.splitlines()
    assert heading.split() == [
        *("TIME", "ID", "MODEL", "PREFILL", "DECODE", "CACHED", "COST", "OUTCOME", "WHY"),
    ]
    cells = first.split()
    assert decision.endswith(cells[1])
    assert cells[3:7] == ["prefill-a0", "(zone-a)", "decode-a0", "(zone-a)"]
    assert rest[-1] == f"explain one: dynctl why {cells[1]}"
    localhost = frontend.replace("127.0.0.1", "localhost")
    *_, last = asks("decisions", "--frontend", localhost).out.splitlines()
    assert last == f"explain one: dynctl why {cells[1]} --frontend {localhost}"
    assert cells[9] == "200"
    url, headers = f"{frontend}/v1/decisions/{decision}", {"authorization": f"Bearer {TOKEN}"}
    kept = httpx.get(url, headers=headers, timeout=patience(60)).json()
    assert asks("why", cells[1], "-o", "json").json == kept
    assert "outcome  200, complete; " in asks("why", cells[1]).out
    filters = (["--zone", "zone-a"], ["--worker", "l-a0"], ["--outcome", "complete"])
    for keeps in (*filters, ["--model", "demo"]):
        assert asks("decisions", *keeps, "--limit", "1", "-o", "name").out.strip() == decision
    for drops in (["--zone", "zone-b"], ["--moved"], ["--model", "other"], ["--outcome", "cut"]):
        ran = asks("decisions", *drops)
        assert (ran.code, "no decisions match" in ran.out) == (0, True), drops
    refused = asks("decisions", "--refused", "-o", "json").json["decisions"]
    assert {row["outcome"] for row in refused} & {"selected"} == set()
    unknown = asks("decisions", "--worker", "decode-zz")
    assert (unknown.code, "unknown worker 'decode-zz'" in unknown.err) == (2, True)
    for wrong in (["--outcome", "late"], ["--outcome", "cut", "--refused"]):
        ran = asks("decisions", *wrong)
        assert (ran.code, "expected one of" in ran.err) == (2, True)


def test_decisions_tail_shows_those_that_are_made_while_it_runs(frontend: str, tmp_path: Path):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    environment = {**os.environ, "DYNCTL_FRONTEND": frontend, "DYNCTL_TOKEN": TOKEN}
    tail = Program(
        ["dynctl", "decisions", "tail", "--tail", "0", "--limit", "2",
         "-o", "jsonl"],
        stdout=subprocess.PIPE, env=environment, text=True,
    )  # fmt: skip
    made: set[str] = set()
    assert tail.stdout is not None
    try:
        shown: list[str] = []

        def both() -> bool:
            answer = httpx.post(f"{frontend}/v1/chat/completions", json=body, timeout=patience(60))
            made.add(answer.headers["x-dynctl-decision"])
            return tail.poll() is not None

        until_now(both, 30)
        shown = [json.loads(line)["id"] for line in tail.stdout.read().splitlines()]
        assert len(shown) == 2
        assert set(shown) <= made
        assert tail.wait(patience(10)) == 0
    finally:
        tail.kill()
        tail.wait()
        tail.stdout.close()


def test_workers_are_cordoned_drained_and_returned(asks, frontend):
    ran = asks("workers", "cordon", "l-a0", "--dry-run")
    assert (ran.code, "prefill-a0 would be cordoned: no new requests" in ran.out) == (0, True)
    ran = asks("workers", "drain", "prefill-a0", "--wait", "30s", "-o", "json")
    assert (ran.code, ran.json["drained"], ran.json["running"]) == (0, True, 0)
    assert asks("workers", "list", "-l", "name=prefill-a0").out.split()[12] == "cordoned"
    assert "cordoned by the operator" in asks("workers", "show", "prefill-a0").out
    assert "cordoned by the operator" in asks("top", "--once").out
    assert "WORKER_CORDONED" in asks("check").out
    ran = asks("workers", "uncordon", "prefill-a0")
    assert (ran.code, ran.out) == (0, "prefill-a0 may be chosen again\n")
    assert asks("workers", "uncordon", "prefill-a0").out == "prefill-a0 was not cordoned\n"


def test_only_frontends_of_ours_have_cordons(dynctl):
    for source in (["--demo"], ["--discovery", "file", "--file-kv", "/nowhere"]):
        ran = dynctl("workers", "cordon", "a", *source)
        assert (ran.code, "workers cordon" in ran.err) == (2, True), ran.err

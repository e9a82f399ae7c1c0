"""`dynctl thresholds get`, `set` and `watch` over several frontends, ours and Dynamo's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from dynctl.documents.thresholds import CanaryVerdict
from dynctl.sources.client import FrontendClient
from dynctl.sources.thresholds.canary import Canary, read_conditions
from dynctl.sources.thresholds.change import change_thresholds
from dynctl.sources.thresholds.replicas import Replica as Replicated
from router_core import ThresholdsSet
from tests.dynctl.cli.threshold_fleets import A, B, DynamoStandIn, Replica, Replicas
from tests.forks import Program
from tests.kube import crds, deployment
from tests.kube.api_server import ApiServer
from tests.kube.objects.discovery import MODEL
from tests.waiting import patience, until_now

DECODE = "active_decode_blocks_threshold"
TOKENS = "active_prefill_tokens_threshold"
DEAD = "http://127.0.0.1:1"


@pytest.fixture
def fleet() -> Iterator[Replicas]:
    with Replicas() as replicas:
        yield replicas


@pytest.fixture
def two(fleet: Replicas) -> tuple[Replica, Replica]:
    return fleet.add(), fleet.add()


@pytest.fixture
def dynamo() -> Iterator[DynamoStandIn]:
    with DynamoStandIn() as server:
        yield server


def named(*replicas: Replica | DynamoStandIn | str) -> list[str]:
    urls = [one if isinstance(one, str) else one.url for one in replicas]
    return [word for url in urls for word in ("--frontend", url)]


def set_directly(replica: Replica, **values: float | None) -> None:
    replica.apply(ThresholdsSet("tiny", values))


# -- get -------------------------------------------------------------------------------------------


def test_get_has_a_row_a_replica_and_they_agree(dynctl, two):
    for one in two:
        set_directly(one, **{DECODE: 0.5})
    ran = dynctl("thresholds", "get", *named(*two), "-o", "json")
    assert (ran.code, ran.json["agree"], ran.json["signals"]) == (0, True, None)
    rows = [(row["replica"], row["model"], row[DECODE]) for row in ran.json["thresholds"]]
    assert rows == [(one.url, "tiny", 0.5) for one in two]
    assert all(row["differs"] == [] for row in ran.json["thresholds"])


def test_replicas_that_disagree_are_marked_and_exit_1(dynctl, fleet):
    three = [fleet.add() for _ in range(3)]
    for one in three:
        set_directly(one, **{TOKENS: 500})
    set_directly(three[1], **{TOKENS: 700})
    ran = dynctl("thresholds", "get", *named(*three))
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert [("!= 700" in line, "500" in line) for line in lines[1:4]] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    assert "the replicas have different thresholds" in ran.out
    rows = dynctl("thresholds", "get", *named(*three), "-o", "json").json["thresholds"]
    assert [row["differs"] for row in rows] == [[], [TOKENS], []]


def test_a_replica_that_lacks_the_model_disagrees(dynctl, fleet):
    serves, lacks = fleet.add(), fleet.add(workers=())
    ran = dynctl("thresholds", "get", *named(serves, lacks))
    assert (ran.code, "it does not serve the model" in ran.out) == (1, True)


def test_a_replica_that_does_not_answer_is_a_row_and_exit_3(dynctl, fleet):
    one = fleet.add()
    ran = dynctl("thresholds", "get", *named(DEAD, one), "-o", "json")
    assert (ran.code, ran.json["agree"]) == (3, True)
    answered, silent = ran.json["thresholds"]
    assert (answered["replica"], answered["problem"]) == (one.url, "")
    assert (silent["replica"], silent["model"]) == (DEAD, None)
    assert "does not answer" in silent["problem"]
    alone = dynctl("thresholds", "get", *named(DEAD))
    assert (alone.code, alone.out) == (3, "")


def test_workers_shows_each_signal_with_limit_latch_and_effect(dynctl, two):
    for one in two:
        set_directly(one, **{DECODE: 0.5})
    two[0].report(A, 3000)
    two[0].report(B, 3000, rank=1)
    ran = dynctl("thresholds", "get", *named(*two), "--workers", "-o", "json")
    assert ran.code == 0
    rows = {
        (row["replica"], row["worker"], row["dp_rank"], row["signal"]): row
        for row in ran.json["signals"]
    }
    used = "used KV blocks reported"
    over = rows[two[0].url, "a", 0, used]
    assert (over["value"], over["limit"], over["setting"]) == (3000, 2048, 0.5)
    assert (over["latch"], over["acts"], over["busy"], over["why"]) == ("latched", True, True, "")
    assert 0 <= over["age_s"] < 60
    # One busy rank of two leaves the worker in use.
    partly = rows[two[0].url, "b", 1, used]
    assert (partly["over"], partly["acts"], partly["busy"]) == (True, False, False)
    assert "another rank of the worker is calm" in partly["why"]
    booked = rows[two[0].url, "a", 0, "active decode blocks booked here"]
    assert (booked["latch"], booked["age_s"], booked["over"]) == ("live", None, False)
    # Reports reach each frontend by itself: the other one heard none.
    silent = rows[two[1].url, "a", 0, used]
    assert (silent["value"], silent["latch"], silent["acts"]) == (None, "empty", False)
    assert silent["why"] == "the worker never reported it"
    table = dynctl("thresholds", "get", *named(*two), "-o", "wide").out
    assert "1 of 6 ranks busy" in table
    assert "active_decode_blocks_threshold" in table


def test_a_card_without_a_total_shows_why_the_threshold_has_no_effect(dynctl, fleet):
    from router_core import Worker

    one = fleet.add(workers=(Worker(5, "bare", "tiny"),))
    set_directly(one, **{DECODE: 0.1, "active_prefill_tokens_threshold_frac": 0.5})
    one.report(5, 1_000_000)
    ran = dynctl("thresholds", "get", *named(one), "--workers", "-o", "json")
    rows = {(row["threshold"], row["signal"]): row for row in ran.json["signals"]}
    used = rows[DECODE, "used KV blocks reported"]
    assert (used["limit"], used["over"], used["acts"]) == (None, False, False)
    assert "has no total_kv_blocks" in used["why"]
    tokens = rows["active_prefill_tokens_threshold_frac", "active prefill tokens"]
    assert (tokens["limit"], "10,000,000 is used" in tokens["why"]) == (5_000_000, True)


@pytest.mark.seed("smart-routing-guide-0.9: thresholds: not set")
def test_workers_without_a_threshold(dynctl, fleet):
    out = dynctl("thresholds", "get", *named(fleet.add()), "--workers").out
    assert "no threshold is set, so no rank is busy" in out


# -- set -------------------------------------------------------------------------------------------


@pytest.mark.seed("smart-routing-guide-0.9: busy workers: /busy_threshold")
def test_set_writes_every_replica_and_reads_it_back(dynctl, two):
    ran = dynctl("thresholds", "set", *named(*two), "--active-prefill-tokens", "5", "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    assert (ran.json["applied"], ran.json["agree"]) == (True, True)
    assert [(one["replica"], one["state"]) for one in ran.json["replicas"]] == [
        (one.url, "set") for one in two
    ]
    assert [one["after"][TOKENS] for one in ran.json["replicas"]] == [5, 5]
    assert [one.thresholds()[TOKENS] for one in two] == [5, 5]


def test_a_dry_run_names_the_replica_whose_rank_would_turn(dynctl, two):
    two[1].report(A, 3000)
    line = ["thresholds", "set", *named(*two), "--active-decode-blocks", "0.5", "--dry-run"]
    ran = dynctl(*line)
    assert ran.code == 0
    assert "1 rank becomes busy:" in ran.out
    assert f"[{two[1].url}]" in " ".join(ran.out.split())
    effects = dynctl(*line, "-o", "json").json["ranks"]
    turned = [(one["replica"], one["worker"]) for one in effects if one["after"]]
    assert turned == [(two[1].url, "a")]
    assert [one.posts for one in two] == [[], []]


def test_nothing_is_written_where_one_is_seen_to_fail(dynctl, two):
    ran = dynctl("thresholds", "set", *named(two[0], DEAD), "--active-prefill-tokens", "5")
    assert (ran.code, ran.out) == (3, "")
    assert "set on 0 of 2 frontends, nothing is changed" in ran.err
    assert two[0].posts == []


def refused(number: int) -> web.Response:
    return web.json_response({"error": "the disk is full"}, status=500)


def test_the_others_are_set_back_when_one_fails(dynctl, two):
    for one in two:
        set_directly(one, **{TOKENS: 100})
    two[1].on_post = refused
    line = ["thresholds", "set", *named(*two), "--active-prefill-tokens", "5", "-o", "json"]
    ran = dynctl(*line, "--active-decode-blocks", "0.5")
    assert ran.code == 3
    assert [one["state"] for one in ran.json["replicas"]] == ["set back", "failed"]
    assert ran.json["applied"] is False
    assert "the disk is full" in ran.json["replicas"][1]["problem"]
    assert "the others were set back" in ran.err
    assert [(one.thresholds()[TOKENS], one.thresholds()[DECODE]) for one in two] == [
        (100, None)
    ] * 2


def test_a_replica_that_wants_another_token_has_the_others_set_back(dynctl, fleet):
    mine, other = fleet.add(token="mine"), fleet.add(token="another")
    ran = dynctl(
        "thresholds", "set", *named(mine, other), "--token", "mine", "--active-prefill-tokens", "5"
    )
    assert (ran.code, "refuses the token (401)" in ran.err) == (2, True)
    assert [one.thresholds()[TOKENS] for one in (mine, other)] == [None, None]


def test_partial_keeps_what_could_be_set_and_exits_1(dynctl, two):
    two[1].on_post = refused
    line = ["thresholds", "set", *named(*two, DEAD), "--active-prefill-tokens", "5"]
    ran = dynctl(*line, "--partial", "-o", "json")
    assert ran.code == 1
    assert [one["state"] for one in ran.json["replicas"]] == ["set", "failed", "failed"]
    assert (ran.json["applied"], ran.json["agree"]) == (True, False)
    assert "set on 1 of 3 frontends" in ran.err
    assert [one.thresholds()[TOKENS] for one in two] == [5, None]


def test_thresholds_that_cannot_be_restored_are_reported_with_exit_1(dynctl, two):
    two[0].on_post = lambda number: refused(number) if number > 1 else None
    two[1].on_post = refused
    ran = dynctl("thresholds", "set", *named(*two), "--active-prefill-tokens", "5", "-o", "json")
    assert ran.code == 1
    assert [one["state"] for one in ran.json["replicas"]] == ["left over", "failed"]
    assert f"not set back: {two[0].url}" in ran.err


def test_another_operators_value_is_not_overwritten_by_the_roll_back(dynctl, two):
    for one in two:
        set_directly(one, **{TOKENS: 100, DECODE: 0.9})

    def refused_while_another_sets_the_first(number: int) -> web.Response:
        set_directly(two[0], **{TOKENS: 77})
        return refused(number)

    two[1].on_post = refused_while_another_sets_the_first
    line = ["thresholds", "set", *named(*two), "--active-prefill-tokens", "5"]
    ran = dynctl(*line, "--active-decode-blocks", "0.5", "-o", "json")
    assert ran.code == 1
    assert [one["state"] for one in ran.json["replicas"]] == ["left over", "failed"]
    assert f"{TOKENS} is 77, which this command did not set" in ran.json["replicas"][0]["problem"]
    assert "not set back to 100" in ran.err
    assert (two[0].thresholds()[TOKENS], two[0].thresholds()[DECODE]) == (77, 0.9)


def test_a_replica_that_takes_it_and_holds_another_value_is_found_out(dynctl, two):
    two[1].on_post = lambda number: web.json_response({"model": "tiny", TOKENS: 5})
    ran = dynctl("thresholds", "set", *named(*two), "--active-prefill-tokens", "5", "-o", "json")
    assert ran.code == 3
    assert f"{TOKENS} is None after {TOKENS} was set to 5" in ran.err
    assert [one.thresholds()[TOKENS] for one in two] == [None, None]


def test_replicas_that_differ_in_something_else_exit_1_after_a_set(dynctl, two):
    set_directly(two[0], **{DECODE: 0.5})
    ran = dynctl("thresholds", "set", *named(*two), "--active-prefill-tokens", "5")
    assert (ran.code, "the replicas have different thresholds" in ran.err) == (1, True)
    assert [one.thresholds()[TOKENS] for one in two] == [5, 5]


def test_wait_ends_when_every_replica_acts(dynctl, two):
    for one in two:
        one.report(A, 3000)
    line = ["thresholds", "set", *named(*two), "--active-decode-blocks", "0.5", "--wait", "20s"]
    ran = dynctl(*line, "-o", "json")
    assert ran.code == 0
    waited = ran.json["waited"]
    assert (waited["acts"], waited["pending"], waited["untold"]) == (True, [], [])
    assert "in effect on every replica" in dynctl(*line).out


# -- Dynamo ----------------------------------------------------------------------------------------


def test_a_dynamo_frontend_alone_is_read_and_its_workers_are_known_by_id(dynctl, dynamo):
    dynamo.held[TOKENS] = 100
    dynamo.own = 150
    ran = dynctl("thresholds", "get", *named(dynamo), "--workers", "-o", "json")
    assert ran.code == 0
    assert ran.json["thresholds"][0][TOKENS] == 100
    own, reported = ran.json["signals"]
    assert (own["worker"], own["value"], own["over"], own["acts"]) == ("7", 150, True, True)
    assert own["busy"] is None
    assert "do not report it" in reported["why"]
    assert any("--ask" in note for note in ran.json["notes"])
    assert dynamo.chats == []


def test_ask_shows_a_latch_that_no_known_value_explains(dynctl, dynamo):
    dynamo.held[DECODE] = 0.5
    dynamo.report(90)
    dynamo.held[DECODE] = 0.95
    ran = dynctl("thresholds", "get", *named(dynamo), "--ask", "-o", "json")
    rows = {row["signal"]: row for row in ran.json["signals"]}
    used = rows["used KV blocks reported"]
    assert (used["busy"], used["latch"], used["acts"]) == (True, "latched", True)
    assert "frees the worker at the next report" in used["why"]
    assert [chat["backend_instance_id"] for chat in dynamo.chats] == [7]
    assert all(chat["annotations"] == ["query_instance_id:"] for chat in dynamo.chats)


def test_a_frontend_that_would_really_run_a_dry_run_gets_none(dynctl):
    with DynamoStandIn(kv=False) as server:
        server.held[DECODE] = 0.5
        ran = dynctl("thresholds", "get", *named(server), "--ask")
        assert (ran.code, server.chats) == (0, [])
        assert "lists no workers: not in kv mode" in " ".join(ran.out.split())


def report_once_set(dynamo, threshold: float, blocks: int) -> None:
    """A worker reports after the threshold has reached the frontend, however long that takes."""
    deadline = time.monotonic() + patience(20)
    while dynamo.held.get(DECODE) != threshold and time.monotonic() < deadline:
        time.sleep(0.02)
    dynamo.report(blocks)


def test_wait_on_dynamo_lasts_until_the_worker_is_freed(dynctl, dynamo):
    dynamo.held[DECODE] = 0.5
    dynamo.report(90)
    freed = threading.Thread(target=report_once_set, args=[dynamo, 0.95, 91])
    line = ["thresholds", "set", *named(dynamo), "--active-decode-blocks", "0.95", "-o", "json"]
    freed.start()
    ran = dynctl(*line, "--wait", "20s")
    freed.join()
    assert (ran.code, ran.json["waited"]["acts"]) == (0, True)


def test_wait_that_runs_out_names_the_worker_and_exits_4(dynctl, dynamo):
    dynamo.held[DECODE] = 0.5
    dynamo.report(90)
    line = ["thresholds", "set", *named(dynamo), "--active-decode-blocks", "0.95"]
    ran = dynctl(*line, "--wait", "300ms", "-o", "json")
    assert (ran.code, ran.json["applied"]) == (4, True)
    assert ran.json["waited"]["acts"] is False
    assert "7 is still refused; Dynamo frees it at its next report" in ran.err
    assert dynamo.held[DECODE] == 0.95


def test_off_cannot_be_had_on_dynamo_and_ours_is_left_alone(dynctl, fleet, dynamo):
    ours = fleet.add()
    set_directly(ours, **{TOKENS: 5})
    dynamo.held[TOKENS] = 5
    ran = dynctl("thresholds", "set", *named(ours, dynamo), "--active-prefill-tokens", "none")
    assert (ran.code, "cannot switch a threshold off" in ran.err) == (2, True)
    assert ours.thresholds()[TOKENS] == 5


@pytest.mark.parametrize("word", ["off", "none"])
def test_a_threshold_is_switched_off_by_the_word_that_the_list_shows(dynctl, fleet, word: str):
    ours = fleet.add()
    set_directly(ours, **{TOKENS: 5})
    ran = dynctl("thresholds", "set", *named(ours), "--active-prefill-tokens", word)
    assert ran.code == 0
    assert ours.thresholds()[TOKENS] is None
    shown = dynctl("thresholds", "get", *named(ours))
    assert "off" in shown.out


def test_setting_dynamo_back_to_off_takes_what_nothing_is_above(dynctl, fleet, dynamo):
    ours = fleet.add()
    ours.on_post = refused
    ran = dynctl(
        "thresholds", "set", *named(dynamo, ours), "--active-decode-blocks", "0.5", "-o", "json"
    )
    assert ran.code == 1
    assert [one["state"] for one in ran.json["replicas"]] == ["left over", "failed"]
    assert dynamo.held[DECODE] == 1.0


# -- Kubernetes ------------------------------------------------------------------------------------


class Cluster(NamedTuple):
    line: list[str]
    server: ApiServer
    frontends: list[DynamoStandIn]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two frontend pods of a cluster, reached through it, and what serves in them."""
    with (
        ApiServer() as server,
        DynamoStandIn(model=MODEL) as first,
        DynamoStandIn(model=MODEL) as second,
    ):
        crds.install(server)
        for body in deployment.healthy(frontends=2):
            server.store.create(body)
        for number, one in enumerate((first, second)):
            place = ("127.0.0.1", one.server_address[1])
            server.forwards["prod", f"my-llm-frontend-{number}", 8000] = place
        config = server.kubeconfig(tmp_path / "kubeconfig")
        line = ["--discovery", "kubernetes", "--kubeconfig", str(config), "-n", "prod"]
        yield Cluster([*line, "--reach", "port-forward"], server, [first, second])


def test_on_kubernetes_each_frontend_pod_is_a_row(dynctl, cluster):
    line, _, (first, second) = cluster
    second.held[DECODE] = 0.5
    ran = dynctl("thresholds", "get", *line, "-o", "json")
    assert (ran.code, ran.json["agree"]) == (1, False)
    assert [(row["replica"], row[DECODE]) for row in ran.json["thresholds"]] == [
        ("my-llm-frontend-0.prod", None),
        ("my-llm-frontend-1.prod", 0.5),
    ]
    done = dynctl("thresholds", "set", *line, "--active-decode-blocks", "0.7", "-o", "json")
    assert (done.code, done.json["agree"]) == (0, True)
    assert [one.held[DECODE] for one in (first, second)] == [0.7, 0.7]
    assert {one["worker"][:7] for one in done.json["ranks"]} == {"my-llm-"}
    shown = dynctl("thresholds", "get", *line, "--workers")
    assert (shown.code, "not reachable from here" in " ".join(shown.out.split())) == (0, True)


def test_another_graphs_frontends_are_no_replicas_of_this_one(dynctl, cluster):
    line, server, mine = cluster
    with DynamoStandIn(model="another") as other:
        for body in deployment.healthy(name="second"):
            labels = body["metadata"].get("labels", {})
            if labels.get("nvidia.com/dynamo-component-type") == "frontend":
                server.store.create(body)
        place = ("127.0.0.1", other.server_address[1])
        server.forwards["prod", "second-frontend-0", 8000] = place
        ran = dynctl("thresholds", "get", *line, "-o", "json")
        assert (ran.code, ran.json["agree"]) == (0, True)
        rows = [(row["model"], row["replica"]) for row in ran.json["thresholds"]]
        assert rows == [
            (MODEL, "my-llm-frontend-0.prod"),
            (MODEL, "my-llm-frontend-1.prod"),
            ("another", "second-frontend-0.prod"),
        ]
        done = dynctl("thresholds", "set", MODEL, *line, "--active-decode-blocks", "0.7")
        assert (done.code, other.held[DECODE]) == (0, None)
        assert [one.held[DECODE] for one in mine] == [0.7, 0.7]
        # Under one name in both graphs it has to be said which is meant.
        other.model = MODEL
        line += ["--active-decode-blocks", "0.9"]
        ran = dynctl("thresholds", "set", *line)
        assert (ran.code, "served by 2 deployments: my-llm.prod, second.prod" in ran.err) == (
            2,
            True,
        )
        assert dynctl("thresholds", "set", *line, "--dyn-namespace", "prod-second").code == 0
        assert (other.held[DECODE], mine[0].held[DECODE]) == (0.9, 0.7)


# -- watch -----------------------------------------------------------------------------------------


#: A busy machine may need longer than the 5 s of the default.
WATCH = ("thresholds", "watch", "--rate", "0.1", "--timeout", "60")


@contextmanager
def started(*arguments: str) -> Iterator[Program]:
    """The command as a process, which does not outlive a test that fails."""
    with Program(
        ["dynctl", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def watching(process: Program) -> str:
    """Its first word on stderr: from then on changes are seen."""
    assert process.stderr is not None
    first: str = process.stderr.readline()
    return first


def next_event(process: Program) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    found: dict[str, Any] = json.loads(line)
    return found


def test_watch_prints_each_change_as_a_line_of_json(two):
    with started(*WATCH, *named(*two), "-o", "jsonl") as process:
        assert watching(process) == "watching 2 replicas: 3 ranks, 0 busy\n"
        before = time.time()
        set_directly(two[0], **{DECODE: 0.5})
        changed = next_event(process)
        assert (changed["event"], changed["replica"], changed["model"]) == (
            "threshold",
            two[0].url,
            "tiny",
        )
        assert (changed["threshold"], changed["before"], changed["after"]) == (DECODE, None, 0.5)
        assert before - 1 < changed["at"] < time.time() + 1
        assert next_event(process)["event"] == "differ"
        set_directly(two[1], **{DECODE: 0.5})
        assert [next_event(process)["event"] for _ in range(2)] == ["threshold", "agree"]
        two[1].report(A, 3000)
        busy = next_event(process)
        assert (busy["event"], busy["replica"], busy["worker"], busy["dp_rank"]) == (
            "busy",
            two[1].url,
            "a",
            0,
        )
        assert busy["why"].startswith("3,000 used KV blocks reported > 0.5")
        two[1].report(A, 10)
        assert next_event(process)["event"] == "calm"
        two[0].stop()
        lost = next_event(process)
        assert (lost["event"], lost["replica"]) == ("lost", two[0].url)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=patience(20))
    assert (process.returncode, out, err) == (130, "", "")


def test_watch_ends_after_its_duration_or_limit(dynctl, two):
    ran = dynctl("thresholds", "watch", *named(*two), "--duration", "0.2")
    assert (ran.code, ran.out) == (0, "")
    with started(*WATCH, *named(two[0]), "--limit", "1") as process:
        watching(process)
        set_directly(two[0], **{TOKENS: 9})
        out, _ = process.communicate(timeout=patience(20))
    assert process.returncode == 0
    (line,) = out.splitlines()
    assert line.split(maxsplit=1)[1] == (f"threshold  {two[0].url}: tiny {TOKENS} off -> 9")


def test_watch_reports_an_unreachable_frontend_beside_a_reachable_one(dynctl, two):
    ran = dynctl("thresholds", "watch", *named(DEAD))
    assert (ran.code, ran.out) == (3, "")
    both = dynctl("thresholds", "watch", *named(DEAD, two[0]), "--duration", "0.1", "-o", "jsonl")
    assert (both.code, json.loads(both.out)["event"]) == (0, "lost")


def test_a_saved_moment_is_not_watched(dynctl):
    ran = dynctl("thresholds", "watch", "--demo")
    assert (ran.code, "never changes" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["watch", "-o", "json"], "expected one of table, wide, jsonl"),
        (["set", "--active-prefill-tokens", "5", "--wait", "soon"], "expected a duration"),
    ],
)
def test_what_cannot_be_used_is_a_usage_problem(dynctl, two, line, expected):
    ran = dynctl("thresholds", *line, *named(*two))
    assert (ran.code, ran.out) == (2, "")
    assert expected in ran.err


# -- a canary --------------------------------------------------------------------------------------


def counted(replica: Replica, ok: int, refused: int = 0, slow: int = 0, beyond: int = 0) -> None:
    """Counters of requests: ``slow`` of those that succeeded had their first token after 4 s,
    ``beyond`` after 7 s."""
    first = "dynamo_frontend_time_to_first_token_seconds_bucket"
    replica.metrics = (
        f'dynamo_frontend_requests_total{{model="tiny",error_type=""}} {ok}\n'
        f'dynamo_frontend_requests_total{{model="tiny",error_type="overload"}} {refused}\n'
        f'dynamo_frontend_requests_total{{model="tiny",error_type="validation"}} 900\n'
        f'dynamo_frontend_requests_total{{model="other",error_type="overload"}} 900\n'
        f'{first}{{model="tiny",le="1"}} {ok - slow - beyond}\n'
        f'{first}{{model="tiny",le="5"}} {ok - beyond}\n'
        f'{first}{{model="tiny",le="+Inf"}} {ok}\n'
    )


def once_set(replica: Replica, act: Callable[[], None]) -> None:
    """``act`` when the replica's thresholds are set for the first time."""

    def answer(number: int) -> None:
        if number == 1:
            act()

    replica.on_post = answer


CANARY = ("thresholds", "set", "--active-decode-blocks", "0.5", "--canary", "2s")


def test_a_canary_that_held_keeps_the_thresholds(dynctl, two):
    for one in two:
        counted(one, 100)
        once_set(one, partial(counted, one, 200, refused=1))
    result = dynctl(*CANARY, "--revert-if", "refused>1%", *named(*two), "-o", "json")
    assert result.code == 0, result.err
    canary = json.loads(result.out)["canary"]
    assert (canary["state"], canary["kept"]) == ("held", True)
    row = canary["conditions"][0]
    assert (row["state"], row["requests"]) == ("held", 202)
    assert row["value"] == pytest.approx(2 / 202)
    assert [one.thresholds()["active_decode_blocks_threshold"] for one in two] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("condition", "after", "value"),
    [
        ("refused>1%", {"ok": 160, "refused": 40}, "40.00 %"),
        ("ttft_p99>2s", {"ok": 200, "slow": 50}, "4.92 s"),
    ],
)
def test_a_breach_sets_every_replica_back_with_the_proof(dynctl, two, condition, after, value):
    first, second = two
    set_directly(first, active_decode_blocks_threshold=0.9)
    set_directly(second, active_decode_blocks_threshold=0.9)
    for one in two:
        counted(one, 100)
    # The counters change while the canary watches, on one replica of two.
    once_set(second, lambda: counted(second, **after))
    line = (*CANARY[:-1], "1h", "--revert-if", condition)
    result = dynctl(*line, *named(*two))
    assert result.code == 1
    assert "set back: a condition was breached" in result.out
    assert value in result.out
    assert [one.thresholds()["active_decode_blocks_threshold"] for one in two] == [0.9, 0.9]


def test_a_canary_without_enough_requests_proves_nothing(dynctl, two):
    for one in two:
        counted(one, 100)
    once_set(two[0], lambda: counted(two[0], 104))
    result = dynctl(*CANARY, "--revert-if", "refused>1%", *named(*two))
    assert result.code == 1
    assert "measured on 4 requests; expected at least 50" in result.out.replace("\n    ", " ")
    assert [one.thresholds()["active_decode_blocks_threshold"] for one in two] == [None, None]


def test_few_requests_are_enough_where_the_operator_says_so(dynctl, two):
    for one in two:
        counted(one, 100)
    once_set(two[0], lambda: counted(two[0], 104))
    result = dynctl(*CANARY, "--revert-if", "refused>1%", "--min-requests", "4", *named(*two))
    assert result.code == 0, result.out


def test_another_operators_value_ends_a_canary_and_stays(dynctl, two):
    for one in two:
        counted(one, 100)
    _, second = two
    values = {"active_decode_blocks_threshold": 0.7}

    def set_by_another(number: int) -> None:
        # The first reading is before the canary, the second its first one.
        if number == 2:
            assert second.service.apply(ThresholdsSet("tiny", values)).ok

    second.on_read = set_by_another
    result = dynctl(*CANARY[:-1], "1h", "--revert-if", "refused>1%", *named(*two))
    assert result.code == 1
    assert "active_decode_blocks_threshold is 0.7" in result.out.replace("\n    ", " ")
    assert [one.thresholds()["active_decode_blocks_threshold"] for one in two] == [None, 0.7]


def test_a_replica_that_restarts_ends_a_canary(dynctl, two):
    for one in two:
        counted(one, 100)
    once_set(two[1], lambda: counted(two[1], 3))
    result = dynctl(*CANARY[:-1], "1h", "--revert-if", "refused>1%", *named(*two))
    assert result.code == 1
    assert "its counters fell, so it restarted" in result.out.replace("\n    ", " ")


def decode_thresholds(replicas: Iterable[Any]) -> list[float | None]:
    return [replica.thresholds()["active_decode_blocks_threshold"] for replica in replicas]


@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_canary_sets_back(two, ends):
    for one in two:
        counted(one, 100)
    line = [*CANARY[:-1], "1h", "--revert-if", "refused>1%", *named(*two), "-o", "json"]
    with started(*line) as process:
        until_now(lambda: decode_thresholds(two) == [0.5, 0.5] or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        process.send_signal(ends)
        out, _ = process.communicate(timeout=patience(20))
    assert process.returncode == 130
    assert json.loads(out)["canary"]["state"] == "interrupted"
    assert decode_thresholds(two) == [None, None]


def test_a_second_canary_of_the_same_threshold_is_refused(dynctl, two):
    """It would set back to values that the first one has not proven."""
    for one in two:
        counted(one, 100)
    line = [*CANARY[:-1], "1h", "--revert-if", "refused>1%", *named(*two), "-o", "json"]
    second = ("thresholds", "set", "--active-decode-blocks", "0.7", "--canary", "1s")
    with started(*line) as process:
        until_now(lambda: decode_thresholds(two) == [0.5, 0.5] or process.poll() is not None)
        refused = dynctl(*second, "--revert-if", "refused>1%", *named(*two))
        assert refused.code == 2
        assert "a canary of active_decode_blocks_threshold of tiny runs for another" in refused.err
        assert decode_thresholds(two) == [0.5, 0.5]
        other = ("thresholds", "set", "--active-prefill-tokens", "9", "--canary", "1s")
        assert dynctl(*other, "--revert-if", "refused>1%", *named(*two)).code == 1  # unproven
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=patience(20))
    assert json.loads(out)["canary"]["state"] == "interrupted"
    assert decode_thresholds(two) == [None, None]
    # Its end is known: another one may begin.
    assert dynctl(*second, "--revert-if", "refused>1%", *named(*two)).code == 1


def test_a_canary_goes_on_where_its_messages_cannot_be_written(two):
    for one in two:
        counted(one, 100)
    with started(*CANARY, "--revert-if", "refused>1%", *named(*two), "-o", "json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stderr.close()
        out = process.stdout.read()
        process.wait(timeout=patience(20))
    assert json.loads(out)["canary"]["state"] == "unproven"
    assert process.returncode == 1
    assert [one.thresholds()["active_decode_blocks_threshold"] for one in two] == [None, None]


def test_a_canary_whose_watch_fails_sets_back(two):
    class Broken(Canary):
        def watch(self, say: Callable[[str], None]) -> CanaryVerdict:
            raise RuntimeError("a bug")

    replicas = [Replicated(one.url, FrontendClient(one.url)) for one in two]
    conditions, values = read_conditions(["refused>1%"]), {"active_decode_blocks_threshold": 0.5}
    canary = Broken(replicas, "tiny", values, conditions, 60, least=1, ended=threading.Event())
    with pytest.raises(RuntimeError, match="a bug"):
        change_thresholds(
            *(replicas, "tiny", values),
            partial=False,
            wait_s=None,
            canary=canary,
            say=print,
        )
    assert [len(one.posts) for one in two] == [3, 3]  # set, set back, and the end of the canary
    assert [one.thresholds()["active_decode_blocks_threshold"] for one in two] == [None, None]


@pytest.mark.parametrize(
    ("limit", "code", "said"),
    [("4s", 1, "a condition was breached"), ("9s", 1, "more than 5 s, the last edge")],
)
def test_a_quantile_above_the_last_edge_is_not_that_edge(dynctl, two, limit, code, said):
    for one in two:
        counted(one, 100)
    once_set(two[0], lambda: counted(two[0], 200, beyond=80))
    result = dynctl(*CANARY, "--revert-if", f"ttft_p90>{limit}", *named(*two))
    assert result.code == code
    assert said in " ".join(result.out.split())


def test_a_frontend_without_readable_metrics_gets_no_canary(dynctl, two):
    two[1].metrics = None
    result = dynctl(*CANARY, "--revert-if", "refused>1%", *named(*two))
    assert result.code == 2
    assert two[1].url in result.err
    assert not two[0].posts


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([], "expected 1 to 16"),
        (["--revert-if", "speed>1"], "expected refused, errors, hits"),
        (["--revert-if", "refused>2s"], "is a share"),
        (["--revert-if", "ttft_p99>1%"], "is a time"),
        (["--revert-if", "refused>101%"], "at most 100 %"),
        (["--revert-if", "refused>1"], "never reverts"),
        (["--revert-if", "hits<0%"], "never reverts"),
        (["--revert-if", "itl_p50<0ms"], "never reverts"),
        (["--revert-if", "ttft_p0>1s"], "expected p1 to p99.9"),
        (["--revert-if", "refused>1%", "--dry-run"], "--canary with --dry-run"),
    ],
)
def test_a_canary_that_cannot_be_understood(dynctl, two, line, expected):
    result = dynctl(*CANARY, *line, *named(*two))
    assert result.code == 2
    assert expected in result.err.replace("\n", " ")
    assert not two[0].posts


def test_a_condition_without_a_canary(dynctl, two):
    result = dynctl(*CANARY[:-2], "--revert-if", "refused>1%", *named(*two))
    assert result.code == 2
    assert "without --canary" in result.err

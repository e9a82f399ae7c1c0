"""workers, thresholds, config, why and version, on the embedded fleet and on views."""

from __future__ import annotations

import json

import pytest

from router_core import SETTINGS
from tests.golden.fleets import load, two_zones, view, worker


@pytest.fixture
def view_file(tmp_path):
    path = tmp_path / "view.json"
    path.write_bytes(two_zones().save())
    return path


def test_workers_list_as_json_has_ids_loads_and_freshness(dynctl, view_file):
    document = dynctl("workers", "list", "--view", view_file, "-o", "json").json
    assert (document["kind"], document["schema"]) == ("WorkerList", 1)
    row = next(row for row in document["workers"] if row["name"] == "prefill-b1")
    assert (row["role"], row["domains"], row["busy"]) == ("prefill", {"zone": "zone-b"}, True)
    rank = row["ranks"][0]
    assert rank["active_prefill_tokens"] == 10_240
    assert rank["busy_reasons"] == ["10,240 active prefill tokens > 10,000"]
    assert rank["load_age_s"] == 0.1
    lines = dynctl("workers", "list", "--view", view_file, "-o", "jsonl").out.splitlines()
    assert [json.loads(line)["name"] for line in lines] == [w["name"] for w in document["workers"]]


def test_workers_list_filters(dynctl, view_file):
    line = ["workers", "list", "--view", view_file, "-o", "name"]
    assert dynctl(*line, "--role", "decode").out.split() == ["decode-a0", "decode-b0", "decode-b1"]
    assert dynctl(*line, "--model", "other").out == ""
    ran = dynctl(*line, "--role", "encode")
    assert (ran.code, "expected one of aggregated, prefill, decode" in ran.err) == (2, True)


def test_workers_list_selects_sorts_and_leaves_headings_out(dynctl, view_file):
    line = ["workers", "list", "--view", view_file, "-o", "name"]
    assert dynctl(*line, "-l", "zone=zone-a").out.split() == ["prefill-a0", "decode-a0"]
    chosen = dynctl(*line, "-l", "zone!=zone-a,role=decode", "--sort-by", "decode-blocks").out
    assert chosen.split() == ["decode-b0", "decode-b1"]
    assert dynctl(*line, "--sort-by", "zone").out.split()[:2] == ["prefill-a0", "decode-a0"]
    assert dynctl(*line, "-l", "rack=r1").out == ""
    bare = dynctl("workers", "list", "--view", view_file, "--no-headers").out.splitlines()
    assert [text.split()[0] for text in bare] == dynctl(*line).out.split()
    for arguments, expected in (
        (["-l", "zone"], "--selector zone: expected KEY=VALUE"),
        (["--sort-by", "speed"], "--sort-by speed: no such column; expected one of name, role"),
    ):
        ran = dynctl(*line, *arguments)
        assert (ran.code, expected in ran.err) == (2, True)


def test_workers_without_kv_events_are_routed_by_load(dynctl, tmp_path):
    path = tmp_path / "view.json"
    path.write_bytes(view([worker("plain", "aggregated", 1, kv_events=False)]).save())
    out = dynctl("workers", "list", "--view", path).out
    assert "no KV events, routed by load only: plain" in out
    assert "load only, no KV events" in dynctl("workers", "show", "plain", "--view", path).out


def test_workers_show_by_any_name(dynctl, view_file):
    first = dynctl("workers", "show", "prefill-b1", "--view", view_file, "-o", "json")
    worker_id = first.json["worker"]["worker_id"]
    for text in ("l-b1", worker_id, f"{worker_id:x}", f"{worker_id:016x}"[-4:]):
        assert dynctl("workers", "show", text, "--view", view_file, "-o", "json").out == first.out
    ran = dynctl("workers", "show", "b1", "--view", view_file)
    assert ran.code == 2
    assert "ambiguous" in ran.err
    assert "decode-b1" in ran.err


def test_a_pipe_never_sees_a_shortened_name(dynctl, tmp_path):
    name = "a-very-long-deployment-name-" * 4 + "decode-00001"
    path = tmp_path / "view.json"
    path.write_bytes(view([worker(name, "decode", 1, zone="zone-a")]).save())
    assert name in dynctl("workers", "list", "--view", path).out


def test_thresholds_get(dynctl, view_file):
    document = dynctl("thresholds", "get", "--view", view_file, "-o", "json").json
    assert document["thresholds"] == [
        {
            "replica": "view view.json",
            "model": "tiny",
            "active_decode_blocks_threshold": None,
            "active_prefill_tokens_threshold": 10_000,
            "active_prefill_tokens_threshold_frac": None,
            "differs": [],
            "problem": "",
        }
    ]
    assert "10,000" in dynctl("thresholds", "get", "tiny", "--view", view_file).out
    ran = dynctl("thresholds", "get", "other", "--view", view_file)
    assert (ran.code, "no such model; served: tiny" in ran.err) == (2, True)


def test_thresholds_dry_run_names_the_ranks_that_change(dynctl, view_file):
    line = ["thresholds", "set", "--dry-run", "--view", view_file]
    ran = dynctl(*line, "--active-prefill-tokens", "20000", "-o", "json")
    document = ran.json
    assert document["applied"] is False
    assert document["before"]["active_prefill_tokens_threshold"] == 10_000
    assert document["after"]["active_prefill_tokens_threshold"] == 20_000
    changed = {r["worker"]: (r["before"], r["after"]) for r in document["ranks"]}
    assert changed["prefill-b1"] == (True, False)
    assert changed["prefill-a0"] == (False, False)
    out = dynctl(*line, "--active-decode-blocks", "0.001", "--active-prefill-tokens", "none").out
    assert "10,000 -> off" in out
    assert "2 ranks become busy:" in out
    assert "1 rank becomes calm:" in out
    # A dry run changes nothing.
    assert "10,000" in dynctl("thresholds", "get", "--view", view_file).out


def test_one_busy_rank_does_not_take_its_worker_out(dynctl, tmp_path):
    two = worker("agg", "aggregated", 1, ranks=2)
    path = tmp_path / "view.json"
    path.write_bytes(view([two], load(two, prefill=5000, rank=1)).save())
    out = dynctl(
        "thresholds", "set", "--dry-run", "--active-prefill-tokens", "4000", "--view", path
    ).out
    assert "agg rank 1: 5,000 active prefill tokens > 4,000" in out
    assert "the worker still gets requests for another rank" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "no threshold specified"),
        (["--active-decode-blocks", "1.5"], "--active-decode-blocks: expected at most 1, got 1.5"),
        (["--active-decode-blocks", "5"], "--active-decode-blocks: expected at most 1, got 5\n"),
        (["--active-decode-blocks", "x"], "--active-decode-blocks: expected a number, got 'x'"),
        (["--active-prefill-tokens", "1.5"], "expected a whole number, got '1.5'"),
        (["--active-prefill-tokens-frac", "nan"], "expected a finite number"),
        (["--active-prefill-tokens", "5"], "cannot be changed"),
        (["other", "--active-prefill-tokens", "5"], "no such model; served: tiny"),
    ],
)
def test_thresholds_set_names_what_is_wrong(dynctl, view_file, arguments, expected):
    ran = dynctl("thresholds", "set", *arguments, "--view", view_file)
    assert (ran.code, ran.out) == (2, "")
    assert expected in ran.err


def test_config_show_has_every_setting_with_its_source(dynctl, monkeypatch):
    monkeypatch.setenv("DYN_ROUTER_TEMPERATURE", "0.5")
    ran = dynctl("config", "show", "--router-mode", "round_robin", "-o", "json")
    assert ran.code == 0
    assert "warning: DYN_ROUTER_TEMPERATURE has no effect with --router-mode round-robin" in ran.err
    rows = {row["name"]: row for row in ran.json["settings"]}
    assert list(rows) == list(SETTINGS)
    assert (rows["router_mode"]["value"], rows["router_mode"]["source"]) == (
        "round-robin",
        "flag --router-mode",
    )
    assert rows["router_temperature"]["source"] == "env DYN_ROUTER_TEMPERATURE"
    assert rows["router_temperature"]["value"] == 0.5
    assert rows["prefill_load_scale"]["source"] == "preset dynamo-1.6"
    assert all(
        row["flag"].startswith("--") and row["env"] and row["bounds"] for row in rows.values()
    )
    table = dynctl("config", "show").out
    assert all(name in table for name in SETTINGS)
    assert "not supported yet, validated and ignored: " in " ".join(table.split())
    assert "ais_backend_version" in table.partition("not supported yet")[2]


def test_config_show_warns_on_stderr(dynctl):
    unbuilt = ("--ais-backend-version", "1.0")
    ran = dynctl("config", "show", "--no-kv-events", *unbuilt, "-o", "json")
    assert ran.json["warnings"]
    assert "warning: --no-kv-events is deprecated: use --no-router-kv-events" in ran.err
    assert "a database of measured kernel times is not built yet: ignored" in ran.err


def test_config_show_of_a_view_has_the_views_settings(dynctl, view_file):
    rows = dynctl("config", "show", "--view", view_file, "-o", "json").json["settings"]
    found = {row["name"]: row["value"] for row in rows}
    assert found["active_prefill_tokens_threshold"] == 10_000
    ran = dynctl("config", "show", "--view", view_file, "--router-mode", "kv")
    assert (ran.code, "--router-mode" in ran.err) == (2, True)


def test_why_finds_a_saved_result_anywhere_in_a_file(dynctl, tmp_path):
    saved = tmp_path / "result.json"
    shown = dynctl("route", "hello", "--demo", "--explain").out
    saved.write_text(dynctl("route", "hello", "--demo", "-o", "json").out)
    assert dynctl("why", saved).out == shown
    saved.write_text(json.dumps({"error": {"details": {"route": json.loads(saved.read_text())}}}))
    assert dynctl("why", saved).out == shown
    refused = dynctl("route", "hello", "--demo", "--require-taint", "x=y", "-o", "json").out
    saved.write_text(refused)
    ran = dynctl("why", saved)
    assert (ran.code, "answer   none: " in ran.out) == (1, True)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not JSON"),
        ("{}", "neither a RouteResult nor a decision id"),
        ('{"kind": "RouteResult", "schema": 1}', "RouteResult"),
        ('{"kind": "RouteResult", "schema": 99}', "RouteResult"),
    ],
)
def test_why_names_a_file_that_it_cannot_use(dynctl, tmp_path, content, expected):
    path = tmp_path / "x.json"
    path.write_text(content)
    ran = dynctl("why", path)
    assert (ran.code, ran.out) == (2, "")
    assert str(path) in ran.err
    assert expected in ran.err


def test_why_cannot_query_a_view(dynctl, view_file):
    ran = dynctl("why", "abc", "--view", view_file)
    assert (ran.code, "keeps no decisions" in ran.err) == (2, True)


@pytest.mark.parametrize("wanted", ["--last", "000241"])
def test_why_says_that_the_demo_starts_again_with_each_command(dynctl, wanted):
    ran = dynctl("why", wanted, "--demo")
    shown = " ".join(ran.err.split())
    assert (ran.code, ran.out) == (2, "")
    assert "each command with --demo starts the demo fleet again" in shown
    assert "dynctl top --demo" in shown
    assert "keeps no decisions" not in shown


def test_version(dynctl):
    from dynctl import version

    ran = dynctl("version", "--client", "-o", "json")
    assert (ran.code, ran.json["client"], ran.json["peers"]) == (0, version(), [])
    assert dynctl("version", "--client", "-o", "name").out.strip() == version()


def test_output_as_yaml_and_name(dynctl, view_file):
    import yaml

    for line in (["workers", "list"], ["thresholds", "get"], ["config", "show"]):
        document = dynctl(*line, "--view", view_file, "-o", "json").json
        assert yaml.safe_load(dynctl(*line, "--view", view_file, "-o", "yaml").out) == document
        assert dynctl(*line, "--view", view_file, "-o", "name").out.strip()


def test_without_a_running_frontend_the_advice_is_unknown(dynctl, view_file):
    for line in (["--view", view_file], []):
        ran = dynctl("config", "show", "--advise", *line, "-o", "json")
        [one] = ran.json["advice"]
        assert (one["workload"], one["settings"]) == ("unknown", [])
    assert "advice: unknown; only a running frontend exports" in dynctl(
        "config", "show", "--advise"
    ).out.replace("\n", " ")


def test_a_preset_lists_what_it_changes(dynctl):
    shown = dynctl("config", "show", "--preset", "ttft")
    assert "changes prefill_load_scale 1.5, active_decode_blocks_threshold 0.7" in shown.out


def test_an_interrupted_drain_names_the_way_back(dynctl, monkeypatch):
    from dynctl.documents.workers import CordonChange

    class Source:
        def cordon(self, worker, *, cordoned, dry_run):
            return CordonChange("test", worker, 7, "decode", cordoned, False, True, running=3)

        def running(self, worker):
            return 3

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "dynctl.sources.connect.connect_frontends", lambda options, command: Source()
    )
    monkeypatch.setattr("time.sleep", interrupt)
    ran = dynctl("workers", "drain", "decode-a0", "--frontend", "http://127.0.0.1:1")
    shown = " ".join(ran.err.split())
    assert (ran.code, ran.out) == (130, "")
    assert "decode-a0 still runs 3 requests; it stays cordoned" in shown
    assert "dynctl workers uncordon decode-a0" in shown

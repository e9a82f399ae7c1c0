"""`dynctl topology show` as people run it."""

from __future__ import annotations

import json

import pytest

from dynctl.planning.domain_capacity import topology_show
from dynctl.screens.topology import topology_notes
from router_core import WorkerAvailability
from tests.golden.fleets import settings, stranded_zones, view, worker


def test_a_row_a_domain(dynctl):
    ran = dynctl("topology", "show", "--demo")
    assert (ran.code, ran.err) == (0, "")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["ZONE", "zone-a", "zone-b"]
    assert dynctl("topology", "show", "--demo", "-o", "name").out == "zone-a\nzone-b\n"
    rows = dynctl("topology", "show", "--demo", "--no-headers").out.splitlines()
    assert [line.split()[0] for line in rows] == ["zone-a", "zone-b"]


def test_json_is_one_value_and_jsonl_its_rows(dynctl):
    shown = dynctl("topology", "show", "--demo", "-o", "json").json
    assert (shown["kind"], shown["schema"], shown["domain"]) == ("TopologyShow", 1, "zone")
    lines = dynctl("topology", "show", "--demo", "-o", "jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == shown["rows"]


def test_a_saved_view_shows_stranded_workers(dynctl, tmp_path):
    path = tmp_path / "view.json"
    path.write_bytes(stranded_zones().save())
    ran = dynctl("topology", "show", "--view", path, "--sort-by", "prefill_tokens")
    assert ran.code == 0
    assert "zone-c is STRANDED: prefill-c0, prefill-c1 require" in ran.out
    assert "(none): decode-x0 publishes no zone" in ran.out
    assert ran.out.splitlines()[5].startswith("zone-a")


def test_selected_workers_are_counted(dynctl):
    ran = dynctl("topology", "show", "--demo", "-o", "json", "-l", "zone=zone-b,name!=decode-b1")
    [row] = ran.json["rows"]
    assert row["workers"] == ["decode-b0", "prefill-b0", "prefill-b1"]


def test_a_selector_without_a_match_names_the_number_of_workers(dynctl):
    ran = dynctl("topology", "show", "--demo", "-l", "zone=nowhere")
    assert (ran.code, ran.out) == (0, "0 of 6 workers match -l zone=nowhere\n")


def test_a_domain_whose_workers_are_dead_is_down(dynctl, tmp_path):
    workers = [worker(name, "aggregated", at, zone=name) for at, name in enumerate("ab", 1)]
    path = tmp_path / "view.json"
    path.write_bytes(view(workers, [WorkerAvailability(workers[1].worker_id, "refused")]).save())
    lines = dynctl("topology", "show", "--view", path).out.splitlines()
    assert [(line.split()[0], line.split()[-1]) for line in lines[1:3]] == [
        ("a", "ok"),
        ("b", "DOWN"),
    ]
    assert lines[2].split()[1] == "0/1"
    assert lines[3] == "b is DOWN: its worker is unavailable"


def test_wrong_names_are_usage_problems(dynctl):
    ran = dynctl("topology", "show", "--demo", "--domain", "city")
    assert ran.code == 2
    assert "--domain city: no worker publishes it; published: rack, zone" in ran.err
    ran = dynctl("topology", "show", "--demo", "--sort-by", "size")
    assert ran.code == 2
    assert "expected one of domain, model, prefill" in ran.err


@pytest.mark.parametrize(
    ("policy", "effect"),
    [
        ({"enforcement": "required"}, "a required zone never reaches it"),
        (
            {"enforcement": "preferred", "weight": 0.85},
            "a preference for a zone has no effect on it",
        ),
    ],
)
def test_what_a_worker_without_the_domain_means_follows_from_the_policy(policy, effect):
    source = view(
        [
            worker("prefill-a0", "prefill", 1, zone="zone-a", **policy),
            worker("decode-a0", "decode", 2, zone="zone-a"),
            worker("decode-x0", "decode", 3),
        ]
    )
    shown = topology_show("test", source.workers(), settings(source))
    assert list(topology_notes(shown))[-1] == f"(none): decode-x0 publishes no zone: {effect}"

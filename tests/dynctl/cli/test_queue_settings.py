"""Settings of the router queue on the command line: contradictions, bad files, dry runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

POLICY_FILE = str(Path(__file__).with_name("policy-classes.yaml"))
#: Load on every prefill worker of the demo fleet.
LOAD = [
    word
    for name in ("a0", "b0", "b1")
    for word in ("--set", f"load.prefill-{name}.prefill_tokens=+900")
]


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        (["--router-queue-threshold", "4"], "--router-queue-threshold 4.0"),
        (["--router-queue-policy", "wspt"], "--router-queue-policy wspt"),
    ],
)
def test_policy_classes_and_the_settings_of_one_class_exclude_each_other(
    dynctl: Any, beside: list[str], named: str
) -> None:
    ran = dynctl("config", "show", "--router-policy-config", POLICY_FILE, *beside)
    assert ran.code == 2
    text = " ".join(ran.err.split())
    assert f"--router-policy-config {POLICY_FILE} and {named} exclude each other" in text
    assert "policy_classes[]." in text


def test_the_contradiction_is_named_by_variable_and_in_a_dry_run(
    dynctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_ROUTER_POLICY_CONFIG", POLICY_FILE)
    monkeypatch.setenv("DYN_ROUTER_QUEUE_THRESHOLD", "2")
    ran = dynctl("config", "show")
    assert ran.code == 2
    assert "DYN_ROUTER_POLICY_CONFIG" in ran.err
    assert "DYN_ROUTER_QUEUE_THRESHOLD" in ran.err
    sets = ["--set", f"router_policy_config={POLICY_FILE}", "--set", "router_queue_threshold=2"]
    ran = dynctl("route", "--demo", "hello", *sets)
    assert ran.code == 2
    assert "exclude each other" in ran.err


def test_the_threshold_of_a_preset_yields_to_policy_classes(dynctl: Any) -> None:
    given = ["--preset", "dynamo-0.9", "--router-mode", "kv", "--router-policy-config", POLICY_FILE]
    ran = dynctl("config", "show", *given, "-o", "json")
    assert ran.code == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "document: expected a mapping, got nothing"),
        ("a: [", "not YAML: "),
        ("policy_classes: []", "default_policy_family: required beside policy_classes"),
        ("worker_selection: {}", "worker_selection: worker-selection plug-ins are not supported"),
    ],
)
def test_a_bad_policy_file_is_named_with_its_field(
    dynctl: Any, tmp_path: Path, text: str, problem: str
) -> None:
    file = tmp_path / "classes.yaml"
    file.write_text(text)
    for line in (
        ["serve", "frontend", "--router-policy-config", str(file)],
        ["config", "show", "--router-policy-config", str(file)],
        ["route", "--demo", "hello", "--set", f"router_policy_config={file}"],
    ):
        ran = dynctl(*line)
        assert ran.code == 2
        error = " ".join(ran.err.split())
        assert f"{file}: {problem}" in error
        assert "Traceback" not in error
    missing = dynctl("config", "show", "--router-policy-config", str(tmp_path / "none"))
    assert (missing.code, "the file does not exist" in missing.err) == (2, True)


def test_a_limit_of_the_queue_without_a_queue_is_named(dynctl: Any) -> None:
    ran = dynctl("config", "show", "--router-queue-max-requests", "5")
    expected = "without --router-queue-threshold or --router-policy-config"
    assert expected in " ".join(ran.err.split())


@pytest.mark.seed("dynamo-1.6: router queue: dry runs")
def test_a_dry_run_shows_that_the_request_would_wait(dynctl: Any) -> None:
    queue = ["--set", "router_queue_threshold=0"]
    ran = dynctl("route", "--demo", "hello", "--explain", *queue, *LOAD)
    text = " ".join(ran.out.split())
    assert ran.code == 0
    assert "the request waits in the router queue, class default, first in line: all 3" in text
    assert "after a wait in the router queue" in text
    result = dynctl("route", "--demo", "hello", *queue, *LOAD, "-o", "json").json
    assert result["prefill"]["queue"]["waits"] is True
    assert "queue" not in result["decode"]
    assert [one["code"] for one in result["doubts"] if one["matters"]] == ["DYR0713"]
    calm = dynctl("route", "--demo", "hello", "--set", "router_queue_threshold=100000", *LOAD)
    assert "router queue" not in calm.out
    explained = dynctl("route", "--demo", "hello", "--explain", "--set", "router_queue_threshold=9")
    assert "class default: no wait, an eligible rank has room" in " ".join(explained.out.split())


def test_a_dry_run_with_policy_classes_names_the_class(dynctl: Any) -> None:
    ran = dynctl(
        "route", "--demo", "hello", "--set", f"router_policy_config={POLICY_FILE}", "-o", "json"
    )
    queue = ran.json["prefill"]["queue"]
    assert (queue["policy_class"], queue["waits"]) == ("standard-all", False)


def test_a_saved_view_repeats_what_waits(dynctl: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "view.json")
    queue = ["--set", "router_queue_threshold=0", *LOAD]
    live = dynctl("route", "--demo", "hello", *queue, "--save-view", file, "-o", "json")
    again = dynctl("route", "--view", file, "hello", *queue, "-o", "json")
    assert again.json["prefill"]["queue"] == live.json["prefill"]["queue"]

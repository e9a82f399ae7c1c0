"""The judgement and the plot of soak runs; the run itself is `make soak`."""

import xml.etree.ElementTree as ET
from typing import Any

from tests.soak.plot import Series, plot
from tests.soak.verdict import fit, problems

QUIET = {"minute": 6.0, "loads_s": 0.1, "index_s": 1.5, "wrong": ""}


def result(minutes: int = 60, **changes: Any) -> dict[str, Any]:
    """A run that passes, with a sample a minute."""
    flat = {
        "memory a": 60e6,
        "text cache a": 0.0,
        "descriptors a": 40.0,
        "threads a": 12.0,
        "tasks b": 90.0,
    }
    samples = {name: [value] * minutes for name, value in flat.items()}
    samples["minutes"] = [float(minute) for minute in range(minutes)]
    samples |= changes.pop("samples", {})
    fixed = {"lost": [], "quiet": [QUIET], "faults": [], "right_s": 2.0}
    return {**fixed, "samples": samples, **changes}


def rising(minutes: int, start: float, an_hour: float) -> list[float]:
    return [start + an_hour * minute / 60 for minute in range(minutes)]


def test_a_run_with_flat_state_passes():
    assert problems(result()) == []


def test_memory_that_rises_all_the_time_is_named():
    memory = rising(60, 60e6, 3e6)
    assert problems(result(samples={"memory a": memory})) == ["memory grows by 3.0 MB an hour"]
    assert problems(result(samples={"memory a": rising(60, 60e6, 1e6)})) == []


def test_memory_may_rise_while_the_process_warms_up():
    warm = [*rising(10, 60e6, 60e6), *[70e6] * 50]
    assert problems(result(samples={"memory a": warm})) == []


def test_a_short_run_is_judged_by_what_memory_grew_by():
    (problem,) = problems(result(12, samples={"memory a": rising(12, 60e6, 240e6)}))
    assert problem.startswith("memory grew by ")
    assert problems(result(12, samples={"memory a": rising(12, 60e6, 3e6)})) == []


def test_descriptors_threads_and_tasks_that_grow_are_named():
    for name in ("descriptors a", "threads a", "tasks b"):
        (problem,) = problems(result(samples={name: rising(60, 40.0, 100.0)}))
        assert problem.startswith(f"{name} grew from ")


def test_threads_of_a_frontend_that_was_restarted_may_grow():
    faults = [{"at": 60.0, "kind": "frontend restarted", "of": "b"}]
    growing = rising(60, 10.0, 10.0)
    assert not problems(result(faults=faults, samples={"threads b": growing}))
    for name in ("threads a", "tasks b"):
        assert problems(result(faults=faults, samples={name: [10 * each for each in growing]}))


def test_loads_and_index_must_be_right_in_time():
    late = {**QUIET, "index_s": 2.1, "wrong": ""}
    never = {**QUIET, "loads_s": None, "wrong": "active [1, 0]"}
    assert problems(result(quiet=[QUIET, late, never])) == [
        "minute 6: index right after 2.1 s; expected 2 s",
        "minute 6: loads right never; expected 2 s: active [1, 0]",
    ]


def test_what_a_client_lost_is_a_problem():
    assert problems(result(lost=["ServerDisconnectedError: "])) == [
        "lost: ServerDisconnectedError: "
    ]


def test_the_slope_of_a_line_is_found():
    slope = fit([0.0, 1.0, 2.0, 3.0], [5.0, 6.0, 7.0, 8.0])
    assert (round(slope.an_hour, 6), round(slope.error, 6)) == (60.0, 0.0)


def test_the_plot_is_svg_with_a_panel_for_each_series():
    text = plot([Series("a", "MB", [1.0, 2.0]), Series("b", "", [0.0])], 1.0)
    root = ET.fromstring(text)
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2

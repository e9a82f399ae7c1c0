"""The dashboard queries only metrics that our frontend exports, and all that only it exports."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest

from dynctl.serving.telemetry.exposition import Family
from dynctl.serving.telemetry.metric_families import families
from tests.docs.grafana import queries
from tests.docs.pages import DOCS
from tests.docs.worlds import Fleet
from tests.waiting import patience

DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "dynctl.json").read_text())
FAMILIES = families(router_id=1)
#: Set by the scraper, or of a histogram's buckets.
OTHER_LABELS = {"instance", "job", "le"}
METRIC = re.compile(r"\b((?:dynctl|dynamo)_[a-z_]+)")


def family_of(metric: str) -> Family:
    """The family of a sample's name; KeyError where there is none."""
    if metric in FAMILIES and FAMILIES[metric].kind != "histogram":
        return FAMILIES[metric]
    name, _, part = metric.rpartition("_")
    assert part in ("bucket", "sum", "count"), f"{metric}: no metric of ours"
    assert FAMILIES[name].kind == "histogram"
    return FAMILIES[name]


def shown() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("query", sorted(set(queries())))
@pytest.mark.seed("smart-routing-guide-0.9: monitoring: Grafana")
def test_a_query_asks_for_metrics_and_labels_that_are_exported(query: str) -> None:
    found = METRIC.findall(query)
    assert found
    labels = {name for metric in found for name in family_of(metric).label_names} | OTHER_LABELS
    queried = set(re.findall(r"(\w+)=~?\"", query))
    for names in re.findall(r"by \(([^)]*)\)", query):
        queried |= set(names.split(", "))
    queried |= set(re.findall(r"label_values\(\w+, (\w+)\)", query))
    assert queried <= labels


def test_every_metric_that_only_we_export_is_shown() -> None:
    own = {name for name in FAMILIES if name.startswith("dynctl_")}
    found = {family_of(metric).name for query in shown() for metric in METRIC.findall(query)}
    assert own == {name for name in found if name in own}


def test_panels_have_places_and_names_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_variables_are_declared() -> None:
    text = json.dumps(DASHBOARD)
    declared = {one["name"] for one in DASHBOARD["templating"]["list"]} | {
        "__rate_interval",
        "__all",
    }
    assert set(re.findall(r"\$\{?(\w+)\}?", text)) <= declared


def test_a_frontend_with_traffic_exports_the_metrics(fleet: Fleet) -> None:
    queried = {family_of(metric).name for query in queries() for metric in METRIC.findall(query)}
    with urllib.request.urlopen(f"{fleet().url}/metrics", timeout=patience(20)) as answer:
        text = answer.read().decode()
    typed = set(re.findall(r"^# TYPE (\S+) ", text, flags=re.M))
    assert queried <= typed, sorted(queried - typed)

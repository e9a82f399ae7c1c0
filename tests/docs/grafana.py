"""docs/grafana/dynctl.json: a dashboard over the frontend's metrics, as Grafana imports it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from tests.docs.grafana_panels import ROWS, Panel

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDE: Final = 24


def queries() -> Iterator[str]:
    """Every query of every panel, and those behind the variables."""
    for _, panels in ROWS:
        for panel in panels:
            yield from (query.text for query in panel.queries)
    yield from (text for _, text in _VARIABLES)


_VARIABLES: Final = (
    ("instance", "label_values(dynamo_component_uptime_seconds, instance)"),
    ("model", "label_values(dynamo_frontend_model_ready, model)"),
    ("domain", "label_values(dynctl_domain_workers, domain)"),
)


def dashboard_json() -> str:
    """The file, as Grafana imports it."""
    dashboard = {
        "title": "dynctl frontend",
        "uid": "dynctl-frontend",
        "tags": ["dynctl", "llm"],
        "description": "Requests, decisions, domains and caches of dynctl's frontend.",
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_placed()),
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }
    for name, text in _VARIABLES:
        several = name != "domain"
        yield {
            "name": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": text, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": several,
            "includeAll": several,
            **(
                {"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if several else {}
            ),
        }


def _placed() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": _WIDE, "x": 0, "y": y},
            "panels": [],
        }
        y, x = y + 1, 0
        for panel in panels:
            number += 1
            if x + panel.width > _WIDE:
                x, y = 0, y + 8
            yield _panel(number, panel, {"h": 8, "w": panel.width, "x": x, "y": y})
            x += panel.width
        y += 8


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.says} if panel.says else {}),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "expr": query.text,
                "legendFormat": query.legend,
            }
            for place, query in enumerate(panel.queries)
        ],
    }

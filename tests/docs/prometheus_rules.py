"""docs/prometheus/rules.yaml: an alert for each condition, for the metrics, and recording rules.

The conditions are those of the catalogue: what `dynctl explain CODE` says is what an alert says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import yaml

from dynctl.findings.catalogue import Entry, all_codes, conditions

#: Conditions whose codes have numbers: they come from the capacity of domains.
CAPACITY: Final = ("DYT0901", "DYT0902")
#: Level of a code -> severity and how long it holds before the alert fires.
_LEVELS: Final = {"fail": ("critical", "1m"), "warn": ("warning", "5m")}

_REQUESTS: Final = "dynamo_frontend_requests_total"
_DECISIONS: Final = "dynctl_decisions_total"
_TTFT: Final = "dynamo_frontend_time_to_first_token_seconds_bucket"
_HIT: Final = "dynamo_component_router_kv_hit_rate"

#: Name -> expression. Panels and alerts of your own can use them.
RECORDED: Final = {
    "instance_model:dynctl_requests:rate5m": f"sum by (instance, model) (rate({_REQUESTS}[5m]))",
    "instance_model:dynctl_errors:ratio5m": (
        f'sum by (instance, model) (rate({_REQUESTS}{{status="error"}}[5m]))'
        " / instance_model:dynctl_requests:rate5m"
    ),
    "instance:dynctl_decisions:rate5m": f"sum by (instance) (rate({_DECISIONS}[5m]))",
    "instance:dynctl_refused:ratio5m": (
        f'sum by (instance) (rate({_DECISIONS}{{outcome!="selected"}}[5m]))'
        " / instance:dynctl_decisions:rate5m"
    ),
    "instance_model:dynctl_ttft_seconds:p50_5m": (
        f"histogram_quantile(0.5, sum by (instance, model, le) (rate({_TTFT}[5m])))"
    ),
    "instance_model:dynctl_ttft_seconds:p99_5m": (
        f"histogram_quantile(0.99, sum by (instance, model, le) (rate({_TTFT}[5m])))"
    ),
    "instance:dynctl_kv_hit_rate:mean5m": (
        f"sum by (instance) (rate({_HIT}_sum[5m])) / sum by (instance) (rate({_HIT}_count[5m]))"
    ),
    "instance_worker:dynctl_predictions_hit:ratio5m": (
        "sum by (instance, worker) "
        '(rate(dynctl_worker_predictions_total{result="hit"}[5m]))'
        " / sum by (instance, worker) (rate(dynctl_worker_predictions_total[5m]))"
    ),
}

#: Name, expression, how long, severity, summary, what to do.
METRIC_ALERTS: Final = (
    (
        "DynctlRequestsFail",
        "instance_model:dynctl_errors:ratio5m > 0.05"
        " and instance_model:dynctl_requests:rate5m > 0.1",
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests for {{ $labels.model }} fail",
        "dynctl check --frontend URL; the panels Requests by outcome and Failed requests of "
        "engines show which",
    ),
    (
        "DynctlRequestsRefused",
        "instance:dynctl_refused:ratio5m > 0.05 and instance:dynctl_decisions:rate5m > 0.1",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the requests get no worker",
        "dynctl decisions list --refused, then dynctl why ID",
    ),
    (
        "DynctlModelNotReady",
        "dynamo_frontend_model_ready == 0",
        "1m",
        "critical",
        "{{ $labels.model }} cannot be served",
        "dynctl check --frontend URL",
    ),
    (
        "DynctlPredictionsMiss",
        "instance_worker:dynctl_predictions_hit:ratio5m < 0.8 and on (instance, worker)"
        " sum by (instance, worker) (rate(dynctl_worker_predictions_total[5m])) > 0.1",
        "15m",
        "warning",
        "{{ $labels.worker }} reuses other blocks than its index has: only "
        "{{ $value | humanizePercentage }} of the predictions are right",
        "dynctl hits --predicted names the cause",
    ),
    (
        "DynctlEventLoopStalls",
        "sum by (instance) (rate(dynamo_frontend_event_loop_stall_total[5m])) > 5",
        "10m",
        "warning",
        "the event loop of the frontend is late {{ $value | humanize }} times a second",
        "give it a core of its own, or run --processes",
    ),
    (
        "DynctlProcessDown",
        "dynctl_process_up == 0",
        "1m",
        "critical",
        "the process {{ $labels.process }} of --processes does not run",
        "its log has the reason",
    ),
)

_HEAD: Final = """\
# Alert and recording rules for the metrics of dynctl. Made from dynctl/findings/conditions.toml by
# `make docs`; change those files. One alert for each condition that dynctl reports, with the text
# of `dynctl explain CODE`. Load it with rule_files in prometheus.yml.
"""


def condition_entries() -> list[Entry]:
    """Every condition that the metric dynctl_condition can have."""
    return [*conditions().values(), *(all_codes()[code] for code in CAPACITY)]


def alert_name(code: str) -> str:
    """``WORKER_UNREACHABLE`` -> ``DynctlWorkerUnreachable``."""
    return "Dynctl" + "".join(part.capitalize() for part in code.split("_"))


def rules_yaml() -> str:
    """The file."""
    groups = [
        {
            "name": "dynctl recorded",
            "rules": [{"record": name, "expr": text} for name, text in RECORDED.items()],
        },
        {"name": "dynctl conditions", "rules": list(_condition_alerts())},
        {"name": "dynctl metrics", "rules": list(_metric_alerts())},
    ]
    text = yaml.safe_dump({"groups": groups}, sort_keys=False, width=100, allow_unicode=True)
    return _HEAD + str(text)


def _condition_alerts() -> Iterator[dict[str, Any]]:
    for entry in condition_entries():
        severity, held = _LEVELS[entry.level]
        yield {
            "alert": alert_name(entry.code),
            "expr": f'dynctl_condition{{code="{entry.code}"}} == 1',
            "for": held,
            "labels": {"severity": severity},
            "annotations": {
                "summary": f"{{{{ $labels.subject }}}}: {entry.code} (healthy: {entry.title})",
                "description": " ".join(entry.cause.split()).replace("{", "(").replace("}", ")"),
                "fix": f"dynctl explain {entry.code}",
                "runbook_url": f"docs/checks/{entry.file}#{entry.anchor}",
            },
        }


def _metric_alerts() -> Iterator[dict[str, Any]]:
    for name, text, held, severity, summary, fix in METRIC_ALERTS:
        yield {
            "alert": name,
            "expr": text,
            "for": held,
            "labels": {"severity": severity},
            "annotations": {
                "summary": summary,
                "fix": fix,
                "runbook_url": "docs/operations/dashboards.md#prometheus-and-grafana",
            },
        }

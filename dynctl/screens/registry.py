"""Which screen shows which result, and what its items and names are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from dynctl.documents.route_result import RouteResult
from dynctl.findings.report import CodeList, CodePage, Report, State
from dynctl.planning.domain_capacity import NO_DOMAIN, TopologyShow
from dynctl.planning.plan_result import TopologyPlan
from dynctl.screens import answers as tables
from dynctl.screens import bundle as bundle_table
from dynctl.screens import checks as check_table
from dynctl.screens import contexts as context_tables
from dynctl.screens import demo as story
from dynctl.screens import plan as plan_tables
from dynctl.screens import thresholds as threshold_tables
from dynctl.screens import topology as topology_tables
from dynctl.screens import verify as custody_table
from dynctl.screens import workers as worker_tables
from dynctl.screens.canvas import Canvas
from dynctl.screens.context_results import ContextChange, ContextDetail, ContextList
from dynctl.screens.results import (
    BundleReport,
    ConfigReport,
    ThresholdChange,
    ThresholdList,
    TopologyValue,
    Versions,
    WorkerDetail,
    WorkerList,
)
from dynctl.simulation.demo.story import DemoEnd, DemoStep
from dynctl.verify.result import VerifyReport

_SCREENS: dict[type, Any] = {
    RouteResult: tables.route_short,
    WorkerList: worker_tables.worker_list,
    WorkerDetail: worker_tables.worker_detail,
    TopologyShow: topology_tables.topology_show,
    TopologyPlan: plan_tables.topology_plan,
    TopologyValue: tables.topology_value,
    ThresholdList: threshold_tables.threshold_list,
    ThresholdChange: tables.threshold_change,
    ConfigReport: tables.config_report,
    ContextList: context_tables.context_list,
    ContextDetail: context_tables.context_detail,
    ContextChange: context_tables.context_change,
    Versions: tables.versions,
    BundleReport: bundle_table.bundle_report,
    Report: check_table.check_report,
    VerifyReport: custody_table.verify_report,
    CodePage: check_table.code_page,
    CodeList: check_table.code_list,
    DemoStep: story.demo_step,
    DemoEnd: story.demo_end,
}


def draw(result: Any, canvas: Canvas) -> str:
    """The table of a result."""
    return str(_SCREENS[type(result)](result, canvas))


def items(result: Any) -> Iterable[Any]:
    """What a line of jsonl holds: each item of a list, else the whole result."""
    if isinstance(result, WorkerList):
        return result.workers
    if isinstance(result, TopologyShow | TopologyPlan):
        return result.rows
    if isinstance(result, ThresholdList):
        return result.thresholds
    if isinstance(result, ConfigReport):
        return result.settings
    if isinstance(result, ContextList):
        return result.contexts
    if isinstance(result, ContextDetail):
        return result.values
    if isinstance(result, VerifyReport):
        return _of_two_kinds(result)
    if isinstance(result, Report):
        return result.checks
    if isinstance(result, CodeList):
        return result.codes
    return [result]


def _of_two_kinds(result: VerifyReport) -> Iterator[dict[str, Any]]:
    """The checks, then the workers; each line says which it is."""
    for check in result.checks:
        yield {"kind": "Check", **msgspec.to_builtins(check)}
    for row in result.chain:
        yield {"kind": "CustodyRow", **msgspec.to_builtins(row)}


def names(result: Any) -> list[str]:
    """What ``-o name`` prints, one a line."""
    if isinstance(result, RouteResult):
        refs = (result.winner.prefill, result.winner.decode)
        return [ref.worker for ref in refs if ref is not None]
    if isinstance(result, WorkerList):
        return [worker.name for worker in result.workers]
    if isinstance(result, WorkerDetail):
        return [result.worker.name]
    if isinstance(result, TopologyShow | TopologyPlan):
        return [NO_DOMAIN if row.value is None else row.value for row in result.rows]
    if isinstance(result, TopologyValue):
        return [result.value]
    if isinstance(result, ThresholdList):
        return sorted({one.model for one in result.thresholds if one.model is not None})
    if isinstance(result, ThresholdChange):
        return [result.after.model]
    if isinstance(result, ConfigReport):
        return [setting.name for setting in result.settings]
    if isinstance(result, ContextList):
        return [row.name for row in result.contexts]
    if isinstance(result, ContextDetail | ContextChange):
        return [] if result.name is None else [result.name]
    if isinstance(result, BundleReport):
        return [result.path]
    if isinstance(result, Report):
        return [check.code for check in result.checks if check.state in (State.FAIL, State.WARN)]
    if isinstance(result, CodeList | CodePage):
        return [page.code for page in getattr(result, "codes", [result])]
    return [result.client] if isinstance(result, Versions) else []

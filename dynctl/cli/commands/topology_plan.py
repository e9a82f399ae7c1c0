"""`dynctl topology plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.base.errors import ExitCode, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import names_of
from dynctl.cli.option_groups import fields_of, with_options
from dynctl.cli.shared_options import NoHeaders

if TYPE_CHECKING:
    from dynctl.planning.planned_fleet import PlannedFleet

_CAPACITY, _FILE, _DEPLOYMENT, _CLUSTER = "capacity", "file", "deployment", "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The workers that are counted, and the fleet that is planned."""

    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VALUE:prefill=N,decode=N",
            help="Number of workers in one domain value (repeatable).",
        ),
    ] = None
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Count the replicas in a manifest; - reads stdin (repeatable).",
        ),
    ] = None
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=names_of("domain"),
            help="Domain to group by (zone, rack, ..). [default: the KV-transfer domain, then "
            "zone]",
        ),
    ] = None
    over: Annotated[
        str | None,
        typer.Option(
            metavar="VALUE,..",
            autocompletion=names_of("domain-value"),
            help="All values of the domain, for unpinned workers and for --target.",
        ),
    ] = None
    ratio: Annotated[
        str | None,
        typer.Option(metavar="P:D", help="Target ratio of prefill to decode workers."),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            metavar="prefill=N,decode=N",
            help="Target fleet, split evenly over the values; also sets the ratio.",
        ),
    ] = None
    enforcement: Annotated[
        str | None,
        typer.Option(
            metavar="required|preferred|fallback|none",
            help="Plan for this policy. [default: the current one, else required]",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=names_of("model"),
            help="Only workers of this model (live).",
        ),
    ] = None
    dgd: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Count the pods of this DynamoGraphDeployment (repeatable). [default: all in the "
            "namespace, with -n or -A]",
        ),
    ] = None
    no_headers: NoHeaders = False

    @property
    def values(self) -> list[str]:
        """The values of ``--over``."""
        return [value.strip() for value in (self.over or "").split(",") if value.strip()]

    def fleet(self, options: GlobalOptions) -> PlannedFleet:
        """The fleet of the specified source; raises UsageProblem."""
        from dynctl.planning.planned_fleet import fleet_of_files

        source = self._source(options)
        # Workers of a target need not exist yet.
        planned = self.target is not None and source in (None, _CLUSTER)
        if source == _CAPACITY or (planned and self.values):
            return self._specified_fleet()
        if source == _FILE:
            return fleet_of_files(self.file or [], self.domain, self.values)
        if source == _CLUSTER:
            from dynctl.verify.fleet import fleet_of_cluster
            from dynctl.verify.verification import joined_cluster

            return fleet_of_cluster(joined_cluster(options, tuple(self.dgd or ())), self.domain)
        if self.values:
            raise UsageProblem("--over: a live deployment reports its values; remove --over")
        return self._live_fleet(options)

    def _source(self, options: GlobalOptions) -> str | None:
        """What the options count; None: the default deployment. Raises UsageProblem."""
        where = options.namespace or options.kube_context or options.kubeconfig
        in_cluster = options.discovery != "kubernetes" and (options.all_namespaces or where)
        specified = {
            _CAPACITY: self.capacity,
            _FILE: self.file,
            _DEPLOYMENT: options.offline or options.frontend or options.planes,
            _CLUSTER: self.dgd or in_cluster,
        }
        sources = [source for source, value in specified.items() if value]
        if len(sources) > 1:
            raise UsageProblem(
                "--capacity, --file, a deployment (--demo, --view, --frontend, --discovery) and a "
                "cluster (-n, -A, --dgd, --kube-context) are different sources; specify only one"
            )
        if self.model is not None and sources not in ([], [_DEPLOYMENT]):
            raise UsageProblem(
                f"--model {self.model}: pods, manifests and --capacity have no model"
            )
        return sources[0] if sources else None

    def _specified_fleet(self) -> PlannedFleet:
        """The workers of --capacity, and the values of --over without workers."""
        from dynctl.planning.planned_fleet import fleet_of_flags

        capacity = self.capacity or []
        counted = {flag.partition(":")[0].strip() for flag in capacity}
        empty = [f"{value}:" for value in self.values if value not in counted]
        return fleet_of_flags([*capacity, *empty], self.domain)

    def _live_fleet(self, options: GlobalOptions) -> PlannedFleet:
        from dynctl.planning.domain_capacity import topology_show
        from dynctl.planning.planned_fleet import fleet_of_workers
        from dynctl.sources.connect import connect

        deployment = connect(options)
        workers = [row for row in deployment.workers() if self.model in (None, row.model)]
        settings = deployment.config().values
        show = topology_show(deployment.title, workers, settings, domain=self.domain)
        return fleet_of_workers(show, workers)

    def expect_target_fits(self, fleet: PlannedFleet) -> None:
        """Raise UsageProblem for a target that cannot be split over the fleet's domain."""
        if self.target is None:
            return
        if len({cell.pool for cell in fleet.cells}) > 1:
            raise UsageProblem(
                "--target: there are several pools of workers; plan them one at a time"
            )
        if all(cell.value is None for cell in fleet.cells):
            raise UsageProblem(
                f"--target {self.target}: the values of {fleet.domain} are unknown; "
                "specify them with --over"
            )


@with_options(plan=fields_of(PlanOptions))
def plan_topology(options: GlobalOptions, *, plan: PlanOptions) -> int:
    """Plan capacity by domain: ratio, headroom, losses, workers to add.

    Counts come from a live deployment, a cluster (-n, -A, --dgd), manifests (-f) or --capacity.
    Exit code 1: under this policy, some prefill workers have no decode worker.
    """
    from dynctl.planning.capacity import ENFORCEMENTS, Ratio
    from dynctl.planning.plan import topology_plan
    from dynctl.planning.planned_fleet import role_counts
    from dynctl.screens.plan import plan_rows_only
    from dynctl.screens.render import emit, talk

    if plan.enforcement is not None and plan.enforcement not in ENFORCEMENTS:
        raise UsageProblem(f"--enforcement {plan.enforcement}: expected {', '.join(ENFORCEMENTS)}")
    ratio = None if plan.ratio is None else Ratio.parse(plan.ratio)
    target = None
    if plan.target is not None:
        counts = role_counts("--target", plan.target, plan.target)
        target = (counts["prefill"], counts["decode"])
    fleet = plan.fleet(options)
    plan.expect_target_fits(fleet)
    result = topology_plan(fleet, enforcement=plan.enforcement, ratio=ratio, target=target)
    emit(result, options, screen=plan_rows_only if plan.no_headers else None)
    if options.output not in ("table", "wide") or plan.no_headers:
        for warning in result.warnings:
            talk(f"warning: {warning}")
    return ExitCode.NO if result.state == "stranded" else ExitCode.YES

"""`dynctl topology plan`."""

from typing import Annotated, Any

import typer

from dynctl.base.errors import ExitCode, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import names_of
from dynctl.cli.shared_options import NoHeaders


def plan_topology(
    options: GlobalOptions,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VALUE:prefill=N,decode=N",
            help="Number of workers in one domain value (repeatable).",
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Count the replicas in a manifest; - reads stdin (repeatable).",
        ),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=names_of("domain"),
            help="Domain to group by (zone, rack, ..). [default: the KV-transfer domain, then "
            "zone]",
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            metavar="VALUE,..",
            autocompletion=names_of("domain-value"),
            help="All values of the domain, for unpinned workers and for --target.",
        ),
    ] = None,
    ratio: Annotated[
        str | None,
        typer.Option(metavar="P:D", help="Target ratio of prefill to decode workers."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="prefill=N,decode=N",
            help="Target fleet, split evenly over the values; also sets the ratio.",
        ),
    ] = None,
    enforcement: Annotated[
        str | None,
        typer.Option(
            metavar="required|preferred|fallback|none",
            help="Plan for this policy. [default: the current one, else required]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=names_of("model"),
            help="Only workers of this model (live).",
        ),
    ] = None,
    dgd: Annotated[
        list[str] | None,
        typer.Option(
            "--dgd",
            metavar="NAME",
            help="Count the pods of this DynamoGraphDeployment (repeatable). [default: all in the "
            "namespace, with -n or -A]",
        ),
    ] = None,
    no_headers: NoHeaders = False,
) -> int:
    """Plan capacity by domain: ratio, headroom, losses, workers to add.

    Counts come from a live deployment, a cluster (-n, -A, --dgd), manifests (-f) or --capacity.
    Exit code 1: under this policy, some prefill workers have no decode worker.
    """
    from dynctl.planning.capacity import ENFORCEMENTS, Ratio
    from dynctl.planning.plan import topology_plan
    from dynctl.planning.planned_fleet import role_counts
    from dynctl.screens.plan import plan_rows_only
    from dynctl.screens.render import emit, talk

    if enforcement is not None and enforcement not in ENFORCEMENTS:
        raise UsageProblem(f"--enforcement {enforcement}: expected {', '.join(ENFORCEMENTS)}")
    wanted = None if ratio is None else Ratio.parse(ratio)
    whole = None if target is None else role_counts("--target", target, target)
    values = [value.strip() for value in (over or "").split(",") if value.strip()]
    fleet = _fleet(
        options,
        capacity or [],
        file or [],
        domain,
        values,
        model,
        tuple(dgd or ()),
        planned=whole is not None,
    )
    if whole is not None and len({cell.pool for cell in fleet.cells}) > 1:
        raise UsageProblem("--target: there are several pools of workers; plan them one at a time")
    if whole is not None and not any(cell.value is not None for cell in fleet.cells):
        raise UsageProblem(
            f"--target {target}: the values of {fleet.domain} are unknown; specify them with --over"
        )
    result = topology_plan(
        fleet,
        enforcement=enforcement,
        ratio=wanted,
        target=None if whole is None else (whole["prefill"], whole["decode"]),
    )
    emit(result, options, screen=plan_rows_only if no_headers else None)
    if options.output not in ("table", "wide") or no_headers:
        for warning in result.warnings:
            talk(f"warning: {warning}")
    return ExitCode.NO if result.state == "stranded" else ExitCode.YES


def _fleet(
    options: GlobalOptions,
    capacity: list[str],
    files: list[str],
    domain: str | None,
    over: list[str],
    model: str | None,
    graphs: tuple[str, ...],
    *,
    planned: bool,
) -> Any:
    """The fleet of the specified source. ``planned``: workers need not exist yet."""
    from dynctl.planning.planned_fleet import fleet_of_flags, fleet_of_manifests, fleet_of_workers

    planes = options.discovery or options.file_kv or options.etcd_endpoints
    live = options.offline or options.frontend or planes
    where = (options.namespace, options.kube_context, options.kubeconfig)
    cluster = bool(graphs) or (
        options.discovery != "kubernetes" and (options.all_namespaces or any(where))
    )
    if bool(capacity) + bool(files) + bool(live or cluster) > 1 or (live and cluster):
        raise UsageProblem(
            "--capacity, --file, a deployment (--demo, --view, --frontend, --discovery) and a "
            "cluster (-n, -A, --dgd, --kube-context) are different sources; specify only one"
        )
    if model is not None and (capacity or files or cluster):
        raise UsageProblem(f"--model {model}: pods, manifests and --capacity have no model")
    if capacity or (over and planned and not files and not live):
        given = {one.partition(":")[0].strip() for one in capacity}
        return fleet_of_flags([*capacity, *(f"{v}:" for v in over if v not in given)], domain)
    if files:
        from dynctl.manifests.files import read_manifests

        source = ", ".join(files[:3]) + (" and more" if len(files) > 3 else "")
        manifests = read_manifests(files)
        return fleet_of_manifests(manifests, source, domain, over)
    if cluster:
        from dynctl.verify.fleet import fleet_of_cluster
        from dynctl.verify.run import joined_cluster

        return fleet_of_cluster(joined_cluster(options, graphs), domain)
    if over:
        raise UsageProblem("--over: a live deployment reports its values; remove --over")
    from dynctl.planning.domain_capacity import topology_show
    from dynctl.sources.connect import connect

    seen = connect(options)
    workers = [row for row in seen.workers() if model in (None, row.model)]
    settings = seen.config().values
    return fleet_of_workers(topology_show(seen.title, workers, settings, domain=domain), workers)

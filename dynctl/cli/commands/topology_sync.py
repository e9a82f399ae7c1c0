"""`dynctl topology sync`: the label controller, for clusters without the operator's."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions

_RUNNING = "Running"


def sync_topology(
    options: GlobalOptions,
    stale: Annotated[
        str,
        typer.Option(
            metavar="report|starting|always",
            help="Which labels that differ from the node's are replaced: none; those of pods whose "
            "engine has not run yet; all.",
        ),
    ] = "report",
    once: Annotated[
        bool, typer.Option("--once", help="Look at every pod once, print the labels and end.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; print what would be written.")
    ] = False,
    leader_elect: Annotated[
        bool,
        typer.Option(
            help="Write only while holding the lease, so that several may run.",
            rich_help_panel=_RUNNING,
        ),
    ] = True,
    lease_namespace: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE",
            help="Namespace of the lease dynctl-topology-sync. [default: -n, then the context's]",
            rich_help_panel=_RUNNING,
        ),
    ] = None,
    system_host: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Address of health and metrics.", rich_help_panel=_RUNNING
        ),
    ] = "127.0.0.1",
    system_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            min=-1,
            max=65535,
            help="Port of /healthz, /readyz and /metrics; 0: a free one, -1: none.",
            rich_help_panel=_RUNNING,
        ),
    ] = -1,
) -> int:
    """Copy topology labels from nodes to the pods that name them by annotation.

    Does what the Dynamo operator's label controller does, and also follows nodes: a label that is
    added later is copied, one that changes is reported or replaced. Runs until SIGTERM.
    `topology render --controller` prints its Deployment and permissions.

    Exit code with --once: 1 if a label is missing, differs or was refused.
    """
    from dynctl.adapters.kubernetes.from_options import namespaces_of, open_writing_cluster
    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.manifests.render import StalePolicy
    from dynctl.serving.topology_sync.copies import FAILS
    from dynctl.serving.topology_sync.writing import PodSync

    if stale not in list(StalePolicy):
        raise UsageProblem(f"--stale {stale}: expected {' or '.join(StalePolicy)}")
    cluster, writer = open_writing_cluster(options)
    try:
        namespace = namespaces_of(options, cluster)
        sync = PodSync(cluster, None if dry_run else writer, StalePolicy(stale))
        if not once:
            from dynctl.serving.topology_sync.run import Listening, run_controller

            lease = lease_namespace or namespace or cluster.namespace
            return run_controller(
                cluster,
                writer,
                namespace,
                sync,
                lease=lease if leader_elect and not dry_run else None,
                listening=Listening(system_host, system_port) if system_port >= 0 else None,
            )
        from dynctl.documents.topology import TopologySync
        from dynctl.screens.render import emit
        from dynctl.serving.topology_sync.controller import copied_label, look_once

        looked = look_once(cluster, namespace, sync)
        rows = [copied_label(node_label) for node_label in looked]
        emit(TopologySync(cluster.title, dry_run, stale, rows), options)
        bad = any(node_label.problem or node_label.copy.state in FAILS for node_label in looked)
        return ExitCode.NO if bad else ExitCode.YES
    finally:
        cluster.close()

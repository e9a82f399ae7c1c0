"""`dynctl topology render`: manifests for clusters that have no operator to write them."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions


def render_topology(
    options: GlobalOptions,
    what: Annotated[
        str, typer.Argument(metavar="[pod|cluster-topology]", help="What to render.")
    ] = "pod",
    domain: Annotated[
        str, typer.Option("--domain", metavar="NAME", help="pod: the KV-transfer domain.")
    ] = "zone",
    label_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[DOMAIN=]KEY",
            help="pod: the label that holds a domain's value (repeatable: more domains). Known "
            "for zone, region and host.",
        ),
    ] = None,
    enforcement: Annotated[
        str, typer.Option(metavar="WORD", help="pod: required or preferred.")
    ] = "required",
    weight: Annotated[
        float | None, typer.Option(metavar="0..1", help="pod: how much preferred prefers.")
    ] = None,
    container: Annotated[
        str, typer.Option(metavar="NAME", help="pod: the container of the engine.")
    ] = "main",
    mount_path: Annotated[
        str, typer.Option(metavar="DIR", help="pod: where the files are mounted.")
    ] = "/etc/dynamo/topology",
    init_wait: Annotated[
        bool,
        typer.Option("--init-wait", help="pod: hold the worker back until its domain has a value."),
    ] = False,
    image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="pod: an image with dynctl, for --init-wait."),
    ] = None,
    init_timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="pod: how long --init-wait waits.")
    ] = "30s",
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DOMAIN=KEY",
            help="cluster-topology: a level and its node label (repeatable, broad to narrow).",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="cluster-topology: its name.")
    ] = "cluster-topology",
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="cluster-topology: ClusterTopologyBinding, or ClusterTopology for Grove before "
            "May 2026.",
        ),
    ] = "ClusterTopologyBinding",
) -> int:
    """Print what a worker pod needs for its topology, or a Grove topology, as YAML (-o json).

    `pod` is a patch for a Deployment or StatefulSet: save it, then
    kubectl patch deployment NAME --patch-file FILE.
    """
    from dynctl.base.errors import UsageProblem
    from dynctl.base.options import OutputFormat
    from dynctl.cli.shared_options import seconds
    from dynctl.manifests.lint.levels import misordered
    from dynctl.manifests.render import (
        InitWait,
        cluster_topology,
        needs_copying,
        pod_patch,
        pod_topology,
    )
    from dynctl.screens.render import emit, talk, yaml_text

    if options.output not in (OutputFormat.TABLE, OutputFormat.YAML, OutputFormat.JSON):
        raise UsageProblem(f"-o {options.output.value}: expected yaml or json")
    if what == "cluster-topology":
        result = cluster_topology(kind, name, level or ())
        pair = misordered([one["domain"] for one in result["spec"]["levels"]])
        if pair is not None:
            talk(f"warning: levels go from broad to narrow; {pair[0]} stands behind {pair[1]}")
    elif what == "pod":
        if level:
            raise UsageProblem(
                "--level is for cluster-topology; a pod takes --label-key",
                "dynctl topology render cluster-topology --level DOMAIN=KEY",
            )
        if init_wait and not image:
            raise UsageProblem(
                "--init-wait needs --image, an image that has dynctl installed",
                "for example: --init-wait --image registry.example/dynctl:0.1.0",
            )
        seconds(init_timeout)
        pod = pod_topology(
            domain,
            label_key or (),
            enforcement,
            weight,
            mount_path=mount_path,
            container=container,
            init_wait=InitWait(image, init_timeout) if init_wait and image else None,
        )
        result = pod_patch(pod)
        keys = needs_copying(pod)
        talk(
            f"note: the pod itself must carry {', '.join(pod.labels.values())}: "
            + (
                f"no Kubernetes copies {', '.join(keys)} from the node, set it in the pod template"
                if keys
                else "Kubernetes 1.35 copies it from the node, older ones need it in the template"
            )
        )
    else:
        raise UsageProblem(f"{what}: expected pod or cluster-topology")
    emit(result, options, screen=lambda value, _canvas: yaml_text(value))
    return 0

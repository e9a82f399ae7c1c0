"""`dynctl topology render`: manifests for clusters without the Dynamo operator."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions


def render_topology(
    options: GlobalOptions,
    what: Annotated[
        str,
        typer.Argument(metavar="pod|cluster-topology|controller", help="What to render."),
    ] = "pod",
    controller: Annotated[
        bool, typer.Option("--controller", help="The same as `controller`.")
    ] = False,
    domain: Annotated[
        str, typer.Option(metavar="NAME", help="pod: the KV-transfer domain.")
    ] = "zone",
    label_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[DOMAIN=]KEY",
            help="pod: the label of a domain (repeatable). [default for zone, region and host]",
        ),
    ] = None,
    enforcement: Annotated[
        str, typer.Option(metavar="required|preferred", help="pod: policy of the worker.")
    ] = "required",
    weight: Annotated[
        float | None, typer.Option(metavar="0..1", help="pod: weight of the preference, 0 to 1.")
    ] = None,
    container: Annotated[
        str, typer.Option(metavar="NAME", help="pod: container of the engine.")
    ] = "main",
    mount_path: Annotated[
        str, typer.Option(metavar="DIR", help="pod: mount path of the topology files.")
    ] = "/etc/dynamo/topology",
    init_wait: Annotated[
        bool,
        typer.Option("--init-wait", help="pod: start the worker once its domain has a value."),
    ] = False,
    image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Image with dynctl, for --init-wait and controller."),
    ] = None,
    init_timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="pod: timeout of --init-wait.")
    ] = "30s",
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DOMAIN=KEY",
            help="cluster-topology: level and its node label (repeatable, broad to narrow).",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="cluster-topology: name of the object.")
    ] = "cluster-topology",
    kind: Annotated[
        str,
        typer.Option(
            metavar="ClusterTopologyBinding|ClusterTopology",
            help="cluster-topology: kind of the object; ClusterTopology for Grove before May 2026.",
        ),
    ] = "ClusterTopologyBinding",
    controller_namespace: Annotated[
        str,
        typer.Option(metavar="NAMESPACE", help="controller: the namespace that it runs in."),
    ] = "dynctl-system",
    watch_namespace: Annotated[
        str | None,
        typer.Option(metavar="NAMESPACE", help="controller: only pods there. [default: all]"),
    ] = None,
    stale: Annotated[
        str,
        typer.Option(
            metavar="report|starting|always",
            help="controller: which labels that differ from the node's it replaces.",
        ),
    ] = "report",
) -> int:
    """Print a topology patch for worker pods, a Grove topology, or the controller that copies
    labels (`topology sync`), as YAML (or -o json).

    `pod` is a patch for a Deployment or StatefulSet: save it, then run
    kubectl patch deployment NAME --patch-file FILE.
    """
    from dynctl.base.errors import UsageProblem
    from dynctl.base.options import MANIFEST_FORMATS
    from dynctl.cli.shared_options import seconds_of
    from dynctl.manifests.lint.levels import misordered
    from dynctl.manifests.render import (
        InitWait,
        cluster_topology,
        needs_copying,
        pod_patch,
        pod_topology,
        sync_controller,
    )
    from dynctl.screens.render import emit, talk, yaml_text

    if options.output not in MANIFEST_FORMATS:
        raise UsageProblem(f"-o {options.output.value}: expected yaml or json")
    seconds_of("--init-timeout", init_timeout)
    if controller and what not in ("pod", "controller"):
        raise UsageProblem(f"--controller and {what}: give one of the two")
    if controller or what == "controller":
        if not image:
            raise UsageProblem(
                "controller needs --image, an image with dynctl",
                "for example: --image registry.example/dynctl:0.1.0",
            )
        result = sync_controller(controller_namespace, image, watched=watch_namespace, stale=stale)
    elif what == "cluster-topology":
        result = cluster_topology(kind, name, level or ())
        pair = misordered([level["domain"] for level in result["spec"]["levels"]])
        if pair is not None:
            talk(f"warning: levels must go from broad to narrow; {pair[0]} is after {pair[1]}")
    elif what == "pod":
        if level:
            raise UsageProblem(
                "--level is for cluster-topology; use --label-key for a pod",
                "dynctl topology render cluster-topology --level DOMAIN=KEY",
            )
        if init_wait and not image:
            raise UsageProblem(
                "--init-wait needs --image, an image with dynctl",
                "for example: --init-wait --image registry.example/dynctl:0.1.0",
            )
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
            f"note: the pod must have the label {', '.join(pod.labels.values())}: "
            + (
                f"Kubernetes does not copy {', '.join(keys)} from the node; set it in the template"
                if keys
                else "Kubernetes 1.35 copies it from the node; older ones need it in the template"
            )
        )
    else:
        raise UsageProblem(f"{what}: expected pod, cluster-topology or controller")
    emit(result, options, screen=lambda value, _canvas: yaml_text(value))
    return 0

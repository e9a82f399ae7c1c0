"""`dynctl topology verify`."""

from pathlib import Path
from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import FailOn, Suppress, expect_level, seconds


def verify_topology(
    options: GlobalOptions,
    dgd: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this DynamoGraphDeployment (repeatable). [default: all in the namespace]",
        ),
    ] = None,
    exec_: Annotated[
        str,
        typer.Option(
            "--exec",
            metavar="auto|all|sample|none",
            help="Read topology files in pods: of all workers, a sample, none; auto: all up to 64.",
        ),
    ] = "auto",
    logs: Annotated[
        str,
        typer.Option(
            metavar="auto|all|sample|none",
            help="Read the start of logs: of all workers, a sample, none; auto: all up to 64.",
        ),
    ] = "auto",
    probe: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=1000,
            help="Send N chats of one token to each model of each frontend and check their route;"
            " with --wait in each round.",
        ),
    ] = 0,
    path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Check only this topology mount, inside a worker's pod."),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --path: the domain to check. [default: $DYN_KV_TRANSFER_DOMAIN]",
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Check manifests instead, as topology lint does."
        ),
    ] = None,
    fail_on: FailOn = "fail",
    suppress: Suppress = None,
    wait: Annotated[
        float | None,
        typer.Option(
            parser=seconds(),
            metavar="DURATION",
            help="Repeat the checks until none fails, at most this long: 5m.",
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Read the lists, and show which requests would follow; enter no pod.",
        ),
    ] = False,
    list_checks: Annotated[
        bool, typer.Option("--list-checks", help="List all checks and exit.")
    ] = False,
) -> int:
    """Verify that node topology reaches the router: every link of every worker.

    Reads the cluster of the kubeconfig; with --discovery etcd or file, the registrations there;
    with --path, the mount of one worker. Changes nothing: it sends GETs, access reviews, exec of
    cat and ls, and port-forwards. Exit code 0: no check failed, 1: a check failed, 3: the cluster
    cannot be read or does not have the graph.
    """
    from dynctl.base.errors import ExitCode
    from dynctl.cli.commands.topology_lint import lint_files
    from dynctl.findings.pages import code_list
    from dynctl.screens.progress import progress
    from dynctl.screens.render import emit
    from dynctl.verify.verification import VerifyOptions, plan_verify, run_verify

    if list_checks:
        emit(code_list("DYT"), options)
        return ExitCode.YES
    expect_level(fail_on)
    if file:
        _check_alone(options, dgd, path, probe, wait, plan)
        return lint_files(options, file, fail_on, suppress)
    wanted = VerifyOptions(
        graphs=tuple(dgd or ()),
        exec=exec_,
        logs=logs,
        probe=probe,
        path=path,
        domain=domain,
        suppress=tuple(suppress or ()),
        fail_on=fail_on,
        wait=wait,
    )
    if plan:
        emit(plan_verify(options, wanted), options)
        return ExitCode.YES
    with progress(options) as bar:
        bar.pulse("reading the cluster" if wait is None else f"waiting for at most {wait:g} s")
        report = run_verify(options, wanted)
    emit(report, options)
    return ExitCode.YES if report.passes(fail_on) else ExitCode.NO


def _check_alone(
    options: GlobalOptions,
    dgd: list[str] | None,
    path: Path | None,
    probe: int,
    wait: float | None,
    plan: bool,
) -> None:
    """Raise UsageProblem for options that have no effect with --file."""
    from dynctl.base.errors import UsageProblem

    beside = {
        "--dgd": dgd,
        "--path": path,
        "--probe": probe,
        "--wait": wait,
        "--plan": plan,
        "-n": options.namespace,
        "-A": options.all_namespaces,
        "--kube-context": options.kube_context,
    }
    wrong = [flag for flag, value in beside.items() if value]
    if wrong:
        raise UsageProblem(
            f"--file checks manifests, not a cluster; remove {', '.join(wrong)}",
            "with a cluster: dynctl topology lint -f FILE --against KUBE_CONTEXT",
        )

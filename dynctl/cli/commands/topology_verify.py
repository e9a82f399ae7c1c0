"""`dynctl topology verify`: the pipeline from node label to router, link by link."""

from pathlib import Path
from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import FailOn, expect_level, seconds


def verify_topology(
    options: GlobalOptions,
    dgd: Annotated[
        list[str] | None,
        typer.Option(
            "--dgd",
            metavar="NAME",
            help="Only this DynamoGraphDeployment (repeatable). [default: all of the namespace]",
        ),
    ] = None,
    exec_: Annotated[
        str,
        typer.Option(
            "--exec",
            metavar="all|sample|none",
            help="Read topology files in pods (exec of cat): of all workers, of one a component "
            "and domain value and every odd one, or of none.",
        ),
    ] = "sample",
    logs: Annotated[
        str,
        typer.Option(
            "--logs", metavar="all|sample|none", help="Read the start of workers' logs, likewise."
        ),
    ] = "sample",
    probe: Annotated[
        int,
        typer.Option(
            "--probe",
            metavar="N",
            min=0,
            max=1000,
            help="Send N live chats of one token to each model of each frontend and see where "
            "they go. [default: none]",
        ),
    ] = 0,
    path: Annotated[
        Path | None,
        typer.Option(
            "--path", metavar="DIR", help="Judge the topology mount of one worker, from inside."
        ),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option(
            "--domain",
            metavar="NAME",
            help="With --path: the domain that must have a value. "
            "[default: $DYN_KV_TRANSFER_DOMAIN]",
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Check manifests instead, as topology lint does."
        ),
    ] = None,
    fail_on: FailOn = "fail",
    suppress: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE[=SUBJECT]",
            help="Leave a check out, or a finding: --suppress 'DYT0902=Pod my-*.prod'.",
        ),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            parser=seconds,
            metavar="DURATION",
            help="Look again until nothing fails, this long: 5m.",
        ),
    ] = None,
    list_checks: Annotated[
        bool, typer.Option("--list-checks", help="List every check and stop.")
    ] = False,
) -> int:
    """Prove that node topology reaches the router: every link, every worker, the first break.

    Looks at the cluster of the kubeconfig; with --discovery etcd or file at what is registered
    there; with --path at one worker's mount. Changes nothing: it sends GETs, access reviews, exec
    of cat and port-forwards. Exit code 0 when nothing failed, 1 when a check did, 3 when the
    cluster cannot be read or has no such graph.
    """
    from dynctl.base.errors import ExitCode
    from dynctl.cli.commands.topology_lint import lint_files
    from dynctl.findings.pages import code_list
    from dynctl.screens.render import emit
    from dynctl.verify.run import VerifyOptions, verify_report

    if list_checks:
        emit(code_list("DYT"), options)
        return ExitCode.YES
    expect_level(fail_on)
    if file:
        _check_alone(options, dgd, path, probe, wait)
        return lint_files(options, file, fail_on, suppress)
    report = verify_report(
        options,
        VerifyOptions(
            graphs=tuple(dgd or ()),
            exec=exec_,
            logs=logs,
            probe=probe,
            path=path,
            domain=domain,
            suppress=tuple(suppress or ()),
            fail_on=fail_on,
            wait=wait,
        ),
    )
    emit(report, options)
    return ExitCode.YES if report.passes(fail_on) else ExitCode.NO


def _check_alone(
    options: GlobalOptions,
    dgd: list[str] | None,
    path: Path | None,
    probe: int,
    wait: float | None,
) -> None:
    """Raise UsageProblem for what --file leaves unread."""
    from dynctl.base.errors import UsageProblem

    beside = {
        "--dgd": dgd,
        "--path": path,
        "--probe": probe,
        "--wait": wait,
        "-n": options.namespace,
        "-A": options.all_namespaces,
        "--kube-context": options.kube_context,
    }
    wrong = [flag for flag, value in beside.items() if value]
    if wrong:
        raise UsageProblem(
            f"--file checks manifests and no cluster; leave out {', '.join(wrong)}",
            "with a cluster: dynctl topology lint -f FILE --against KUBE_CONTEXT",
        )

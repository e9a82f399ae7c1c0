"""`dynctl topology wait`: for init containers of workers."""

import os
from pathlib import Path
from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import seconds


def wait_for_topology(
    options: GlobalOptions,
    path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of topology files. [default: $DYN_TOPOLOGY_MOUNT_PATH, then "
            "/etc/dynamo/topology]",
        ),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Domain to wait for. [default: $DYN_KV_TRANSFER_DOMAIN]"),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            parser=seconds(),
            metavar="DURATION",
            help="Give up after this long: 30s, 2m. [default: 30s]",
        ),
    ] = None,
) -> int:
    """Wait until the topology file of a domain has content, and print its value.

    Reads the directory once per second, as a worker does. Exit code 1: timed out; Kubernetes then
    restarts an init container.
    """
    import time

    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.base.worker_environment import (
        DEFAULT_MOUNT_PATH,
        POLL_TIMEOUT_S,
        TopologyEnvironmentError,
        expect_directory,
        names_a_file,
        transfer_policy,
        wait_for_domain,
    )
    from dynctl.documents.topology import TopologyValue
    from dynctl.screens.render import emit, talk

    name = (domain or os.environ.get("DYN_KV_TRANSFER_DOMAIN", "")).strip()
    if not name:
        raise UsageProblem(
            "no domain specified; expected --domain or $DYN_KV_TRANSFER_DOMAIN",
            "for example: dynctl topology wait --domain zone",
        )
    if not names_a_file(name):
        source = "--domain" if domain else "DYN_KV_TRANSFER_DOMAIN"
        raise UsageProblem(
            f"{source} {name!r}: expected the name of a file in the topology directory",
            "for example: dynctl topology wait --domain zone",
        )
    mount = path or Path(
        os.environ.get("DYN_TOPOLOGY_MOUNT_PATH", "").strip() or DEFAULT_MOUNT_PATH
    )
    try:
        # The worker of this pod reads them after the wait, and would not start.
        transfer_policy(os.environ)
        expect_directory(mount, "--path" if path else "DYN_TOPOLOGY_MOUNT_PATH")
    except TopologyEnvironmentError as error:
        raise UsageProblem(str(error)) from None
    try:
        domains = wait_for_domain(
            mount,
            name,
            now=time.monotonic,
            sleep=time.sleep,
            log=lambda _level, line: talk(line),
            timeout_s=POLL_TIMEOUT_S if timeout is None else timeout,
        )
    except TopologyEnvironmentError as error:
        talk(str(error))
        return ExitCode.NO
    emit(TopologyValue(name, domains[name], str(mount / name)), options)
    return ExitCode.YES

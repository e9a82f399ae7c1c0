"""The sections of a bundle; an error of one section does not end the others."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from msgspec import UNSET, UnsetType

from dynctl import version
from dynctl.adapters.dynamo.planes import backend, in_cluster, namespace
from dynctl.adapters.kubernetes.from_options import open_cluster
from dynctl.adapters.ports import ClusterRefusal
from dynctl.base.errors import DynctlError, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.bundle.environment import environment
from dynctl.documents.bundle import ClusterVersion, FrontendVersion, OptionsFile, VersionsFile
from dynctl.settings.contexts.precedence import apply_context, in_context
from dynctl.sources.client import FrontendClient
from dynctl.sources.connect import connect
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.dynamo.frontend_pods import cluster_ways
from dynctl.sources.named import DEFAULT_FRONTEND, expect_no_place, frontends

#: Libraries whose versions are recorded.
_LIBRARIES: Final = tuple(
    "aiohttp etcd3 grpcio httpx jinja2 kubernetes msgspec nats-py protobuf pyzmq textual "
    "tokenizers typer uvloop websocket-client".split()
)
_NO_CLUSTER: Final = (
    "no cluster specified: --kubernetes, --kubeconfig FILE, --kube-context NAME or -n NAMESPACE"
)


@dataclass(frozen=True, slots=True)
class Section:
    """One member of a bundle. ``read`` returns its content: plain data, a msgspec Struct, or the
    bytes of a JSON document, and appends notes on what is unknown to its argument."""

    file: str
    what: str
    read: Callable[[list[str]], Any]


def sections(options: GlobalOptions, *, kubernetes: bool) -> list[Section]:
    """All sections in the order of the archive. ``kubernetes``: read a cluster even if no option
    specifies one."""
    return [
        Section("versions.json", "versions of client, frontends and cluster",
                lambda notes: _versions(options, kubernetes=kubernetes)),
        Section("options.json", "options and their sources: flags, environment, context",
                lambda notes: _options(options)),
        Section("environment.json", "environment variables; unlisted values are masked",
                lambda notes: environment(os.environ)),
        Section("check.json", "the report of dynctl check", lambda notes: _check(options)),
        Section("topology-verify.json", "the report of dynctl topology verify",
                lambda notes: _verify(options, kubernetes=kubernetes)),
        Section("workers.json", "dynctl workers list", lambda notes: _workers(options, notes)),
        Section("topology.json", "dynctl topology show", lambda notes: _topology(options, notes)),
        Section("config.json", "dynctl config show", lambda notes: _config(options)),
        Section("thresholds.json", "dynctl thresholds get --ranks",
                lambda notes: _thresholds(options, notes)),
        Section("view.json", "the router's state for --view: hashes, no prompts",
                lambda notes: _view(options, notes)),
    ]  # fmt: skip


def cluster_named(options: GlobalOptions) -> bool:
    """Whether options or context specify a Kubernetes cluster. Raises UsageProblem."""
    options = in_context(options)
    named = (options.kubeconfig, options.kube_context, options.namespace)
    return (
        any(option is not None for option in named) or options.all_namespaces or in_cluster(options)
    )


# -- versions and options --------------------------------------------------------------------------


def _versions(options: GlobalOptions, *, kubernetes: bool) -> VersionsFile:
    versions: list[FrontendVersion] = []
    problem: str | UnsetType = UNSET
    try:
        with _named_frontends(options) as named:
            versions = [_frontend_version(name, url, options) for name, url in named]
    except (DynctlError, ClusterRefusal) as error:
        problem = str(error)
    return VersionsFile(
        client=version(),
        python=sys.version.split()[0],
        platform=platform.platform(),
        libraries={name: _installed_version(name) for name in _LIBRARIES},
        frontends=versions,
        cluster=_cluster_version(options) if kubernetes or cluster_named(options) else None,
        frontends_error=problem,
    )


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def _named_frontends(options: GlobalOptions) -> Iterator[list[tuple[str, str]]]:
    """(name, URL) of the specified frontends, the cluster's, or the default one."""
    options = in_context(options)
    urls = frontends(options)
    planes = backend(options)
    if urls or options.offline:
        yield [(url, url) for url in urls]
    elif planes is None:
        expect_no_place(options)
        yield [(DEFAULT_FRONTEND, DEFAULT_FRONTEND)]
    elif not in_cluster(options):
        yield []
    else:
        with cluster_ways(options, namespace(options)) as ways:
            yield list(zip(ways.names, ways.urls, strict=True))


def _frontend_version(name: str, url: str, options: GlobalOptions) -> FrontendVersion:
    from dynctl.sources.named import token

    kind: str | None = None
    try:
        dynamo = DynamoFrontend(url, options.timeout)
        kind = dynamo.identify()
        if kind == "dynctl":
            version = FrontendClient(url, token(options), options.timeout).version()
        else:
            version = dynamo.openapi_version()
    except DynctlError as error:
        return FrontendVersion(name, kind, error=error.message)
    return FrontendVersion(name, kind, version)


def _cluster_version(options: GlobalOptions) -> ClusterVersion:
    try:
        cluster = open_cluster(options)
        try:
            version = cluster.get("/version")
        finally:
            cluster.close()
    except (DynctlError, ClusterRefusal) as error:
        return ClusterVersion(None, error=error.message)
    return ClusterVersion(version.get("gitVersion"), version.get("platform"))


def _options(options: GlobalOptions) -> OptionsFile:
    applied = apply_context(options)
    return OptionsFile(
        given=sorted(options.given),
        context=applied.context,
        context_chosen_by=applied.chosen_by,
        origins=dict(applied.origins),
        overruled=dict(applied.overridden),
    )


# -- reports ---------------------------------------------------------------------------------------


def _check(options: GlobalOptions) -> Any:
    from dynctl.health.checks.run import judge
    from dynctl.sources.dynamo.check_facts import gather

    return judge(gather(options))


def _verify(options: GlobalOptions, *, kubernetes: bool) -> Any:
    from dynctl.verify.verification import VerifyOptions, run_verify

    if not kubernetes and not cluster_named(options):
        raise UsageProblem(_NO_CLUSTER)
    return run_verify(options, VerifyOptions())


# -- the source ------------------------------------------------------------------------------------


def _workers(options: GlobalOptions, notes: list[str]) -> Any:
    from dynctl.documents.workers import WorkerList

    source = connect(options)
    rows = source.workers()
    notes += source.doubts
    return WorkerList(source.title, rows)


def _topology(options: GlobalOptions, notes: list[str]) -> Any:
    from dynctl.planning.domain_capacity import topology_show

    source = connect(options)
    rows = source.workers(index=False)
    notes += source.doubts
    return topology_show(source.title, rows, source.config().values)


def _config(options: GlobalOptions) -> Any:
    from dynctl.cli.config_report import remote_report

    source = connect(options)
    return remote_report(source.title, source.config())


def _thresholds(options: GlobalOptions, notes: list[str]) -> Any:
    from dynctl.cli.threshold_list import threshold_list

    source = connect(options)
    with source.replicas() as replicas:
        result, _ = threshold_list(source.title, replicas, None, signals=True)
        notes += source.doubts
    return result


def _view(options: GlobalOptions, notes: list[str]) -> bytes:
    source = connect(options)
    data = source.save()
    notes += source.doubts
    return data

"""Read the topology files and the log start of sampled pods, and a mount in the file system.

Each pod costs a connection for its files and one for its log.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Final

from dynctl.adapters.ports import Cluster, ClusterRefusal
from dynctl.base.errors import Unreachable, file_problem
from dynctl.base.files import read_file
from dynctl.health.facts import Unread
from dynctl.verify.chain import LinkName, WorkerChain
from dynctl.verify.cluster_facts import MountFacts, StartLog, TopologyFile
from dynctl.verify.join import JoinedFacts
from dynctl.verify.pod_spec import why_not_running
from dynctl.wire.dynamo.worker_log import StartLines, read_start_log
from dynctl.wire.kubernetes.names import MOUNT_PATH, NOT_CREATED_REASON
from dynctl.wire.kubernetes.objects import Pod

#: A label value has at most 63 bytes; a longer file is not a value.
MOST_BYTES: Final = 4096
_LOG_BYTES: Final = 256 * 1024
#: The most workers of which ``auto`` reads all.
MOST_READ: Final = 64
#: The most files beside those of the policy that are read in one mount.
_MOST_OTHERS: Final = 8
_NAMES_BYTES: Final = 64 * 1024


def topology_file(content: bytes) -> TopologyFile:
    """The content of a file as the value of a domain."""
    if len(content) > MOST_BYTES:
        return TopologyFile("", f"is larger than {MOST_BYTES:,} bytes")
    try:
        decoded = content.decode()
    except UnicodeDecodeError:
        return TopologyFile("", "is not UTF-8")
    value = decoded.strip()
    if not value.isprintable():
        lines = len(value.splitlines())
        return TopologyFile(
            "", f"has {lines:,} lines" if lines > 1 else "has characters that are not printable"
        )
    return TopologyFile(decoded)


def read_files(cluster: Cluster, worker: WorkerChain) -> Mapping[str, TopologyFile] | Unread:
    """The files of the pod's mount by name: all domains of its policy, and others there.

    Raises ClusterRefusal or Unreachable.
    """
    pod, policy = worker.pod, worker.policy
    if pod is None or policy is None or pod.main is None:
        return Unread("it has no container named main")
    if not worker.running:
        return Unread("its container does not run")
    mount = (pod.main.env.get("DYN_TOPOLOGY_MOUNT_PATH") or MOUNT_PATH).rstrip("/") or "/"
    domains = {policy.domain: None, **dict.fromkeys(policy.sources)}
    files = {
        domain: _read_file(cluster, pod, pod.main.name, f"{mount}/{domain}") for domain in domains
    }
    return {**files, **_others(cluster, pod, pod.main.name, mount, domains)}


def _read_file(cluster: Cluster, pod: Pod, container: str, path: str) -> TopologyFile:
    try:
        content = cluster.read_file(pod.namespace, pod.name, container, path, max_bytes=MOST_BYTES)
    except FileNotFoundError:
        return TopologyFile(None)
    except ValueError:
        return TopologyFile("", f"is larger than {MOST_BYTES:,} bytes")
    return topology_file(content)


def _others(
    cluster: Cluster, pod: Pod, container: str, mount: str, domains: Container[str]
) -> dict[str, TopologyFile]:
    """The files in the mount beside those of ``domains``: each becomes a domain of the worker.

    None if the container has no ``ls``, or cannot read one: the worker cannot read that either.
    """
    try:
        names = cluster.file_names(
            pod.namespace, pod.name, container, mount, max_bytes=_NAMES_BYTES
        )
    except (ClusterRefusal, Unreachable, FileNotFoundError, ValueError):
        return {}
    others = [name for name in names if name not in domains and name.isprintable()]
    contents = {}
    for name in others[:_MOST_OTHERS]:
        with suppress(ClusterRefusal, Unreachable):
            contents[name] = _read_file(cluster, pod, container, f"{mount}/{name}")
    return contents


def read_start(cluster: Cluster, worker: WorkerChain) -> StartLog | Unread:
    """The topology lines at the start of the pod's log, and of its previous run if there is one.

    Raises ClusterRefusal or Unreachable.
    """
    pod = worker.pod
    if pod is None or pod.main is None:
        return Unread("it has no container named main")
    earlier = StartLines()
    now = _lines(cluster, pod, pod.main.name, previous=False)
    if pod.main.last_end is not None and pod.main.restarts > 0:
        earlier = _lines(cluster, pod, pod.main.name, previous=True)
    return replace(
        StartLog() if now.config is None else _log_of_config(now.config),
        timed_out=now.timed_out or earlier.timed_out,
        not_persisted=now.not_persisted or earlier.not_persisted,
    )


def _log_of_config(config: Mapping[str, Any]) -> StartLog:
    """The topology of the runtime config that a worker logs."""
    domains = config.get("topology_domains")
    weight = config.get("kv_transfer_preferred_weight")
    return StartLog(
        {str(k): str(v) for k, v in domains.items()} if isinstance(domains, dict) else {},
        str(config.get("kv_transfer_domain") or ""),
        str(config.get("kv_transfer_enforcement") or ""),
        float(weight) if isinstance(weight, int | float) else None,
    )


def _lines(cluster: Cluster, pod: Pod, container: str, *, previous: bool) -> StartLines:
    lines = cluster.log_lines(
        pod.namespace, pod.name, container, previous=previous, max_bytes=_LOG_BYTES
    )
    return read_start_log(lines)


# -- which pods are read ---------------------------------------------------------------------------


class Sampling(StrEnum):
    """``sample``: one worker for each component and domain value, and all suspicious workers.

    ``auto``: all workers up to ``MOST_READ``, a sample of more.
    """

    AUTO = "auto"
    ALL = "all"
    SAMPLE = "sample"
    NONE = "none"


def chosen_workers(joined: JoinedFacts, sampling: Sampling) -> tuple[WorkerChain, ...]:
    """The workers with a running pod that are read, in order."""
    if sampling is Sampling.AUTO:
        pods = sum(
            worker.pod is not None and worker.policy is not None for worker in joined.workers
        )
        sampling = Sampling.ALL if pods <= MOST_READ else Sampling.SAMPLE
    return tuple(_sample_workers(joined, sampling))


def _sample_workers(joined: JoinedFacts, sampling: Sampling) -> Iterator[WorkerChain]:
    seen: set[tuple[str, str, str | None]] = set()
    for worker in joined.workers:
        if sampling is Sampling.NONE or worker.pod is None or worker.policy is None:
            continue
        kind = (worker.graph, worker.component, worker.value(LinkName.LABEL))
        if sampling is Sampling.ALL or kind not in seen or _is_suspicious(worker):
            seen.add(kind)
            yield worker


def _is_suspicious(worker: WorkerChain) -> bool:
    """Whether a link differs, it restarted, is not ready, or has no card."""
    pod, main = worker.pod, None if worker.pod is None else worker.pod.main
    restarted = main is not None and (main.restarts > 0 or main.last_end is not None)
    broken = any(True for chain in worker.chains.values() for _ in chain.breaks())
    return broken or restarted or pod is None or not pod.ready or _lacks_card(worker)


def _lacks_card(worker: WorkerChain) -> bool:
    """Whether the worker is known to have no card."""
    known = worker.chain is None or worker.chain[LinkName.CARD].known
    return known and not worker.cards


#: The most pods, and namespaces, whose warnings are read.
_MOST_WARNED: Final = 16


def warning_queries(joined: JoinedFacts) -> list[tuple[str, str]]:
    """Namespace and field selector of the events that explain missing and stopped workers."""
    if joined.cluster is None or isinstance(joined.cluster.events, Unread):
        return []
    pods: list[tuple[str, str]] = []
    lists: dict[tuple[str, str], None] = {}
    for graph in joined.governed:
        pods += map(_query_of_pod, filter(why_not_running, graph.worker_pods))
        if graph.lacks_workers:
            lists[graph.name.rpartition("/")[0], f"reason={NOT_CREATED_REASON}"] = None
    queries = [*pods[:_MOST_WARNED], *list(lists)[:_MOST_WARNED]]
    return [(namespace, f"{selector},type=Warning") for namespace, selector in queries]


def _query_of_pod(pod: Pod) -> tuple[str, str]:
    return pod.namespace, f"involvedObject.name={pod.name}"


# -- a mount in this file system -------------------------------------------------------------------


_MOST_FILES: Final = 256


def read_mount(path: Path, domain: str) -> MountFacts:
    """Read all visible regular files; symlinks are followed: the Downward API uses them.

    Raises Unreachable for an existing directory that is not readable.
    """
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in islice(entries, _MOST_FILES)]
        files = {
            name: _file(path / name)
            for name in sorted(names)
            if not name.startswith(".") and (path / name).is_file()
        }
    except FileNotFoundError:
        return MountFacts(str(path), domain, {}, absent="the directory does not exist")
    except NotADirectoryError:
        return MountFacts(str(path), domain, {}, absent="not a directory")
    except OSError as error:
        raise Unreachable(
            f"--path {path}: not readable: {file_problem(error, 'directory')}"
        ) from error
    if domain and domain not in files:
        files[domain] = TopologyFile(None)
    return MountFacts(str(path), domain, files)


def _file(path: Path) -> TopologyFile:
    try:
        return topology_file(read_file(path, MOST_BYTES, pipe=False))
    except OSError as error:
        return TopologyFile("", f"is not readable: {file_problem(error)}")

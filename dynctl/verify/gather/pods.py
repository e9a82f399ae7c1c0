"""Read one worker pod closely: the files of its topology mount, and the start of its log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dynctl.adapters.ports import Cluster, ClusterRefusal
from dynctl.base.errors import Unreachable
from dynctl.health.facts import Unread
from dynctl.verify.chain import WorkerChain
from dynctl.verify.facts import PodKey, StartLog, TopologyFile
from dynctl.verify.refusals import unread
from dynctl.wire.dynamo.worker_log import StartLines, read_start_log
from dynctl.wire.kubernetes.names import MOUNT_PATH
from dynctl.wire.kubernetes.objects import Pod

#: A label's value has at most 63 bytes; more than this is not a value.
MOST_BYTES: Final = 4096
_LOG_BYTES: Final = 256 * 1024


def topology_file(content: bytes) -> TopologyFile:
    """What a file's bytes are as a domain's value."""
    if len(content) > MOST_BYTES:
        return TopologyFile("", f"is larger than {MOST_BYTES:,} bytes")
    try:
        told = content.decode()
    except UnicodeDecodeError:
        return TopologyFile("", "is not UTF-8")
    value = told.strip()
    if not value.isprintable():
        lines = len(value.splitlines())
        return TopologyFile(
            "", f"has {lines:,} lines" if lines > 1 else "holds characters that cannot be printed"
        )
    return TopologyFile(told)


def read_files(
    cluster: Cluster, worker: WorkerChain
) -> tuple[PodKey, Mapping[str, TopologyFile] | Unread]:
    """Domain -> file, of every domain of the policy. Pods without a policy are not asked for."""
    pod, policy = worker.pod, worker.policy
    if pod is None or policy is None or pod.main is None:
        return _key(worker), Unread("it has no container called main")
    if not worker.running:
        return _key(worker), Unread("its container does not run")
    mount = pod.main.env.get("DYN_TOPOLOGY_MOUNT_PATH") or MOUNT_PATH
    found: dict[str, TopologyFile] = {}
    for domain in {policy.domain: None, **dict.fromkeys(policy.sources)}:
        path = f"{mount.rstrip('/')}/{domain}"
        try:
            content = cluster.read_file(
                pod.namespace, pod.name, pod.main.name, path, max_bytes=MOST_BYTES
            )
        except FileNotFoundError:
            found[domain] = TopologyFile(None)
        except ValueError:
            found[domain] = TopologyFile("", f"is larger than {MOST_BYTES:,} bytes")
        except (ClusterRefusal, Unreachable) as refusal:
            # One node that cannot be reached must not hide the pods of the others.
            return _key(worker), _why(refusal)
        else:
            found[domain] = topology_file(content)
    return _key(worker), found


def read_start(cluster: Cluster, worker: WorkerChain) -> tuple[PodKey, StartLog | Unread]:
    """What the beginning of its log says, and that of the run before it where there was one."""
    pod = worker.pod
    if pod is None or pod.main is None:
        return _key(worker), Unread("it has no container called main")
    earlier = StartLines()
    try:
        now = _lines(cluster, pod, pod.main.name, previous=False)
        if pod.main.last_end is not None and pod.main.restarts > 0:
            earlier = _lines(cluster, pod, pod.main.name, previous=True)
    except (ClusterRefusal, Unreachable) as refusal:
        return _key(worker), _why(refusal)
    config = now.config
    if config is None:
        return _key(worker), StartLog(
            timed_out=now.timed_out or earlier.timed_out,
            not_persisted=now.not_persisted or earlier.not_persisted,
        )
    domains = config.get("topology_domains")
    weight = config.get("kv_transfer_preferred_weight")
    return _key(worker), StartLog(
        {str(k): str(v) for k, v in domains.items()} if isinstance(domains, dict) else {},
        str(config.get("kv_transfer_domain") or ""),
        str(config.get("kv_transfer_enforcement") or ""),
        float(weight) if isinstance(weight, int | float) else None,
        now.timed_out or earlier.timed_out,
        now.not_persisted or earlier.not_persisted,
    )


def _lines(cluster: Cluster, pod: Pod, container: str, *, previous: bool) -> StartLines:
    lines = cluster.log_lines(
        pod.namespace, pod.name, container, previous=previous, max_bytes=_LOG_BYTES
    )
    return read_start_log(lines)


def _why(problem: ClusterRefusal | Unreachable) -> Unread:
    return unread(problem) if isinstance(problem, ClusterRefusal) else Unread(problem.message)


def _key(worker: WorkerChain) -> PodKey:
    return ("", "") if worker.pod is None else (worker.pod.namespace, worker.pod.name)

"""Checks of the operator's settings in worker pods, and of topology files: DYT05.

The same checks apply to a single mount in the local file system (--path), as far as they can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from dynctl.base.json_fields import mapping
from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.health.facts import Unread
from dynctl.manifests.lint import graph as lint_graph
from dynctl.verify.chain import LinkName, WorkerChain
from dynctl.verify.cluster_facts import MountFacts, TopologyFile
from dynctl.verify.join import JoinedFacts
from dynctl.verify.live_graphs import judged_live
from dynctl.verify.needs import (
    cluster_of,
    differing,
    first_skip,
    graphs_read,
    has_policy,
    has_workers,
    in_cluster,
    key_of,
    label_known,
    live_workers,
    pod_of,
    unlabelled_graphs,
)
from dynctl.verify.pod_spec import (
    PATH_ENV,
    engine,
    env_differences,
    is_untouched,
    mount_differences,
)
from dynctl.verify.root_causes import stuck_at_start, wrong_pod_spec
from dynctl.verify.wording import CheckTally, age, restart_fix
from dynctl.wire.kubernetes.names import TOPOLOGY_VOLUME

REFRESH_S: Final = 90.0
"""The longest time from a changed label to a changed file: the kubelet's sync period and cache."""
NOT_READ: Final = "not read (use --exec all)"
_LOOK: Final = "find the first broken link from outside: dynctl topology verify --dgd NAME"
_MOUNT_IT: Final = """
mount the volume of topology files there (dynctl topology render shows it), or use its directory: \
--path DIR""".strip()


# -- the operator's settings -----------------------------------------------------------------------


def _has_variables(joined: JoinedFacts) -> Outcome:
    return _check_settings(joined, _env_differs)


def _has_mount(joined: JoinedFacts) -> Outcome:
    return _check_settings(joined, _mount_differs)


def _env_differs(worker: WorkerChain) -> list[str]:
    main, policy = engine(pod_of(worker)), worker.policy
    return [] if main is None or policy is None else list(env_differences(main, policy).values())


def _mount_differs(worker: WorkerChain) -> list[str]:
    pod, policy = pod_of(worker), worker.policy
    main = engine(pod)
    return [] if main is None or policy is None else list(mount_differences(pod, main, policy))


def _check_settings(
    joined: JoinedFacts, differences: Callable[[WorkerChain], list[str]]
) -> Outcome:
    """Without pods that have none of the settings: DYT0402 reports those."""
    workers = live_workers(joined)
    tally = CheckTally("pod", len(workers))
    for worker in workers:
        pod = pod_of(worker)
        if engine(pod) is None:
            tally.explained.append("DYT0119")
        elif is_untouched(pod):
            tally.explained.append("DYT0402")
        elif differs := differences(worker):
            tally.wrong.append(differing(worker, differs))
    return tally.outcome()


# -- contents of the files -------------------------------------------------------------------------


_WorkerFiles: TypeAlias = tuple[WorkerChain, Mapping[str, TopologyFile]]


def _read_files(joined: JoinedFacts) -> tuple[list[_WorkerFiles], CheckTally]:
    """The workers whose files were read; the tally has the reasons for the others."""
    workers = live_workers(joined)
    tally = CheckTally("pod", len(workers), unread=unlabelled_graphs(joined))
    read: list[_WorkerFiles] = []
    for worker in workers:
        explained = wrong_pod_spec(worker, PATH_ENV)
        if not explained and not worker.running:
            explained = stuck_at_start(joined, worker) or "DYT0410"
        files = cluster_of(joined).files.get(key_of(worker))
        if explained:
            tally.explained.append(explained)
        elif files is None:
            tally.explained.append(NOT_READ)
        elif isinstance(files, Unread):
            tally.unread.append(f"files: {files.why}")
        else:
            read.append((worker, files))
    return read, tally


def _label_age(worker: WorkerChain, domain: str, now: float) -> float | None:
    """Seconds since the label was written, or since the pod was created; None if unknown."""
    pod, policy = pod_of(worker), worker.policy
    assert policy is not None
    written = pod.labelled_at(policy.sources[domain].pod_key)
    since = pod.created if written is None else written
    return None if since is None else now - since


def _is_fresh(worker: WorkerChain, domain: str, now: float) -> bool:
    old = _label_age(worker, domain, now)
    # A time that clocks put into the future does not make a label fresh for hours.
    return old is not None and abs(old) <= REFRESH_S


def _file_has_value(joined: JoinedFacts) -> Outcome:
    """Only files of existing labels: without its label a file is empty, as expected."""
    mount = joined.facts.mount
    wrong, unread = ([], []) if mount is None else _mount_filled(mount)
    skipped = first_skip(joined, (in_cluster, has_policy, has_workers, label_known))
    if skipped is not None:
        return skipped if mount is None else outcome(wrong, unread, _values(mount))
    (read, tally), now = _read_files(joined), cluster_of(joined).now
    tally.unread += unread
    tally.wrong += wrong
    for worker, files in read:
        problems = list(_problems_of_files(worker, files, now))
        if problems:
            fix = restart_fix(pod_of(worker))
            tally.wrong.append(found(worker.subject, what="; ".join(problems), fix=fix))
    return tally.outcome(len(read))


def _problems_of_files(
    worker: WorkerChain, files: Mapping[str, TopologyFile], now: float
) -> Iterator[str]:
    for domain, chain in worker.chains.items():
        file, label = files.get(domain), chain[LinkName.LABEL].value
        if file is None or label is None:
            continue
        problem = _problem(domain, file)
        if problem and not (_is_blank(file) and _is_fresh(worker, domain, now)):
            yield f"{problem}, the pod label is {label}"


def _problem(name: str, file: TopologyFile) -> str:
    if file.invalid:
        return f"file {name} {file.invalid}"
    if file.content is None:
        return f"file {name} does not exist"
    return f"file {name} is empty" if _is_blank(file) else ""


def _is_blank(file: TopologyFile) -> bool:
    return not file.invalid and file.content is not None and not file.content.strip()


def _differing_domains(worker: WorkerChain) -> Iterator[tuple[str, str, str]]:
    """``(domain, file value, label value)`` of each file that differs from its label."""
    for domain, chain in worker.chains.items():
        for gap in chain.breaks():
            if gap.link is LinkName.FILE and gap.value is not None and gap.expected is not None:
                yield domain, gap.value, gap.expected


def _file_matches_label(joined: JoinedFacts) -> Outcome:
    (read, tally), now = _read_files(joined), cluster_of(joined).now
    for worker, _ in read:
        stale = [
            difference
            for difference in _differing_domains(worker)
            if not _is_fresh(worker, difference[0], now)
        ]
        if stale:
            texts = (f"file {d} has {file}, the pod label {label}" for d, file, label in stale)
            tally.wrong.append(differing(worker, texts))
    return tally.outcome(len(read))


def _files_up_to_date(joined: JoinedFacts) -> Outcome:
    """Files that do not match a label yet which was written a moment ago."""
    (read, tally), now = _read_files(joined), cluster_of(joined).now
    for worker, files in read:
        behind = {
            domain: f"file {domain} has {file}" for domain, file, _ in _differing_domains(worker)
        }
        for domain, chain in worker.chains.items():
            file, label = files.get(domain), chain[LinkName.LABEL].value
            if file is not None and label is not None and _is_blank(file):
                behind[domain] = f"file {domain} is empty"
        for domain, state in behind.items():
            if _is_fresh(worker, domain, now):
                since = age(_label_age(worker, domain, now) or 0.0)
                wanted = worker.chains[domain][LinkName.LABEL].value
                tally.wrong.append(found(worker.subject, state=state, wanted=wanted, since=since))
    return tally.outcome(len(read))


# -- other domains ---------------------------------------------------------------------------------


def _other_domains(joined: JoinedFacts) -> Outcome:
    mount = joined.facts.mount
    wrong, unread = ([], []) if mount is None else _mount_other_domains(mount)
    skipped = first_skip(joined, (in_cluster, has_policy, has_workers, label_known))
    if skipped is not None:
        return skipped if mount is None else _outcome_of_mount(mount, wrong, unread)
    workers = live_workers(joined)
    tally = CheckTally("pod", len(workers), wrong, [*unread, *unlabelled_graphs(joined)])
    for worker in workers:
        policy, files = worker.policy, cluster_of(joined).files.get(key_of(worker))
        if policy is None or policy.source is None:
            continue
        if not worker.cards and files is None:
            tally.explained.append(NOT_READ)
        inside = {} if files is None or isinstance(files, Unread) else files
        extra = sorted(_domains_of(worker, inside) - policy.sources.keys() - {policy.domain})
        if extra:
            wanted = ", ".join(policy.sources)
            tally.wrong.append(found(worker.subject, domains=", ".join(extra), wanted=wanted))
    return tally.outcome()


def _outcome_of_mount(mount: MountFacts, wrong: list[Found], unread: list[str]) -> Outcome:
    if not mount.domain:
        return Skipped("no transfer domain (use --domain NAME)")
    if mount.absent:
        return Skipped(f"{mount.absent} (DYT0503)")
    return outcome(wrong, unread, mount.domain)


def _domains_of(worker: WorkerChain, files: Mapping[str, TopologyFile]) -> set[str]:
    """All domains from its volume, files or card; hidden and empty files are not domains."""
    volumes = (volume for volume in pod_of(worker).volumes if volume.name == TOPOLOGY_VOLUME)
    paths = {item.path for volume in volumes for item in volume.items}
    names = {path for path in paths if not path.startswith(".") and "/" not in path}
    names |= {name for name, file in files.items() if file.invalid or (file.content or "").strip()}
    for item in worker.cards:
        names |= mapping(item.card.runtime_config.get("topology_domains")).keys()
    return names


# -- one local mount -------------------------------------------------------------------------------


def _mount_filled(mount: MountFacts) -> tuple[list[Found], list[str]]:
    if isinstance(mount.files, Unread):
        return [], [mount.files.why]
    subject = f"Mount {mount.path}"
    if mount.absent:
        return [found(subject, what=mount.absent, fix=_MOUNT_IT)], []
    problems = _mount_problems(mount, mount.files)
    return [found(subject, what="; ".join(problems), fix=_LOOK)] if problems else [], []


def _mount_problems(mount: MountFacts, files: Mapping[str, TopologyFile]) -> list[str]:
    """Without a named domain one file with a value is enough; no file may be invalid."""
    if mount.domain:
        files = {mount.domain: files.get(mount.domain, TopologyFile(None))}
    problems = {name: text for name, file in files.items() if (text := _problem(name, file))}
    if mount.domain or len(problems) == len(files):
        return [*problems.values()] or ([] if files else ["no files"])
    return [text for name, text in problems.items() if files[name].invalid]


def _values(mount: MountFacts) -> str:
    """``zone=us-east-1a``: the values that a worker reads."""
    files = {} if isinstance(mount.files, Unread) else mount.files
    values = {name: (file.content or "").strip() for name, file in files.items()}
    wanted = {mount.domain} if mount.domain else values.keys()
    return ", ".join(
        f"{name}={value}" for name, value in values.items() if value and name in wanted
    )


def _mount_other_domains(mount: MountFacts) -> tuple[list[Found], list[str]]:
    if isinstance(mount.files, Unread):
        return [], [mount.files.why]
    extra = [
        name
        for name, file in mount.files.items()
        if name != mount.domain and file.content is not None and not _is_blank(file)
    ]
    if not extra or not mount.domain:
        return [], []
    return [found(f"Mount {mount.path}", domains=", ".join(extra), wanted=mount.domain)], []


_PODS: Final = (in_cluster, has_policy, has_workers)
_FILES: Final = (in_cluster, has_policy, has_workers, label_known)
_OF_LINT: Final = judged_live(lint_graph.POD_CHECKS, graphs_read)

FILE_CHECKS: Final[Sequence[Check[JoinedFacts]]] = (
    Check("DYT0501", _has_variables, _PODS),
    Check("DYT0502", _has_mount, _PODS),
    Check("DYT0503", _file_has_value),
    Check("DYT0504", _file_matches_label, _FILES),
    Check("DYT0505", _other_domains),
    _OF_LINT["DYT0506"],
    Check("DYT0507", _files_up_to_date, _FILES),
)

"""Checks of how workers started, by their status and the beginning of their logs: DYT06."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dynctl.base.json_fields import mapping
from dynctl.findings.runner import Check, Found, Outcome, found
from dynctl.health.facts import Unread
from dynctl.verify.chain import LinkName, WorkerChain
from dynctl.verify.facts import StartLog
from dynctl.verify.join import JoinedFacts
from dynctl.verify.needs import cluster_of, governed, in_cluster, live_workers, peopled, pod_of
from dynctl.verify.pod_spec import (
    DOMAIN_ENV,
    ENABLED_ENV,
    ENFORCEMENT_ENV,
    WEIGHT_ENV,
    engine,
    env_differences,
    is_weight,
)
from dynctl.verify.root_causes import has_started, held_up_by, log_of, stuck_at_start
from dynctl.verify.wording import age, excerpt, tally
from dynctl.wire.kubernetes.objects import Container, Pod

NOT_READ: Final = "not asked for (--logs all)"
_GAVE_UP: Final = 1
"""The exit code of a worker that waited for its topology in vain."""
_WEIGHT: Final = "kv_transfer_preferred_weight"


# -- did it wait in vain ---------------------------------------------------------------------------


def _started(joined: JoinedFacts) -> Outcome:
    """Workers whose label or file is missing wait in vain as a consequence: not told again."""
    workers = live_workers(joined)
    wrong: list[Found] = []
    unread: list[str] = []
    elsewhere: list[str] = []
    for worker in workers:
        log, pod = log_of(joined, worker), pod_of(worker)
        if isinstance(log, StartLog):
            if log.timed_out and not has_started(joined, worker):
                explained = held_up_by(worker)
                if explained:
                    elsewhere.append(explained)
                    continue
                wrong.append(
                    found(
                        worker.subject,
                        line=excerpt(log.timed_out),
                        now=_now(pod),
                        pod=pod.name,
                        namespace=pod.namespace,
                    )
                )
        elif not pod.ready and _may_have_given_up(pod):
            if isinstance(log, Unread):
                unread.append(f"logs: {log.why}")
            else:
                elsewhere.append(NOT_READ)
    judged = len(workers) - len(elsewhere)
    return tally(wrong, unread, judged, len(workers), "pod", elsewhere)


def _may_have_given_up(pod: Pod) -> bool:
    main = engine(pod)
    ended = None if main is None else main.last_end
    return ended is not None and ended.exit_code == _GAVE_UP


def _now(pod: Pod) -> str:
    main = engine(pod)
    if main is None or main.running_since is None:
        return (main.waiting if main is not None else "") or "not running"
    return "waiting again"


def _recovered(joined: JoinedFacts) -> Outcome:
    workers, now = live_workers(joined), cluster_of(joined).now
    wrong: list[Found] = []
    elsewhere: list[str] = []
    for worker in workers:
        log, pod = log_of(joined, worker), pod_of(worker)
        if not isinstance(log, StartLog):
            # Only the log tells why it was restarted; where it was not, there is nothing to tell.
            if _may_have_given_up(pod):
                elsewhere.append(NOT_READ)
        elif log.timed_out and has_started(joined, worker):
            main = engine(pod) or Container("")
            finished = None if main.last_end is None else main.last_end.finished
            since = "" if finished is None else f" {age(now - finished)} ago"
            wrong.append(found(worker.subject, restarts=max(1, main.restarts), since=since))
    judged = len(workers) - len(elsewhere)
    return tally(wrong, (), judged, len(workers), "pod", elsewhere)


# -- what it said it read --------------------------------------------------------------------------


@dataclass(slots=True)
class _Logs:
    """Workers that started and whose log was read; and why the others were not."""

    workers: list[tuple[WorkerChain, StartLog]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    whole: int = 0

    def outcome(self, wrong: Sequence[Found]) -> Outcome:
        judged = len(self.workers)
        return tally(wrong, self.unread, judged, self.whole, "log", self.elsewhere)


def _logs(joined: JoinedFacts) -> _Logs:
    """Further ranks of a replica are not counted: they tell nothing of their own."""
    logs = _Logs()
    for worker in live_workers(joined):
        if worker.follower:
            continue
        logs.whole += 1
        log = log_of(joined, worker)
        if not worker.running:
            logs.elsewhere.append("DYT0410")
        elif log is None:
            logs.elsewhere.append(NOT_READ)
        elif isinstance(log, Unread):
            logs.unread.append(f"logs: {log.why}")
        elif log.domains is None and stuck_at_start(joined, worker):
            logs.elsewhere.append(stuck_at_start(joined, worker))
        else:
            logs.workers.append((worker, log))
    return logs


def _as_configured(joined: JoinedFacts) -> Outcome:
    """What the card repeats is judged there (DYT0802, DYT0803), what the variables say at 0501."""
    logs = _logs(joined)
    logs.workers = [(worker, log) for worker, log in logs.workers if log.domains is not None]
    logs.elsewhere += ["DYT0604"] * (logs.whole - len(logs.workers) - len(logs.elsewhere))
    wrong = []
    for worker, log in logs.workers:
        differs = [*_domains_differ(worker, log), *_policy_differs(worker, log)]
        if differs:
            pod = pod_of(worker)
            wrong.append(
                found(
                    worker.subject,
                    differs="; ".join(differs),
                    pod=pod.name,
                    namespace=pod.namespace,
                )
            )
    return logs.outcome(wrong)


def _domains_differ(worker: WorkerChain, log: StartLog) -> Iterator[str]:
    for domain, chain in worker.chains.items():
        before = LinkName.FILE if chain[LinkName.FILE].value is not None else LinkName.LABEL
        wanted, told = chain[before].value, (log.domains or {}).get(domain)
        if wanted is None or told == wanted:
            continue
        if worker.cards and chain[LinkName.CARD].value == told:
            continue
        yield f"{domain} was {told or 'not there'}, the {before} says {wanted}"


def _policy_differs(worker: WorkerChain, log: StartLog) -> Iterator[str]:
    policy, main = worker.policy, engine(pod_of(worker))
    assert policy is not None
    astray = {} if main is None else env_differences(main, policy)
    cards = [item.card.runtime_config for item in worker.cards]

    def repeated(name: str, told: Any) -> bool:
        return bool(cards) and all((config.get(name) or None) == (told or None) for config in cards)

    texts = (
        (DOMAIN_ENV, "kv_transfer_domain", log.transfer_domain, policy.domain),
        (ENFORCEMENT_ENV, "kv_transfer_enforcement", log.enforcement, policy.enforcement),
    )
    for variable, name, told, wanted in texts:
        if told != wanted and variable not in astray and not repeated(name, told):
            yield f"{name} was {told or 'not set'}, the policy says {wanted}"
    if is_weight(log.weight, policy.weight) or WEIGHT_ENV in astray:
        return
    if not cards or any(not is_weight(c.get(_WEIGHT), log.weight) for c in cards):
        told_weight, wanted_weight = _shown(log.weight), _shown(policy.weight)
        yield f"{_WEIGHT} was {told_weight}, the policy says {wanted_weight}"


def _shown(weight: float | None) -> str:
    return "not set" if weight is None else f"{weight:.9g}"


def _said(joined: JoinedFacts) -> Outcome:
    """Not of a worker whose card has no topology either: that is DYT0801."""
    logs, wrong = _logs(joined), []
    for worker, log in logs.workers:
        main = engine(pod_of(worker))
        enabled = main is not None and main.env.get(ENABLED_ENV) == "true"
        if log.domains is None and enabled and has_started(joined, worker) and _tells(worker):
            pod = pod_of(worker)
            wrong.append(found(worker.subject, pod=pod.name, namespace=pod.namespace))
    return logs.outcome(wrong)


def _tells(worker: WorkerChain) -> bool:
    """Whether its card has topology, as far as there is one."""
    configs = [item.card.runtime_config for item in worker.cards]
    return not configs or any(mapping(one.get("topology_domains")) for one in configs)


_PODS: Final = (in_cluster, governed, peopled)

START_CHECKS: Final[Sequence[Check[JoinedFacts]]] = (
    Check("DYT0601", _started, _PODS),
    Check("DYT0602", _as_configured, _PODS),
    Check("DYT0603", _recovered, _PODS),
    Check("DYT0604", _said, _PODS),
)

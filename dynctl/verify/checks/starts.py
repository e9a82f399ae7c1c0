"""Checks of worker starts, by pod status and the start of the logs: DYT06."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from dynctl.base.json_fields import mapping
from dynctl.findings.runner import Check, Outcome, found
from dynctl.health.facts import Unread
from dynctl.verify.chain import LinkName, WorkerChain
from dynctl.verify.cluster_facts import StartLog
from dynctl.verify.join import JoinedFacts
from dynctl.verify.needs import (
    about_pod,
    cluster_of,
    differing,
    has_policy,
    has_workers,
    in_cluster,
    live_workers,
    pod_of,
)
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
from dynctl.verify.wording import CheckTally, age, excerpt
from dynctl.wire.kubernetes.objects import Container, Pod

NOT_READ: Final = "not read (use --logs all)"
_TIMED_OUT_EXIT_CODE: Final = 1
"""The exit code of a worker that did not get its topology in time."""
_WEIGHT: Final = "kv_transfer_preferred_weight"


# -- waiting for topology --------------------------------------------------------------------------


def _got_topology_in_time(joined: JoinedFacts) -> Outcome:
    """Without workers whose label or file is missing: earlier codes report those."""
    workers = live_workers(joined)
    tally = CheckTally("pod", len(workers))
    for worker in workers:
        log, pod = log_of(joined, worker), pod_of(worker)
        if isinstance(log, StartLog):
            if log.timed_out and not has_started(joined, worker):
                explained = held_up_by(worker)
                if explained:
                    tally.explained.append(explained)
                    continue
                line = excerpt(log.timed_out)
                tally.wrong.append(about_pod(worker, line=line, now=_state_now(pod)))
        elif not pod.ready and _may_have_timed_out(pod):
            if isinstance(log, Unread):
                tally.unread.append(f"logs: {log.why}")
            else:
                tally.explained.append(NOT_READ)
    return tally.outcome()


def _may_have_timed_out(pod: Pod) -> bool:
    main = engine(pod)
    ended = None if main is None else main.last_end
    return ended is not None and ended.exit_code == _TIMED_OUT_EXIT_CODE


def _state_now(pod: Pod) -> str:
    main = engine(pod)
    if main is None or main.running_since is None:
        return (main.waiting if main is not None else "") or "not running"
    return "waiting again"


def _no_restart(joined: JoinedFacts) -> Outcome:
    workers, now = live_workers(joined), cluster_of(joined).now
    tally = CheckTally("pod", len(workers))
    for worker in workers:
        log, pod = log_of(joined, worker), pod_of(worker)
        if not isinstance(log, StartLog):
            # Only the log has the reason of a restart.
            if _may_have_timed_out(pod):
                tally.explained.append(NOT_READ)
        elif log.timed_out and has_started(joined, worker):
            main = engine(pod) or Container("")
            finished = None if main.last_end is None else main.last_end.finished
            since = "" if finished is None else f" {age(now - finished)} ago"
            restarts = max(1, main.restarts)
            tally.wrong.append(found(worker.subject, restarts=restarts, since=since))
    return tally.outcome()


# -- topology in the log --------------------------------------------------------------------------


def _read_logs(joined: JoinedFacts) -> tuple[list[tuple[WorkerChain, StartLog]], CheckTally]:
    """The started workers whose log was read; the tally has the reasons for the others.

    Without further ranks of a replica, which do not log topology.
    """
    tally = CheckTally("log")
    read: list[tuple[WorkerChain, StartLog]] = []
    for worker in live_workers(joined):
        if worker.follower:
            continue
        tally.whole += 1
        log = log_of(joined, worker)
        if not worker.running:
            tally.explained.append("DYT0410")
        elif log is None:
            tally.explained.append(NOT_READ)
        elif isinstance(log, Unread):
            tally.unread.append(f"logs: {log.why}")
        elif log.domains is None and stuck_at_start(joined, worker):
            tally.explained.append(stuck_at_start(joined, worker))
        else:
            read.append((worker, log))
    return read, tally


def _matches_current(joined: JoinedFacts) -> Outcome:
    """Without differences that DYT0802, DYT0803 (card) or DYT0501 (variables) report."""
    read, tally = _read_logs(joined)
    with_topology = [(worker, log) for worker, log in read if log.domains is not None]
    others = tally.whole - len(with_topology) - len(tally.explained)
    tally.explained += ["DYT0604"] * others
    for worker, log in with_topology:
        differs = [*_domains_differ(worker, log), *_policy_differs(worker, log)]
        if differs:
            tally.wrong.append(differing(worker, differs))
    return tally.outcome(len(with_topology))


def _domains_differ(worker: WorkerChain, log: StartLog) -> Iterator[str]:
    for domain, chain in worker.chains.items():
        before = LinkName.FILE if chain[LinkName.FILE].value is not None else LinkName.LABEL
        wanted, logged = chain[before].value, (log.domains or {}).get(domain)
        if wanted is None or logged == wanted:
            continue
        if worker.cards and chain[LinkName.CARD].value == logged:
            continue
        yield f"{domain} was {logged or 'missing'}, the {before} has {wanted}"


def _policy_differs(worker: WorkerChain, log: StartLog) -> Iterator[str]:
    policy, main = worker.policy, engine(pod_of(worker))
    assert policy is not None
    wrong_variables = {} if main is None else env_differences(main, policy)
    cards = [item.card.runtime_config for item in worker.cards]

    def is_same(name: str, value: Any) -> bool:
        """Whether all cards have the same value."""
        wanted = value or None
        return bool(cards) and all((config.get(name) or None) == wanted for config in cards)

    texts = (
        (DOMAIN_ENV, "kv_transfer_domain", log.transfer_domain, policy.domain),
        (ENFORCEMENT_ENV, "kv_transfer_enforcement", log.enforcement, policy.enforcement),
    )
    for variable, name, logged, wanted in texts:
        if logged != wanted and variable not in wrong_variables and not is_same(name, logged):
            yield f"{name} was {logged or 'not set'}, the policy has {wanted}"
    if is_weight(log.weight, policy.weight) or WEIGHT_ENV in wrong_variables:
        return
    if not cards or any(not is_weight(c.get(_WEIGHT), log.weight) for c in cards):
        wanted = _text_of(policy.weight, "none")
        yield f"{_WEIGHT} was {_text_of(log.weight)}, the policy has {wanted}"


def _text_of(weight: float | None, missing: str = "not set") -> str:
    return missing if weight is None else f"{weight:.9g}"


def _log_has_topology(joined: JoinedFacts) -> Outcome:
    """Without workers whose card has no topology either (DYT0801)."""
    read, tally = _read_logs(joined)
    for worker, log in read:
        main = engine(pod_of(worker))
        enabled = main is not None and main.env.get(ENABLED_ENV) == "true"
        if (
            log.domains is None
            and enabled
            and has_started(joined, worker)
            and _card_has_topology(worker)
        ):
            tally.wrong.append(about_pod(worker))
    return tally.outcome(len(read))


def _card_has_topology(worker: WorkerChain) -> bool:
    """Whether the card of a worker has topology; True without a card."""
    configs = [item.card.runtime_config for item in worker.cards]
    return not configs or any(mapping(config.get("topology_domains")) for config in configs)


_PODS: Final = (in_cluster, has_policy, has_workers)

START_CHECKS: Final[Sequence[Check[JoinedFacts]]] = (
    Check("DYT0601", _got_topology_in_time, _PODS),
    Check("DYT0602", _matches_current, _PODS),
    Check("DYT0603", _no_restart, _PODS),
    Check("DYT0604", _log_has_topology, _PODS),
)

"""`topology sync` at work: follow nodes and pods, look at what changed, retry what failed.

Threads: a follower each for nodes and pods, one for the election, and the caller's, which looks at
pods. Only the leader writes. All are ended by :meth:`Controller.stop`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from dynctl.adapters.kubernetes.following import Follower, read_all
from dynctl.adapters.ports import Cluster
from dynctl.base.errors import DynctlError
from dynctl.documents.topology import CopiedLabel
from dynctl.serving.telemetry.exposition import Family, samples
from dynctl.serving.topology_sync.copies import FAILS, WRITES, CopyState
from dynctl.serving.topology_sync.election import RETRY_S, LeaderElection
from dynctl.serving.topology_sync.followed import NODES, PODS, FollowedPods, PodKey
from dynctl.serving.topology_sync.writing import TOPOLOGIES_S, Looked, PodSync

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_TURN_S: Final = 1.0
"""The longest wait of the main loop, so that it notices what is due and its end."""
ALIVE_S: Final = 120.0
"""Seconds without a turn of the main loop after which the process is not alive: a write may take
the whole timeout, with retries."""

LABELS = Family(
    "dynctl_topology_sync_labels",
    "gauge",
    "Labels of pods that name a source, by state",
    ("state",),
)
LEADER = Family("dynctl_topology_sync_leader", "gauge", "1: this process writes")
FOLLOWED = Family(
    "dynctl_topology_sync_followed", "gauge", "1: the objects are listed and watched", ("kind",)
)

_log = logging.getLogger(__name__)


def look_once(cluster: Cluster, namespace: str | None, sync: PodSync) -> list[Looked]:
    """List nodes and pods, and look at each pod once. Raises Unreachable."""
    followed = FollowedPods()
    for resource, where in ((NODES, None), (PODS, namespace)):
        bodies, _ = read_all(cluster, resource, where)
        followed.replace(resource, bodies)
    return [label for pod in followed.pods() for label in sync.look(pod, followed.nodes)]


@dataclass(slots=True)
class _Retry:
    at: float
    pause: float


class Controller:
    """Runs until :meth:`stop`. ``election`` None: this process always leads.

    ``say`` gets a sentence about each change of a label's state, from the thread of :meth:`run`.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str | None,
        sync: PodSync,
        election: LeaderElection | None,
        say: Callable[[str], None],
    ) -> None:
        self._sync, self._election, self._say = sync, election, say
        self.followed = FollowedPods()
        self._stopped = threading.Event()
        self._followers: dict[str, Follower] = {}
        for resource, where in ((NODES, None), (PODS, namespace)):
            self._followers[resource.plural] = Follower(
                cluster, resource, where, self.followed, self._stopped, self.followed.wake
            )
        self._looked: dict[PodKey, list[Looked]] = {}
        self._retries: dict[PodKey, _Retry] = {}
        self._turn = time.monotonic()

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Until :meth:`stop`, from any thread. Releases the lease at the end."""
        threads = [
            threading.Thread(target=follower.run, name=f"dynctl-{name}", daemon=True)
            for name, follower in self._followers.items()
        ]
        if self._election is not None:
            threads.append(
                threading.Thread(target=self._elect, name="dynctl-election", daemon=True)
            )
        for thread in threads:
            thread.start()
        reasons: dict[str, str] = {}
        try:
            while not self._stopped.is_set():
                self._turn = time.monotonic()
                for name, follower in self._followers.items():
                    if follower.reason != reasons.get(name, ""):
                        reasons[name] = follower.reason
                        self._say(follower.reason or f"{name} are followed again")
                self._one_turn()
        finally:
            self.stop()
            for thread in threads:
                thread.join(_TURN_S)
            if self._election is not None:
                self._election.release()

    def stop(self) -> None:
        self._stopped.set()
        self.followed.wake()

    def _one_turn(self) -> None:
        now = time.monotonic()
        for key in [key for key, retry in self._retries.items() if retry.at <= now]:
            self.followed.add_due(key)
            self._retries[key].at = now + _LONGEST_PAUSE_S
        due = self.followed.take_due(_TURN_S)
        # A pod whose node is not listed yet has no unknown node.
        if not self.ready:
            self._stopped.wait(_FIRST_PAUSE_S / 5)
            for key in due:
                self.followed.add_due(key)
            return
        for key in due:
            if self._stopped.is_set():
                return
            self._turn = time.monotonic()
            self._look(key)
        gone = [key for key in self._looked if self.followed.pod(key) is None]
        for key in gone:
            del self._looked[key]
            self._retries.pop(key, None)

    def _look(self, key: PodKey) -> None:
        pod = self.followed.pod(key)
        if pod is None:
            return
        try:
            looked = self._sync.look(pod, self.followed.nodes)
        except DynctlError as error:
            self._say(f"{key[0]}/{key[1]}: {error.message}")
            self._again(key)
            return
        before = {label.copy.target: _line(label) for label in self._looked.get(key, ())}
        for label in looked if self.leads else ():
            line = _line(label)
            if line and line != before.get(label.copy.target):
                self._say(f"{key[0]}/{key[1]}: {line}")
        self._looked[key] = looked
        if any(label.problem for label in looked):
            self._again(key)
        elif any(label.copy.state in (CopyState.NO_TOPOLOGY, CopyState.UNREAD) for label in looked):
            # Topologies are not followed.
            self._retries[key] = _Retry(time.monotonic() + TOPOLOGIES_S, _FIRST_PAUSE_S)
        else:
            self._retries.pop(key, None)

    def _again(self, key: PodKey) -> None:
        retry = self._retries.get(key)
        pause = _FIRST_PAUSE_S if retry is None else min(2 * retry.pause, _LONGEST_PAUSE_S)
        self._retries[key] = _Retry(time.monotonic() + pause, pause)

    def _elect(self) -> None:
        election = self._election
        if election is None:
            return
        led, problem = False, ""
        while not self._stopped.is_set():
            try:
                leads = election.attempt()
            except Exception:
                # The thread must not end: without it the lease would not be renewed.
                _log.exception("the election failed")
                leads = election.leads
            if leads != led:
                self._say(
                    f"{election.identity} leads"
                    if leads
                    else f"{election.identity} does not lead any more: {election.problem}"
                )
                led = leads
                if leads:
                    self.followed.all_due()
            if election.problem != problem:
                problem = election.problem
                if problem:
                    self._say(f"the lease cannot be written: {problem}")
            self._stopped.wait(RETRY_S)

    # -- status ------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether nodes and pods are listed and followed."""
        return all(follower.listed for follower in self._followers.values())

    @property
    def alive(self) -> bool:
        """Whether the main loop turns."""
        return time.monotonic() - self._turn < ALIVE_S

    @property
    def leads(self) -> bool:
        return self._election is None or self._election.leads

    def looked(self) -> list[Looked]:
        """What the last look at each pod found."""
        return [label for _, all_looked in sorted(self._looked.items()) for label in all_looked]

    def metrics(self) -> str:
        """The metrics in the Prometheus text format."""
        states: Counts[str] = Counts(
            CopyState.CURRENT if label.written else label.copy.state for label in self.looked()
        )
        return "".join(
            (
                samples(LABELS, (((state.value,), states[state]) for state in CopyState)),
                samples(LEADER, [((), int(self.leads))]),
                samples(FOLLOWED, self._follows()),
                self._sync.written.text(),
                self._sync.events.text(),
            )
        )

    def _follows(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for name, follower in self._followers.items():
            yield (name,), int(follower.listed)


def copied_label(label: Looked) -> CopiedLabel:
    """The document's row."""
    copy = label.copy
    return CopiedLabel(
        copy.namespace,
        copy.pod,
        copy.node,
        copy.source,
        copy.target,
        copy.state.value,
        copy.has,
        copy.wants,
        label.written,
        copy.message,
        label.problem,
    )


def _line(label: Looked) -> str:
    """A sentence about a label that was written, is wrong or cannot be written; else empty."""
    copy = label.copy
    if label.problem:
        return f"{copy.target}: {label.problem}"
    if label.written and copy.state is CopyState.MISSING:
        return f"{copy.target}={copy.wants} copied from node {copy.node}"
    if copy.state in FAILS or label.written:
        return copy.message
    if copy.state in WRITES:
        return f"{copy.target}={copy.wants} would be copied from node {copy.node}"
    return ""

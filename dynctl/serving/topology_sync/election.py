"""Leader election by a Lease of coordination.k8s.io, by the rules of Kubernetes' own clients.

A holder renews the lease; others take it over once it did not change for its duration, by their own
clocks (the clocks of two hosts are not compared). A holder that cannot renew stops before that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from dynctl.adapters.ports import Cluster, ClusterRefusal, ClusterWriter
from dynctl.base.errors import DynctlError
from dynctl.base.json_fields import count, mapping, text

#: Seconds, as in Kubernetes' own controllers: others take over after DURATION_S, the holder stops
#: after RENEW_S without success, attempts are RETRY_S apart.
DURATION_S: Final = 15
RENEW_S: Final = 10.0
RETRY_S: Final = 2.0

_ROOT: Final = "/apis/coordination.k8s.io/v1/namespaces"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Observed:
    """A lease as it was last seen, and our time when it had changed."""

    holder: str
    version: str
    at: float
    duration_s: float


class LeaderElection:
    """One candidate, ``identity``, for the lease ``namespace/name``.

    Call :meth:`attempt` every RETRY_S seconds. ``monotonic`` and ``now`` are clocks in seconds,
    ``now`` since the epoch.
    """

    def __init__(
        self,
        cluster: Cluster,
        writer: ClusterWriter,
        namespace: str,
        name: str,
        identity: str,
        *,
        monotonic: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._cluster, self._writer = cluster, writer
        self._path = f"{_ROOT}/{namespace}/leases"
        self._namespace, self._name = namespace, name
        self.identity = identity
        self._monotonic, self._now = monotonic, now
        self._seen: _Observed | None = None
        self._renewed: float | None = None
        self.problem = ""
        """Why the last attempt failed; empty after a success."""

    @property
    def leads(self) -> bool:
        """Whether this candidate may write now."""
        return self._renewed is not None and self._monotonic() - self._renewed < RENEW_S

    @property
    def holder(self) -> str:
        """The candidate that holds the lease as far as known; empty: none."""
        return "" if self._seen is None else self._seen.holder

    def attempt(self) -> bool:
        """Take, renew or watch the lease; whether this candidate leads now."""
        # The time before the request: the lease is ours for DURATION_S from when it was written.
        began = self._monotonic()
        try:
            if self._try():
                self._renewed = began
            else:
                self._renewed = None
            self.problem = ""
        except ClusterRefusal as refusal:
            if refusal.status != 409:  # 409: another candidate was faster; look again next time
                self.problem = refusal.message
        except DynctlError as error:
            self.problem = error.message
        return self.leads

    def release(self) -> None:
        """Let another candidate take over at once."""
        if self._renewed is None:
            return
        self._renewed = None
        try:
            lease = self._cluster.get(f"{self._path}/{self._name}")
            spec = dict(mapping(lease.get("spec")))
            if text(spec.get("holderIdentity")) == self.identity:
                spec |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._writer.replace(f"{self._path}/{self._name}", {**lease, "spec": spec})
        except (ClusterRefusal, DynctlError) as error:
            _log.warning("the lease %s is left to expire: %s", self._name, error)

    def _try(self) -> bool:
        stamp = datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": DURATION_S,
            "renewTime": stamp,
        }
        try:
            lease = self._cluster.get(f"{self._path}/{self._name}")
        except ClusterRefusal as refusal:
            if not refusal.missing:
                raise
            made = self._writer.create(
                self._path,
                {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": self._name, "namespace": self._namespace},
                    "spec": {**ours, "acquireTime": stamp, "leaseTransitions": 0},
                },
            )
            self._observe(made)
            return True
        seen = self._observe(lease)
        spec = mapping(lease.get("spec"))
        if seen.holder and seen.holder != self.identity:
            if self._monotonic() - seen.at < seen.duration_s:
                return False
            _log.info("%s did not renew the lease; %s takes over", seen.holder, self.identity)
        if seen.holder != self.identity:
            transitions = count(spec.get("leaseTransitions")) + 1
            ours |= {"acquireTime": stamp, "leaseTransitions": transitions}
        self._observe(
            self._writer.replace(f"{self._path}/{self._name}", {**lease, "spec": {**spec, **ours}})
        )
        return True

    def _observe(self, lease: Mapping[str, Any]) -> _Observed:
        spec = mapping(lease.get("spec"))
        version = text(mapping(lease.get("metadata")).get("resourceVersion"))
        if self._seen is None or self._seen.version != version:
            self._seen = _Observed(
                text(spec.get("holderIdentity")),
                version,
                self._monotonic(),
                float(count(spec.get("leaseDurationSeconds")) or DURATION_S),
            )
        return self._seen

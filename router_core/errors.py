"""The errors of router_core.

::

    RouterCoreError
    ├── HashingError          tokens or options that cannot be hashed            (also ValueError)
    ├── ConfigError           a setting outside its bounds, an unknown setting   (also ValueError)
    ├── WorkerError           a worker's configuration that cannot be accepted   (also ValueError)
    ├── ConstraintError       a weight that is not a finite number               (also ValueError)
    ├── PolicyUnderivable     the decode constraint cannot be derived from the prefill worker
    ├── SnapshotError         a snapshot that cannot be restored                 (also ValueError)
    └── RoutingRefused        a Decision without a winner, raised by Decision.require();
        │                     in decision.py, because these three carry the Decision
        ├── NoEligibleWorker  a filter emptied the candidate set
        └── AllWorkersBusy    only the busy filter stands between the request and a worker

A refused *event* (a block whose parent is unknown, a removal of a block that was never stored) is
not an error: the stream continues and the returned result has the reason.
"""

from typing import Any


def is_a(value: object, *kinds: type[Any]) -> bool:
    """Whether a caller's value has one of these types, whatever its annotation says."""
    return isinstance(value, kinds)


class RouterCoreError(Exception):
    """Base of every error that router_core raises."""


class HashingError(RouterCoreError, ValueError):
    """Tokens, a block size or hashing options that cannot be hashed."""


class ConfigError(RouterCoreError, ValueError):
    """A setting that does not exist or whose value is out of bounds."""


class WorkerError(RouterCoreError, ValueError):
    """A worker's published configuration breaks a rule that registration enforces."""


class ConstraintError(RouterCoreError, ValueError):
    """The weight of a preferred taint is not a finite number, or one text stands for taints."""


class PolicyUnderivable(RouterCoreError):
    """A KV-transfer policy applies but the decode constraint cannot be derived from it."""


class SnapshotError(RouterCoreError, ValueError):
    """A snapshot of another schema, or one whose parts contradict each other."""

"""What the distance between two places costs: seconds by topology level, from a table of links.

A *level* is a topology domain (``rack``, ``zone``). The levels of a table are ordered from narrow
to wide, each with the latency and bandwidth between two places that are in the same one; ``beyond``
is the link between places without a common level. The class of a pair is the narrowest level on
which both agree. Two places that differ on a wider level do not agree on a narrower one, because
names such as ``rack-1`` may repeat in every zone.

The cost of a KV transfer is that of Dynamo's design proposal (future work there)::

    kv_transfer_weight * (latency + prompt tokens * bytes per token / bandwidth)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from router_core.errors import ConfigError, SnapshotError
from router_core.forms import NUMBER, TEXT, Each, Fields, Maybe, Row, Table
from router_core.registry import WorkerRegistry
from router_core.taints import canonical_taint
from router_core.worker_sets import slots_of

#: The class of a pair without a common level.
BEYOND = "beyond"
#: Levels of a table.
MOST_LEVELS = 16
#: Places whose classes are kept.
_MOST_PLACES = 4_096

#: The value of a place on each level of a table, narrow to wide; None where it has none.
Place = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A link of ``latency_s`` seconds and ``bytes_per_s``; raises ConfigError out of bounds."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and 0 <= self.latency_s <= 3_600):
            raise ConfigError(f"latency: expected 0 to 3600 seconds, got {self.latency_s:g}")
        if not (math.isfinite(self.bytes_per_s) and 1 <= self.bytes_per_s <= 1e18):
            raise ConfigError(
                f"bandwidth: expected 1 to 1e18 bytes per second, got {self.bytes_per_s:g}"
            )

    def seconds(self, bytes: float) -> float:
        """The time until ``bytes`` have arrived."""
        return self.latency_s + bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class TransferTable:
    """The links of a fleet, and the size of its KV cache.

    ``levels``: (level, link), narrow to wide. ``bytes_per_token``: of the KV cache on all layers,
    None if unknown; ``by_model`` those of models with another size. Raises ConfigError for a level
    that occurs twice, none or too many levels, or a size that is not positive.
    """

    levels: tuple[tuple[str, Link], ...]
    beyond: Link
    bytes_per_token: float | None = None
    by_model: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.names
        if not 1 <= len(names) <= MOST_LEVELS:
            raise ConfigError(f"levels: expected 1 to {MOST_LEVELS}, got {len(names)}")
        for name in names:
            if name == BEYOND or names.count(name) > 1:
                raise ConfigError(f"levels: expected each level once and none named beyond: {name}")
        for size in (self.bytes_per_token, *self.by_model.values()):
            if size is not None and not (math.isfinite(size) and 0 < size <= 1e12):
                raise ConfigError(f"bytes_per_token: expected 1 to 1e12, got {size:g}")

    @property
    def names(self) -> tuple[str, ...]:
        """The levels, narrow to wide, without ``beyond``."""
        return tuple(name for name, _ in self.levels)

    def size_of(self, model: str) -> float | None:
        """Bytes of KV cache for each token of a model; None if unknown."""
        return self.by_model.get(model, self.bytes_per_token)

    def seconds(self, bytes: float) -> tuple[float, ...]:
        """The time of a transfer in each class: the levels, narrow to wide, then ``beyond``."""
        return (*(link.seconds(bytes) for _, link in self.levels), self.beyond.seconds(bytes))

    def place(self, domains: Mapping[str, str]) -> Place:
        """The values of ``domains`` on the levels."""
        return tuple(domains.get(name) for name, _ in self.levels)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "levels": [[name, level.latency_s, level.bytes_per_s] for name, level in self.levels],
            "beyond": [self.beyond.latency_s, self.beyond.bytes_per_s],
            "bytes_per_token": self.bytes_per_token,
            "by_model": dict(self.by_model),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TransferTable:
        """The inverse of :meth:`to_dict`; raises ConfigError."""
        try:
            _FORM.check(plain, "")
        except SnapshotError as error:
            raise ConfigError(str(error)) from None
        levels = tuple((name, Link(latency, rate)) for name, latency, rate in plain["levels"])
        return cls(levels, Link(*plain["beyond"]), plain["bytes_per_token"], plain["by_model"])


_FORM: Final = Fields(
    {
        "levels": Each(Row(TEXT, NUMBER, NUMBER), MOST_LEVELS),
        "beyond": Row(NUMBER, NUMBER),
        "bytes_per_token": Maybe(NUMBER),
        "by_model": Table(NUMBER),
    }
)
"""What `TransferTable.to_dict` writes."""


class TransferClasses:
    """The ranks of a registry by their class as seen from one place, computed once per place.

    One mask of slots for each level of the table, narrow to wide; they are disjoint, and the ranks
    in none of them are ``beyond``.
    """

    def __init__(self) -> None:
        self._version: tuple[int, tuple[str, ...]] | None = None
        self._masks: dict[Place, tuple[int, ...]] = {}

    def masks_from(
        self, registry: WorkerRegistry, table: TransferTable, place: Place
    ) -> tuple[int, ...]:
        version = (registry.version, table.names)
        if self._version != version or len(self._masks) >= _MOST_PLACES:
            self._version = version
            self._masks = {}
        known = self._masks.get(place)
        if known is None:
            known = self._masks[place] = _classes(registry, table.names, place)
        return known


def _classes(registry: WorkerRegistry, names: Sequence[str], place: Place) -> tuple[int, ...]:
    masks = [0] * len(names)
    # Wide to narrow: a difference on a wide level ends the search for a narrower agreement.
    apart = 0
    for level in reversed(range(len(names))):
        value = place[level]
        if value is None:
            continue
        same = registry.taint(canonical_taint(names[level], value))
        apart |= registry.with_domain(names[level]) & ~same
        masks[level] = same & ~apart
        for wider in range(level + 1, len(names)):
            masks[wider] &= ~masks[level]
    return tuple(masks)


def transfer_columns(
    masks: Sequence[int], slots: Sequence[int], mask: int, values: Sequence[float]
) -> tuple[list[float], list[int]]:
    """(value, class) of each slot, by the classes of ``masks``; ``values`` has ``beyond`` last."""
    classes = dict.fromkeys(slots, len(masks))
    for level, members in enumerate(masks):
        classes.update(dict.fromkeys(slots_of(members & mask), level))
    column = list(classes.values())
    return list(map(values.__getitem__, column)), column

"""Workers: identity, role, and the card that they publish."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from router_core.errors import SnapshotError, WorkerError, is_a
from router_core.forms import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    U64,
    Each,
    Fields,
    Maybe,
    OneOf,
    Table,
    Text,
    Whole,
    brief,
)
from router_core.taints import TOPOLOGY_PREFIX, canonical_taint

#: Value of an unknown ``max_num_batched_tokens`` (as observed in Dynamo 1.6).
UNKNOWN_BATCHED_TOKENS = 10_000_000
_LISTS = ("aliases", "adapters", "worker_sets")
#: Limit of data-parallel ranks per worker.
MAX_RANKS = 1024
#: The largest count that a number of JSON keeps exactly; sums of them stay far below 2^64.
_COUNT_MAX = 2**53
#: The highest rank, and the tokens of the largest block, that a document may have.
_RANK_MAX = 2**32 - 1
_BLOCK_SIZE_MAX = 2**20


class WorkerWithDpRank(NamedTuple):
    """The unit of routing: one data-parallel rank of one worker. Ids are u64."""

    worker_id: int
    dp_rank: int = 0


class Role(StrEnum):
    """The part of a request that a worker serves."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ModelRuntimeConfig:
    """The card that a worker publishes, validated like a registration in Dynamo.

    Raises WorkerError: a domain or value that is empty, has surrounding white space or holds
    ``=``; a transfer domain that is not in ``topology_domains``; an enforcement without a domain;
    ``preferred`` without a weight, a weight without ``preferred``, a weight outside 0..1.
    Taints with the reserved prefix are dropped and rebuilt from ``topology_domains``.
    ``validate=False`` accepts a card that was published without those checks; only its counts and
    the types of its values must be valid.
    """

    total_kv_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    context_length: int | None = None
    data_parallel_start_rank: int = 0
    data_parallel_size: int = 1
    enable_eagle: bool = False
    taints: frozenset[str] = frozenset()
    topology_domains: Mapping[str, str] = field(default_factory=dict)
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None
    validate: InitVar[bool] = True

    def __post_init__(self, validate: bool) -> None:
        if not is_a(self.topology_domains, Mapping):
            raise WorkerError(
                f"topology_domains: expected a mapping, got {self.topology_domains!r}"
            )
        if is_a(self.taints, str):
            raise WorkerError(f"taints: expected a set of strings, got {self.taints!r}")
        domains = dict(self.topology_domains)
        _check_counts(self)
        if validate:
            for domain, value in domains.items():
                _check_name("topology domain", domain)
                _check_name(f"value of topology domain {domain!r}", value)
            _check_policy(self)
        _check_kinds(self, domains)
        object.__setattr__(self, "topology_domains", MappingProxyType(domains))
        own = {t for t in self.taints if not t.startswith(TOPOLOGY_PREFIX)}
        own |= {canonical_taint(domain, value) for domain, value in domains.items()}
        object.__setattr__(self, "taints", frozenset(own))

    def to_dict(self) -> dict[str, Any]:
        """Plain data with Dynamo's field names, without fields that are not set."""
        plain: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            if name == "validate":
                continue
            value = getattr(self, name)
            if name == "taints":
                value = sorted(value)
            elif name == "topology_domains":
                value = dict(value)
            if value not in (None, [], {}):
                plain[name] = value
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], *, validate: bool = True) -> ModelRuntimeConfig:
        """The inverse of :meth:`to_dict`, ignoring unknown keys; raises WorkerError."""
        names = set(cls.__dataclass_fields__) - {"validate"}
        known = {k: v for k, v in plain.items() if k in names and v is not None}
        taints = known.get("taints", ())
        if not isinstance(taints, (list, tuple, set, frozenset)) or not all(
            isinstance(taint, str) for taint in taints
        ):
            raise WorkerError(f"taints: expected a list of strings, got {taints!r}")
        known["taints"] = frozenset(taints)
        domains = known.get("topology_domains", {})
        if not isinstance(domains, Mapping):
            raise WorkerError(f"topology_domains: expected a mapping, got {domains!r}")
        return cls(**known, validate=validate)


_CARD: Final = Fields(
    {},
    {
        **dict.fromkeys(
            ("total_kv_blocks", "max_num_batched_tokens", "max_num_seqs", "context_length"),
            Maybe(COUNT),
        ),
        "data_parallel_start_rank": Maybe(Whole(0, _RANK_MAX)),
        "data_parallel_size": Maybe(Whole(1, MAX_RANKS)),
        "enable_eagle": Maybe(FLAG),
        "taints": Maybe(Each(TEXT)),
        "topology_domains": Maybe(Table(TEXT)),
        "kv_transfer_domain": Maybe(TEXT),
        "kv_transfer_enforcement": Maybe(TEXT),
        "kv_transfer_preferred_weight": Maybe(NUMBER),
    },
)
_NAMES: Final = Each(TEXT)
WORKER: Final = Fields(
    {"worker_id": U64, "name": Text(least=1), "model": Text(least=1)},
    {
        "role": OneOf(role.value for role in Role),
        "block_size": Whole(1, _BLOCK_SIZE_MAX),
        "can_prefill": FLAG,
        "kv_events": FLAG,
        "endpoint": Maybe(TEXT),
        "runtime_config": _CARD,
        "device": Maybe(TEXT),
        **dict.fromkeys(_LISTS, _NAMES),
    },
)
"""What `Worker.to_dict` writes."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker of one model.

    ``name`` is unique in a registry. ``block_size`` is in tokens. ``can_prefill``: whether a decode
    worker can also compute a prompt by itself. ``kv_events`` is False for a worker that does not
    report what it caches: it is routed by load. ``aliases`` are other names of the model and
    ``adapters`` its LoRA adapters, each requested as a model of its own; all share the worker's
    load. ``device``: ``cpu``, or the kind of its accelerator; None where it is unknown.
    ``worker_sets``: the sets of workers that it belongs to, where a frontend first chooses a
    set and then a worker in it.
    """

    worker_id: int
    name: str
    model: str
    role: Role = Role.AGGREGATED
    block_size: int = 16
    runtime_config: ModelRuntimeConfig = field(default_factory=ModelRuntimeConfig)
    can_prefill: bool = True
    kv_events: bool = True
    endpoint: str | None = None
    device: str | None = None
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    worker_sets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_a(self.worker_id, int) or not 0 <= self.worker_id < 2**64:
            raise WorkerError(
                f"worker {self.name}: id expected in 0..2^64-1, got {self.worker_id!r}"
            )
        if not self.name or not self.model:
            raise WorkerError(f"worker {self.worker_id}: name and model must not be empty")
        _check_types(self)
        if self.block_size < 1:
            raise WorkerError(
                f"worker {self.name}: block_size expected at least 1, got {self.block_size}"
            )

    @property
    def ranks(self) -> range:
        """The data-parallel ranks of the card."""
        start = self.runtime_config.data_parallel_start_rank
        return range(start, start + self.runtime_config.data_parallel_size)

    @property
    def domains(self) -> Mapping[str, str]:
        return self.runtime_config.topology_domains

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names by which requests reach this worker: model, aliases, adapters; each once."""
        return tuple(dict.fromkeys((self.model, *self.aliases, *self.adapters)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the lists of other names and of sets only where there are any."""
        plain = {
            "worker_id": self.worker_id,
            "name": self.name,
            "model": self.model,
            "role": self.role.value,
            "block_size": self.block_size,
            "can_prefill": self.can_prefill,
            "kv_events": self.kv_events,
            "endpoint": self.endpoint,
            "runtime_config": self.runtime_config.to_dict(),
        }
        if self.device is not None:
            plain["device"] = self.device
        return plain | {name: list(getattr(self, name)) for name in _LISTS if getattr(self, name)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Worker:
        """The inverse of :meth:`to_dict`; raises WorkerError."""
        try:
            WORKER.check(plain, "")
        except SnapshotError as error:
            raise WorkerError(str(error)) from None
        try:
            return cls(
                worker_id=plain["worker_id"],
                name=plain["name"],
                model=plain["model"],
                role=Role(plain.get("role", "aggregated")),
                block_size=plain.get("block_size", 16),
                runtime_config=ModelRuntimeConfig.from_dict(plain.get("runtime_config", {})),
                can_prefill=plain.get("can_prefill", True),
                kv_events=plain.get("kv_events", True),
                endpoint=plain.get("endpoint"),
                device=plain.get("device"),
                **{name: tuple(plain.get(name, ())) for name in _LISTS},
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, WorkerError):
                raise
            raise WorkerError(f"worker record {dict(plain)!r}: {error}") from None


def _check_types(worker: Worker) -> None:
    for name, kind, expected in (
        ("name", str, "a string"),
        ("model", str, "a string"),
        ("role", Role, "a Role: Role.AGGREGATED, Role.PREFILL or Role.DECODE"),
        ("block_size", int, "a whole number of tokens"),
        ("runtime_config", ModelRuntimeConfig, "a ModelRuntimeConfig"),
    ):
        value = getattr(worker, name)
        if not isinstance(value, kind):
            raise WorkerError(f"worker {worker.name}: {name} expected {expected}, got {value!r}")
    for name in _LISTS:
        value = getattr(worker, name)
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise WorkerError(
                f"worker {worker.name}: {name} expected a tuple of strings, got {value!r}"
            )


def _check_name(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise WorkerError(f"{what}: expected a string, got {text!r}")
    if not text or text != text.strip() or "=" in text:
        raise WorkerError(
            f"{what}: expected text without surrounding white space or '=', got {text!r}"
        )


def _check_counts(config: ModelRuntimeConfig) -> None:
    for name, low in (
        ("total_kv_blocks", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("context_length", 0),
        ("data_parallel_start_rank", 0),
        ("data_parallel_size", 1),
    ):
        value = getattr(config, name)
        if value is None and name not in ("data_parallel_start_rank", "data_parallel_size"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise WorkerError(f"{name}: expected a whole number of at least {low}, got {value!r}")
        if value > _COUNT_MAX:
            raise WorkerError(f"{name}: expected at most 2^53, got {value}")
    if config.data_parallel_size > MAX_RANKS:
        raise WorkerError(
            f"data_parallel_size: expected at most {MAX_RANKS}, got {config.data_parallel_size}"
        )


def _check_kinds(config: ModelRuntimeConfig, domains: Mapping[str, str]) -> None:
    """What Dynamo refuses to read, whatever else it accepts."""
    for domain, value in domains.items():
        if not is_a(domain, str) or not is_a(value, str):
            raise WorkerError(f"topology_domains: expected texts, got {brief(value)}")
    if not is_a(config.enable_eagle, bool):
        raise WorkerError(f"enable_eagle: expected true or false, got {brief(config.enable_eagle)}")
    for name in ("kv_transfer_domain", "kv_transfer_enforcement"):
        text = getattr(config, name)
        if text is not None and not is_a(text, str):
            raise WorkerError(f"{name}: expected a text, got {brief(text)}")
    weight = config.kv_transfer_preferred_weight
    if weight is not None and not NUMBER.holds(weight):
        raise WorkerError(f"kv_transfer_preferred_weight: expected a number, got {brief(weight)}")


def _check_policy(config: ModelRuntimeConfig) -> None:
    domain, enforcement = config.kv_transfer_domain, config.kv_transfer_enforcement
    weight = config.kv_transfer_preferred_weight
    if enforcement is not None and enforcement not in ("required", "preferred"):
        raise WorkerError(
            f"kv_transfer_enforcement must be 'required' or 'preferred', got {enforcement!r}"
        )
    if domain is not None and domain not in config.topology_domains:
        known = ", ".join(config.topology_domains) or "none"
        raise WorkerError(
            "kv_transfer_domain must reference a key in topology_domains: "
            f"got {domain!r}, published domains: {known}"
        )
    if enforcement is not None and domain is None:
        raise WorkerError("kv_transfer_enforcement requires kv_transfer_domain")
    if enforcement == "preferred" and weight is None:
        raise WorkerError(
            "kv_transfer_preferred_weight is required when kv_transfer_enforcement is preferred"
        )
    if weight is not None:
        _check_preferred_weight(weight, enforcement)


def _check_preferred_weight(weight: float, enforcement: str | None) -> None:
    if enforcement != "preferred":
        raise WorkerError(
            "kv_transfer_preferred_weight is only allowed when kv_transfer_enforcement is "
            f"preferred, got {weight!r} with {enforcement!r}"
        )
    if not (math.isfinite(weight) and 0 <= weight <= 1):
        raise WorkerError(f"kv_transfer_preferred_weight: expected 0 to 1, got {weight!r}")

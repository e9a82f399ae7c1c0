"""Discovery entries joined into workers: instance, card, event sources and channels. Pure.

As for Dynamo's router, a worker counts when its endpoint *and* its card are registered. Incomplete,
malformed and contradictory entries are listed as problems; the other entries are joined all the
same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from dynctl.adapters.ports import Deleted, DiscoveryChange, Interrupted, Listed, Put
from dynctl.wire.dynamo.discovery import (
    ACTIVE_SEQUENCES,
    KV_EVENTS,
    KV_METRICS,
    EndpointId,
    Entry,
    EventChannel,
    EventSource,
    Instance,
    Malformed,
    ModelCard,
    parse_entry,
)
from dynctl.wire.dynamo.events import PASS_TOPIC
from router_core import ModelRuntimeConfig, Role, Worker, WorkerError

SERVED: Final = "generate"
"""The endpoint that serves requests; a worker's other endpoints belong to it."""
INDEXER: Final = "kv_indexer_query"
_SHORTEST_SUFFIX: Final = 4
_ROLES: Final = {role.value: role for role in Role}


Where: TypeAlias = tuple[EndpointId, int]
"""An endpoint and an instance of it."""
NO_OWNERS: Final[Mapping[str, str]] = {}


class ProblemCode(StrEnum):
    """The problems of registered entries. Codes are stable."""

    MALFORMED_ENTRY = "MALFORMED_ENTRY"
    INSTANCE_WITHOUT_CARD = "INSTANCE_WITHOUT_CARD"
    CARD_WITHOUT_INSTANCE = "CARD_WITHOUT_INSTANCE"
    CARD_REJECTED = "CARD_REJECTED"
    UNKNOWN_ROLE = "UNKNOWN_ROLE"
    BLOCK_SIZES_DIFFER = "BLOCK_SIZES_DIFFER"
    ROUTER_CONFIGS_DIFFER = "ROUTER_CONFIGS_DIFFER"
    TOPOLOGY_MISSING = "TOPOLOGY_MISSING"
    EVENTS_MISSING = "EVENTS_MISSING"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of ``subject``: a worker's name, a model or a key."""

    code: ProblemCode
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class RegisteredWorker:
    """A worker with its discovery entries.

    ``sources``: rank -> the publisher of its KV events and its indexer. ``kv_events``: rank -> the
    channel of its KV events.
    """

    worker: Worker
    card: ModelCard
    instance: Instance
    sources: Mapping[int, EventSource] = field(default_factory=dict)
    kv_events: Mapping[int, EventChannel] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deployment:
    """The workers and channels of one namespace, or of all.

    ``loads``, ``sequences`` and ``passes`` are the channels of load reports, of routed requests and
    of the engines' scheduler reports; they are not joined to single workers. ``indexers`` serve the
    whole index of a component.
    """

    workers: tuple[RegisteredWorker, ...] = ()
    loads: tuple[EventChannel, ...] = ()
    sequences: tuple[EventChannel, ...] = ()
    passes: tuple[EventChannel, ...] = ()
    indexers: tuple[Instance, ...] = ()
    problems: tuple[Problem, ...] = ()
    namespaces: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({item.worker.model for item in self.workers}))


class Registrations:
    """The entries of a discovery plane, each parsed once."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.owners: dict[str, str] = {}
        self.interrupted: str | None = None

    def apply(self, change: DiscoveryChange) -> None:
        """Apply the next change of the plane."""
        match change:
            case Listed(entries):
                self.interrupted = None
                self.entries = {entry.key: parse_entry(entry.key, entry.value) for entry in entries}
                self.owners = {entry.key: entry.owner for entry in entries if entry.owner}
            case Put(entry):
                self.entries[entry.key] = parse_entry(entry.key, entry.value)
                if entry.owner:
                    self.owners[entry.key] = entry.owner
            case Deleted(key):
                self.entries.pop(key, None)
                self.owners.pop(key, None)
            case Interrupted(reason):
                self.interrupted = reason

    def deployment(self, namespace: str | None = None) -> Deployment:
        """The join of one Dynamo namespace; None joins all."""
        return join(self.entries.items(), namespace, self.owners)


def join(
    entries: Iterable[tuple[str, Entry]],
    namespace: str | None = None,
    owners: Mapping[str, str] = NO_OWNERS,
) -> Deployment:
    """Join parsed entries into workers and channels. ``owners``: key -> name of its owner."""
    problems: list[Problem] = []
    instances: dict[Where, Instance] = {}
    cards: dict[Where, ModelCard] = {}
    owned: dict[Where, str] = {}
    sources: dict[int, list[EventSource]] = defaultdict(list)
    channels: dict[str, list[EventChannel]] = defaultdict(list)
    namespaces = set()
    for key, entry in entries:
        if isinstance(entry, Malformed):
            problems.append(Problem(ProblemCode.MALFORMED_ENTRY, key, entry.problem))
            continue
        scope = entry.scope if isinstance(entry, EventChannel | EventSource) else entry.endpoint
        namespaces.add(scope.namespace)
        if namespace is not None and scope.namespace != namespace:
            continue
        match entry:
            case Instance():
                instances[entry.endpoint, entry.instance_id] = entry
            case ModelCard():
                cards[entry.endpoint, entry.instance_id] = entry
                if key in owners:
                    owned[entry.endpoint, entry.instance_id] = owners[key]
            case EventSource(topic=topic) if topic == KV_EVENTS:
                sources[entry.worker_id].append(entry)
            case EventChannel():
                channels[entry.topic].append(entry)
    names = {**worker_names(cards), **_unique(owned)}
    by_publisher = {channel.publisher_id: channel for channel in channels[KV_EVENTS]}
    workers = []
    for owner, card in cards.items():
        instance = instances.get(owner)
        if instance is None:
            message = f"the card is registered, {card.endpoint} is not: the worker cannot serve"
            problems.append(Problem(ProblemCode.CARD_WITHOUT_INSTANCE, names[owner], message))
            continue
        worker = _worker(names[owner], card, instance, sources[card.instance_id], problems)
        if worker is not None:
            workers.append(_observed(worker, card, instance, sources, by_publisher))
    for where, served in instances.items():
        if served.endpoint.name == SERVED and where not in cards and not _is_router(served):
            problems.append(
                Problem(
                    ProblemCode.INSTANCE_WITHOUT_CARD,
                    f"{served.endpoint.component}/{served.instance_id:x}",
                    f"{served.endpoint} is registered without a model card: it is still "
                    "starting, or failed to register its model",
                )
            )
    workers.sort(key=lambda item: item.worker.worker_id)
    problems += _contradictions(workers)
    return Deployment(
        tuple(workers),
        tuple(channels[KV_METRICS]),
        tuple(channels[ACTIVE_SEQUENCES]),
        tuple(channels[PASS_TOPIC]),
        tuple(item for item in instances.values() if item.endpoint.name == INDEXER),
        tuple(problems),
        tuple(sorted(namespaces)),
    )


def _unique(owned: Mapping[Where, str]) -> dict[Where, str]:
    """The owner names of one worker each; two engines of one pod are named by their ids instead."""
    uses = Counter(owned.values())
    return {where: name for where, name in owned.items() if uses[name] == 1}


def worker_names(keys: Iterable[Where]) -> dict[Where, str]:
    """``COMPONENT/SUFFIX``: the shortest ends of the hex ids that are unique in a component.

    All suffixes of a component have the same length, at least four digits.
    """
    groups: dict[tuple[str, str], list[Where]] = defaultdict(list)
    for key in keys:
        groups[key[0].namespace, key[0].component].append(key)
    # Two namespaces may have the same component; their workers need different names.
    several = len({namespace for namespace, _ in groups}) > 1
    names = {}
    for (namespace, component), members in groups.items():
        ids = {f"{instance_id:016x}" for _, instance_id in members}
        length = _SHORTEST_SUFFIX
        while length < 16 and len({text[-length:] for text in ids}) < len(ids):
            length += 1
        start = f"{namespace}/{component}" if several else component
        for key in members:
            names[key] = f"{start}/{f'{key[1]:016x}'[-length:]}"
    return names


def _worker(
    name: str,
    card: ModelCard,
    instance: Instance,
    sources: list[EventSource],
    problems: list[Problem],
) -> Worker | None:
    role = _role(card)
    if role is None:
        problems.append(
            Problem(
                ProblemCode.UNKNOWN_ROLE,
                name,
                f"worker_type {card.worker_type!r}; expected {', '.join(_ROLES)}: not routed to",
            )
        )
        return None
    try:
        try:
            config = ModelRuntimeConfig.from_dict(card.runtime_config)
        except WorkerError as error:
            # Dynamo's router accepts such a card and fails when it uses it; so does dynctl.
            problems.append(Problem(ProblemCode.CARD_REJECTED, name, str(error)))
            config = ModelRuntimeConfig.from_dict(card.runtime_config, validate=False)
        return Worker(
            worker_id=card.instance_id,
            name=name,
            model=card.name,
            role=role,
            block_size=card.block_size or 0,
            runtime_config=config,
            can_prefill=not any("prefill" in group for group in card.needs),
            kv_events=bool(sources),
            endpoint=instance.address.partition("/")[0],
        )
    except (WorkerError, TypeError, ValueError) as error:
        problems.append(Problem(ProblemCode.CARD_REJECTED, name, f"{error}: not routed to"))
        return None


def _role(card: ModelCard) -> Role | None:
    if card.worker_type is not None:
        return _ROLES.get(card.worker_type)
    # Cards before 1.6 have no worker type (from the source): prefill workers had no model type.
    if not card.model_type or card.model_type.strip().lower() == "prefill":
        return Role.PREFILL
    return Role.AGGREGATED


def _observed(
    worker: Worker,
    card: ModelCard,
    instance: Instance,
    sources: Mapping[int, list[EventSource]],
    by_publisher: Mapping[int, EventChannel],
) -> RegisteredWorker:
    own = {source.dp_rank: source for source in sources[worker.worker_id]}
    channels = {
        rank: by_publisher[source.publisher_id]
        for rank, source in own.items()
        if source.publisher_id in by_publisher
    }
    return RegisteredWorker(worker, card, instance, own, channels)


def _contradictions(workers: list[RegisteredWorker]) -> Iterable[Problem]:
    """Problems of a model whose workers contradict each other."""
    models: dict[str, list[RegisteredWorker]] = defaultdict(list)
    for item in workers:
        models[item.worker.model].append(item)
    for model, members in models.items():
        sizes = sorted({item.worker.block_size for item in members})
        if len(sizes) > 1:
            yield Problem(
                ProblemCode.BLOCK_SIZES_DIFFER,
                model,
                f"workers have blocks of {' and '.join(map(str, sizes))} tokens: their caches "
                "cannot be compared",
            )
        configs = {repr(item.card.router_config) for item in members}
        if len(configs) > 1:
            yield Problem(
                ProblemCode.ROUTER_CONFIGS_DIFFER,
                model,
                f"{len(configs)} router configurations are advertised (or some workers advertise "
                "none): a frontend keeps the first one and refuses workers with another",
            )
        with_topology = [item for item in members if item.worker.domains]
        if with_topology and len(with_topology) < len(members):
            for item in members:
                if not item.worker.domains:
                    yield Problem(
                        ProblemCode.TOPOLOGY_MISSING,
                        item.worker.name,
                        f"publishes no topology, {len(with_topology)} of {len(members)} workers of "
                        f"{model} do",
                    )
        for item in members:
            if item.worker.role is Role.DECODE:
                continue
            silent = [rank for rank in item.worker.ranks if rank not in item.kv_events]
            if silent:
                which = "" if len(silent) == len(item.worker.ranks) else f" for ranks {silent}"
                yield Problem(
                    ProblemCode.EVENTS_MISSING,
                    item.worker.name,
                    f"publishes no KV events{which}: its cache is unknown",
                )


def _is_router(instance: Instance) -> bool:
    """Whether it is a standalone router, which serves ``generate`` without a card."""
    return instance.endpoint.component == "router"

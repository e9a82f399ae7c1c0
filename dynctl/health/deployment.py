"""Discovery entries joined into workers: instance, card, event sources and channels. Pure.

As for Dynamo's router, a worker counts when its endpoint *and* its card are registered. Incomplete,
malformed and contradictory entries are listed as problems; the other entries are joined all the
same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
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
    durable_events,
    parse_entry,
)
from dynctl.wire.dynamo.events import PASS_TOPIC
from router_core import ModelRuntimeConfig, Role, Worker, WorkerError

SERVED: Final = "generate"
"""The endpoint that serves requests; a worker's other endpoints belong to it."""
INDEXER: Final = "kv_indexer_query"
LOCAL_INDEXER: Final = "worker_kv_indexer_query_dp"
"""The endpoint of a rank's local indexer before Dynamo 1.4, followed by the rank."""
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
    ENDPOINT_NOT_ROUTED = "ENDPOINT_NOT_ROUTED"
    ID_NOT_UNIQUE = "ID_NOT_UNIQUE"
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
    channel of its KV events. ``adapters``: the cards of the LoRA adapters that it serves.
    ``shared_events``: before Dynamo 1.4, the channels of its component; its own are among them.
    ``durable_events``: the stream where its KV events may be, which only reading it shows.
    """

    worker: Worker
    card: ModelCard
    instance: Instance
    sources: Mapping[int, EventSource] = field(default_factory=dict)
    kv_events: Mapping[int, EventChannel] = field(default_factory=dict)
    adapters: tuple[ModelCard, ...] = ()
    shared_events: tuple[EventChannel, ...] = ()
    durable_events: EventChannel | None = None


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The workers of one model, endpoint and role: a frontend chooses a set, then a worker in it.

    ``versions``: version of the card -> the ids of its workers. A frontend accepts one version: the
    first that it saw. ``not_ready``: why the namespace of the set cannot serve requests; None if it
    can. ``ambiguous``: roles of which the namespace has several sets, where one is expected.
    """

    name: str
    model: str
    namespace: str
    role: Role
    versions: Mapping[str, tuple[int, ...]]
    not_ready: str | None = None
    ambiguous: tuple[str, ...] = ()

    @property
    def worker_ids(self) -> tuple[int, ...]:
        return tuple(worker_id for ids in self.versions.values() for worker_id in ids)


@dataclass(frozen=True, slots=True)
class Deployment:
    """The workers and channels of one namespace, or of all.

    ``loads``, ``sequences`` and ``passes`` are the channels of load reports, of routed requests and
    of the engines' scheduler reports; they are not joined to single workers. ``indexers`` serve the
    whole index of a component. ``worker_sets``: the sets that requests are sent to, and those of
    prefill workers. ``hidden``: workers that have the id of one of ``workers`` in another process,
    so that no router can have both.
    """

    workers: tuple[RegisteredWorker, ...] = ()
    loads: tuple[EventChannel, ...] = ()
    sequences: tuple[EventChannel, ...] = ()
    passes: tuple[EventChannel, ...] = ()
    indexers: tuple[Instance, ...] = ()
    problems: tuple[Problem, ...] = ()
    namespaces: tuple[str, ...] = ()
    worker_sets: tuple[WorkerSet, ...] = ()
    hidden: tuple[RegisteredWorker, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({item.worker.model for item in self.workers}))

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that requests may use: models, their aliases, and adapters."""
        return tuple(sorted({name for item in self.workers for name in item.worker.served_names}))


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
        """The join of one Dynamo namespace, or of those with a prefix (``PREFIX*``); None: all."""
        return join(self.entries.items(), namespace, self.owners)


class _EntriesByKind:
    """The entries of the wanted namespaces, sorted by their kind."""

    def __init__(
        self, entries: Iterable[tuple[str, Entry]], namespace: str | None, owners: Mapping[str, str]
    ) -> None:
        self.malformed: list[Problem] = []
        self.instances: dict[Where, Instance] = {}
        self.cards: dict[Where, ModelCard] = {}
        self.adapters: dict[Where, list[ModelCard]] = defaultdict(list)
        #: The names of the owners of cards.
        self.owned: dict[Where, str] = {}
        self.sources: dict[int, list[EventSource]] = defaultdict(list)
        self.channels: dict[str, list[EventChannel]] = defaultdict(list)
        #: The channels of KV events of one publisher, and those that a component shares.
        self.by_publisher: dict[int, EventChannel] = {}
        self.shared: dict[tuple[str, str], list[EventChannel]] = defaultdict(list)
        #: All namespaces that have entries, also those that are not wanted.
        self.namespaces: set[str] = set()
        for key, entry in entries:
            if isinstance(entry, Malformed):
                self.malformed.append(Problem(ProblemCode.MALFORMED_ENTRY, key, entry.problem))
                continue
            scope = entry.scope if isinstance(entry, EventChannel | EventSource) else entry.endpoint
            self.namespaces.add(scope.namespace)
            if namespace is None or _in_namespace(scope.namespace, namespace):
                self._add(entry, owners.get(key))
        self._index_events()

    def _add(
        self, entry: Instance | ModelCard | EventSource | EventChannel, owner: str | None
    ) -> None:
        match entry:
            case Instance():
                self.instances[entry.endpoint, entry.instance_id] = entry
            case ModelCard():
                where = entry.endpoint, entry.instance_id
                if entry.lora is None:
                    self.cards[where] = entry
                else:
                    self.adapters[where].append(entry)
                if owner is not None:
                    self.owned[where] = owner
            case EventSource(topic=topic) if topic == KV_EVENTS:
                self.sources[entry.worker_id].append(entry)
            case EventChannel():
                self.channels[entry.topic].append(entry)

    def _index_events(self) -> None:
        """Index the channels of KV events, and add the sources that were not registered."""
        for channel in self.channels[KV_EVENTS]:
            if channel.scope.name:
                self.by_publisher[channel.publisher_id] = channel
            else:
                self.shared[channel.scope.namespace, channel.scope.component].append(channel)
        for source in _unregistered_sources(self.instances.values(), self.shared):
            self.sources[source.worker_id].append(source)


def join(
    entries: Iterable[tuple[str, Entry]],
    namespace: str | None = None,
    owners: Mapping[str, str] = NO_OWNERS,
) -> Deployment:
    """Join parsed entries into workers and channels. ``owners``: key -> name of its owner."""
    kinds = _EntriesByKind(entries, namespace, owners)
    problems = [*kinds.malformed, *_unrouted_adapters(kinds)]
    workers = _joined_workers(kinds, problems)
    problems += _instances_without_card(kinds)
    sets = _worker_sets(workers)
    workers = _in_sets(workers, sets)
    problems += _contradictions(workers)
    return Deployment(
        tuple(workers),
        tuple(kinds.channels[KV_METRICS]),
        tuple(kinds.channels[ACTIVE_SEQUENCES]),
        tuple(kinds.channels[PASS_TOPIC]),
        tuple(item for item in kinds.instances.values() if item.endpoint.name == INDEXER),
        tuple(problems),
        tuple(sorted(kinds.namespaces)),
        tuple(sets),
    )


def _unrouted_adapters(kinds: _EntriesByKind) -> Iterable[Problem]:
    """Adapters without the card of their base model, which Dynamo 1.6.1 does not serve."""
    for where, cards in kinds.adapters.items():
        if where in kinds.cards:
            continue
        endpoint, instance_id = where
        which = " and ".join(sorted(card.name for card in cards))
        message = f"adapter {which}: the card of its base model is not registered: not routed to"
        subject = f"{endpoint.component}/{instance_id:x}"
        yield Problem(ProblemCode.CARD_REJECTED, subject, message)


def _joined_workers(kinds: _EntriesByKind, problems: list[Problem]) -> list[RegisteredWorker]:
    """The workers whose card and endpoint are registered; adds the problems of the others."""
    names = {**worker_names(kinds.cards), **_unique_owners(kinds.owned)}
    split = {
        (card.endpoint.namespace, card.name) for card in kinds.cards.values() if _prefills(card)
    }
    workers = []
    for where, card in kinds.cards.items():
        name, instance = names[where], kinds.instances.get(where)
        if instance is None:
            message = f"the card is registered, {card.endpoint} is not: the worker cannot serve"
            problems.append(Problem(ProblemCode.CARD_WITHOUT_INSTANCE, name, message))
            continue
        sources = kinds.sources.get(card.instance_id, ())
        worker = _worker(name, card, _role(card, split), instance, sources, problems)
        if worker is not None:
            adapters = sorted(kinds.adapters.get(where, ()), key=lambda adapter: adapter.name)
            joined = _joined_worker(worker, card, instance, kinds)
            workers.append(_with_adapters(joined, tuple(adapters)))
    return workers


def _instances_without_card(kinds: _EntriesByKind) -> Iterable[Problem]:
    for where, instance in kinds.instances.items():
        carded = where in kinds.cards or where in kinds.adapters
        if instance.endpoint.name == SERVED and not carded and not _is_router(instance):
            yield Problem(
                ProblemCode.INSTANCE_WITHOUT_CARD,
                f"{instance.endpoint.component}/{instance.instance_id:x}",
                f"{instance.endpoint} is registered without a model card: it is still "
                "starting, or failed to register its model",
            )


def one_endpoint_each(deployment: Deployment) -> Deployment:
    """The deployment with one worker of each instance id: of an instance with models at several
    endpoints, that of the first endpoint. The others are problems.

    In Kubernetes the id is a hash of the pod's name, so that two workers of different namespaces
    can have one id: they are problems, too.

    A Dynamo frontend has a router for each endpoint and serves all of them; here one router has all
    workers, by their ids.
    """
    kept: dict[int, RegisteredWorker] = {}
    hidden, problems = [], []
    for item in sorted(
        deployment.workers, key=lambda item: (item.worker.worker_id, item.card.endpoint)
    ):
        first = kept.setdefault(item.worker.worker_id, item)
        if first is not item and _process(first) != _process(item):
            message = (
                f"a worker of {item.card.endpoint} and one of {first.card.endpoint} have the id "
                f"{item.card.instance_id:x}: dynctl knows the second one only; ids are hashes of "
                "the names of pods, so read one namespace"
            )
            problems.append(Problem(ProblemCode.ID_NOT_UNIQUE, item.worker.name, message))
            hidden.append(item)
        elif first is not item:
            served = f"{first.card.name} at {first.card.endpoint}"
            message = (
                f"instance {item.card.instance_id:x} serves {item.card.name} at "
                f"{item.card.endpoint} and {served}: dynctl routes to {served} only (Dynamo to all "
                "of them); start a process for each endpoint"
            )
            problems.append(Problem(ProblemCode.ENDPOINT_NOT_ROUTED, item.worker.name, message))
    if not problems:
        return deployment
    sets = _worker_sets([*kept.values()])
    return replace(
        deployment,
        workers=tuple(_in_sets(kept.values(), sets)),
        worker_sets=tuple(sets),
        problems=(*deployment.problems, *problems),
        hidden=tuple(hidden),
    )


def _process(item: RegisteredWorker) -> str:
    """The address of a worker's process; empty where it has none (NATS)."""
    instance = item.instance
    return instance.address.partition("/")[0] if instance.transport == "tcp" else ""


def _in_namespace(name: str, wanted: str) -> bool:
    """Whether ``name`` is the namespace, or begins with the prefix of ``PREFIX*``."""
    return name.startswith(wanted[:-1]) if wanted.endswith("*") else name == wanted


# -- sets of workers -------------------------------------------------------------------------------

_SetKey: TypeAlias = tuple[str, EndpointId, str, Role]
"""Model, endpoint, kind of requests (Dynamo's model type), role."""


def _worker_sets(workers: Sequence[RegisteredWorker]) -> list[WorkerSet]:
    """The sets that a Dynamo frontend makes: one a model, endpoint, kind of requests and role."""
    groups: dict[_SetKey, list[RegisteredWorker]] = defaultdict(list)
    for item in workers:
        card = item.card
        groups[card.name, card.endpoint, card.model_type, item.worker.role].append(item)
    by_namespace: dict[tuple[str, str], list[list[RegisteredWorker]]] = defaultdict(list)
    for (model, at, _, _), members in groups.items():
        by_namespace[model, at.namespace].append(members)
    not_ready = {key: _not_ready(key[1], own) for key, own in by_namespace.items()}
    names = _set_names(groups)
    sets = []
    for key in sorted(groups):
        model, at, _, role = key
        versions: dict[str, list[int]] = defaultdict(list)
        for item in groups[key]:
            versions[item.card.version].append(item.worker.worker_id)
        frozen = {version: tuple(ids) for version, ids in versions.items()}
        why, ambiguous = not_ready[model, at.namespace]
        sets.append(WorkerSet(names[key], model, at.namespace, role, frozen, why, ambiguous))
    return sets


def _set_names(groups: Iterable[_SetKey]) -> dict[_SetKey, str]:
    """``NAMESPACE/COMPONENT``, with role and kind of requests where these alone differ."""
    keys = list(groups)
    components = Counter((model, at.namespace, at.component) for model, at, _, _ in keys)
    roles = Counter((model, at, role) for model, at, _, role in keys)
    names = {}
    for model, at, kind, role in keys:
        name = f"{at.namespace}/{at.component}"
        if components[model, at.namespace, at.component] > 1:
            name += f" {role.value}"
            if roles[model, at, role] > 1:
                name += f" ({kind})"
        names[model, at, kind, role] = name
    return names


def _not_ready(
    namespace: str, sets: Sequence[Sequence[RegisteredWorker]]
) -> tuple[str | None, tuple[str, ...]]:
    """(why a namespace serves no requests of a model, roles with several sets).

    As the frontends of Dynamo 1.6.1 decide. ``sets``: the members of all sets of the model there.
    """
    if any(item.card.worker_type is None for item in chain.from_iterable(sets)):
        return None, ()  # older cards do not declare what they need
    roles = Counter(members[0].worker.role.value for members in sets)
    problem = f"namespace {namespace} is not ready"
    missing = set().union(*(_missing_roles(members[0].card, roles) for members in sets))
    if missing:
        return f"{problem}: no {' and no '.join(sorted(missing))} worker", ()
    several = sorted(r for r, n in roles.items() if n > 1 and r != Role.AGGREGATED.value)
    if several:
        return f"{problem}: several sets of {' and '.join(several)} workers", tuple(several)
    return None, ()


def _missing_roles(card: ModelCard, present: Mapping[str, int]) -> set[str]:
    """The roles that a card needs beside it; none where one of its groups is ``present``."""
    if any(all(kind in present for kind in group) for group in card.needs):
        return set()
    return {kind for group in card.needs for kind in group if kind not in present}


def _in_sets(
    workers: Iterable[RegisteredWorker], sets: Sequence[WorkerSet]
) -> list[RegisteredWorker]:
    """The workers with the sets that they belong to; prefill workers serve the decode sets."""
    own: dict[tuple[str, int], tuple[str, ...]] = {}
    decode: dict[tuple[str, str], list[str]] = defaultdict(list)
    for group in sets:
        if group.role is not Role.PREFILL:
            own |= {(group.namespace, worker_id): (group.name,) for worker_id in group.worker_ids}
        if group.role is Role.DECODE:
            decode[group.model, group.namespace].append(group.name)
    joined = []
    for item in workers:
        worker, namespace = item.worker, item.card.endpoint.namespace
        names = own.get((namespace, worker.worker_id), ())
        if worker.role is Role.PREFILL:
            names = tuple(decode[worker.model, namespace])
        joined.append(replace(item, worker=replace(worker, worker_sets=names)))
    return joined


def _with_adapters(item: RegisteredWorker, cards: tuple[ModelCard, ...]) -> RegisteredWorker:
    names = tuple(card.name for card in cards)
    return replace(item, worker=replace(item.worker, adapters=names), adapters=cards)


def _unregistered_sources(
    instances: Iterable[Instance], shared: Mapping[tuple[str, str], list[EventChannel]]
) -> Iterable[EventSource]:
    """The sources of components with shared channels: each local indexer is one.

    Dynamo before 1.4 registers no sources, and names the rank in the endpoint.
    """
    for instance in instances:
        endpoint = instance.endpoint
        start, _, rank = endpoint.name.partition(LOCAL_INDEXER)
        if not start and rank.isdecimal() and (endpoint.namespace, endpoint.component) in shared:
            yield EventSource(
                endpoint._replace(name=""),
                KV_EVENTS,
                instance.instance_id,
                instance.instance_id,
                int(rank),
                instance,
            )


def _unique_owners(owned: Mapping[Where, str]) -> dict[Where, str]:
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
    role: Role | None,
    instance: Instance,
    sources: Sequence[EventSource],
    problems: list[Problem],
) -> Worker | None:
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
        if not config.context_length:  # mock workers publish 0
            config = replace(config, context_length=card.context_length, validate=False)
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
            device=None if instance.device_type is None else instance.device_type.lower(),
            aliases=card.aliases,
        )
    except (WorkerError, TypeError, ValueError) as error:
        problems.append(Problem(ProblemCode.CARD_REJECTED, name, f"{error}: not routed to"))
        return None


def _role(card: ModelCard, split: Set[tuple[str, str]]) -> Role | None:
    """``split``: the (namespace, model) pairs that have prefill workers."""
    if card.worker_type is not None:
        return _ROLES.get(card.worker_type)
    # Cards of Dynamo 1.2 and older have no worker type: beside prefill workers the others decode.
    if _prefills(card):
        return Role.PREFILL
    return Role.DECODE if (card.endpoint.namespace, card.name) in split else Role.AGGREGATED


def _prefills(card: ModelCard) -> bool:
    """Whether a card without worker type is that of a prefill worker."""
    kind = card.model_type.strip().lower()
    return card.worker_type is None and kind in ("", "prefill")


def _joined_worker(
    worker: Worker, card: ModelCard, instance: Instance, kinds: _EntriesByKind
) -> RegisteredWorker:
    """A worker with the sources and channels of its events."""
    own = {source.dp_rank: source for source in kinds.sources.get(worker.worker_id, ())}
    channels = {
        rank: kinds.by_publisher[source.publisher_id]
        for rank, source in own.items()
        if source.publisher_id in kinds.by_publisher
    }
    shared = tuple(kinds.shared.get((card.endpoint.namespace, card.endpoint.component), ()))
    stream = None
    if not own and worker.role is not Role.DECODE:
        stream = durable_events(card)
        worker = replace(worker, kv_events=stream is not None)
    return RegisteredWorker(
        worker, card, instance, own, channels, shared_events=shared, durable_events=stream
    )


def _contradictions(workers: list[RegisteredWorker]) -> Iterable[Problem]:
    """Problems of a model whose workers contradict each other."""
    models: dict[str, list[RegisteredWorker]] = defaultdict(list)
    for item in workers:
        models[item.worker.model].append(item)
    for model, members in models.items():
        yield from _differing_settings(model, members)
        yield from _missing_topology(model, members)
        yield from _missing_events(members)


def _differing_settings(model: str, members: Sequence[RegisteredWorker]) -> Iterable[Problem]:
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


def _missing_topology(model: str, members: Sequence[RegisteredWorker]) -> Iterable[Problem]:
    """Workers without a domain that other workers of the model publish."""
    gaps = topology_gaps(model, [item.worker.domains for item in members])
    for item, gap in zip(members, gaps, strict=True):
        if gap:
            yield Problem(ProblemCode.TOPOLOGY_MISSING, item.worker.name, gap)


def topology_gaps(
    model: str, published: Sequence[Collection[str]], compared: Collection[str] | None = None
) -> list[str]:
    """For each worker of a model, which topology domains others publish and it does not; empty
    where it has all of them.

    ``published``: the domains of each worker. ``compared``: the domains that it should have where
    it publishes any topology; None: all.
    """
    counts = Counter(domain for domains in published for domain in set(domains))
    wanted = counts.keys() if compared is None else counts.keys() & compared
    workers = f"{len(published):,} workers of {model} do"
    publishing = sum(map(bool, published))
    gaps = []
    for domains in published:
        missing = sorted(wanted - set(domains))
        if counts and not domains:
            gaps.append(f"publishes no topology, {publishing:,} of {workers}")
        else:
            gaps.append(
                "; ".join(f"publishes no {name}, {counts[name]:,} of {workers}" for name in missing)
            )
    return gaps


def _missing_events(members: Sequence[RegisteredWorker]) -> Iterable[Problem]:
    for item in members:
        if item.worker.role is Role.DECODE:
            continue
        heard = {*item.kv_events, *(item.sources if item.shared_events else ())}
        silent = [rank for rank in item.worker.ranks if rank not in heard]
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

"""The models of the registered workers: their names, block sizes, lengths and worker sets."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from router_core import Pin, Role, Router, Worker


@dataclass(slots=True)
class _Pool:
    """The workers of a model, or of one worker set of it. ``block_size``: of the first one."""

    block_size: int
    context_length: int | None
    eagle: bool = False

    def add_length(self, length: int | None) -> None:
        """The longest one counts; None where a worker does not report its own."""
        known = self.context_length
        self.context_length = None if known is None or length is None else max(known, length)


@dataclass(frozen=True, slots=True)
class ServedName:
    """What a request for a name is routed by.

    ``model``, ``served_name``: see :meth:`ServedModels.base_model` and
    :meth:`ServedModels.served_name`. ``in_sets``: it goes to one of several worker sets
    (:meth:`ServedModels.draw_worker_set`). ``context_length``: of all workers of the model.
    """

    model: str
    served_name: str | None
    is_adapter: bool
    in_sets: bool
    context_length: int | None


#: Names without workers whose time is remembered.
_MOST_LEFT: Final = 1000


class ServedModels:
    """Facts of models, by the workers of a router; :meth:`update` after each change of workers.

    ``default_block_size``: of models without workers. ``sample`` gives numbers in [0, 1).
    """

    def __init__(
        self, router: Router, sample: Callable[[], float], default_block_size: int
    ) -> None:
        #: Name of a model without workers -> when the last one left.
        self._left: dict[str, float] = {}
        #: What :meth:`find` found since the last change of the workers.
        self._by_name: dict[str, ServedName] = {}
        #: Name that requests may use -> its model.
        self._names: Mapping[str, str] = {}
        self._router = router
        self._registry = router.registry
        self._sample = sample
        self._default_block_size = default_block_size
        #: By model with worker set; None: all workers of the model.
        self._pools: dict[tuple[str, str | None], _Pool] = {}
        #: Model -> its worker sets with the ids of the workers that get requests, where a request
        #: goes to one of several sets.
        self._sets: dict[str, dict[str, list[int]]] = {}
        #: Worker name -> why its blocks have another size than the others' of its model.
        self._other_sizes: dict[str, str] = {}
        #: LoRA adapter -> its base model, and the ids of the workers that have it.
        self.adapters: Mapping[str, tuple[str, frozenset[int]]] = {}
        #: Other name of a model -> the model.
        self.aliases: Mapping[str, str] = {}

    # -- names -------------------------------------------------------------------------------

    def find(self, name: str) -> ServedName | None:
        """What a request for ``name`` is routed by; None if no worker serves it."""
        served = self._by_name.get(name)
        if served is not None:
            return served
        model = self.base_model(name)
        if model is None:
            return None
        served = self._by_name[name] = ServedName(
            model,
            self.served_name(name),
            name in self.adapters,
            model in self._sets,
            self.context_length(model),
        )
        return served

    def base_model(self, name: str) -> str | None:
        """The model that a request for ``name`` is routed by: itself, the model of an alias, or an
        adapter's base; None if no worker serves it."""
        alias = self.aliases.get(name)
        if alias is not None:
            return alias
        # Before the registry, where workers of a deployment have the names of their adapters too.
        adapter = self.adapters.get(name)
        if adapter is not None:
            return adapter[0]
        return name if self._registry.model(name) else None

    def served_name(self, name: str) -> str | None:
        """The name that the workers of a request must serve, where it is not their model's own:
        an alias or an adapter, which a part of them may have."""
        return name if name in self.aliases or name in self.adapters else None

    def left_for(self, name: str, now: float) -> float | None:
        """Seconds since the last worker of a model left, also by its other names; None for one
        that is served or was never."""
        left_at = self._left.get(name)
        return None if left_at is None else now - left_at

    # -- facts -------------------------------------------------------------------------------

    def block_size(self, model: str, worker_set: str | None = None) -> int:
        """Tokens per block of the model's workers, or of those of a worker set."""
        pool = self._pools.get((model, worker_set)) or self._pools.get((model, None))
        return self._default_block_size if pool is None else pool.block_size

    def blocks(self, model: str, worker_set: str | None = None) -> tuple[int, bool]:
        """As :meth:`block_size` and :meth:`is_eagle`."""
        pool = self._pools.get((model, worker_set))
        if pool is not None:
            return pool.block_size, pool.eagle
        return self.block_size(model), False

    def is_eagle(self, model: str, worker_set: str | None = None) -> bool:
        """Whether the workers decode speculatively: a block is complete with the token behind it
        only."""
        pool = self._pools.get((model, worker_set))
        return pool is not None and pool.eagle

    def context_length(self, model: str, worker_set: str | None = None) -> int | None:
        """The longest prompt plus output, in tokens, that a worker of the model accepts, or of the
        worker set."""
        pool = self._pools.get((model, worker_set))
        return None if pool is None else pool.context_length

    def mismatches(self) -> dict[str, str]:
        """Worker name -> why no prompt matches its cache: blocks of another size than the other
        workers' of its model, or of single tokens where theirs are pairs."""
        reasons = dict(self._other_sizes)
        speculative = {model for (model, name), pool in self._pools.items() if pool.eagle}
        if not speculative:
            return reasons
        registry, index = self._registry, self._router.index
        for worker in registry:
            single = worker.model in speculative and not worker.runtime_config.enable_eagle
            slots = registry.slots(worker.worker_id)
            # Before its first event it is not known what a worker publishes.
            if single and any(index.block_count(slot) for slot in slots):
                reasons.setdefault(
                    worker.name,
                    f"worker {worker.name} publishes single tokens, others of {worker.model} pairs "
                    "of tokens (speculative decoding, EAGLE); its cache cannot be matched: use the "
                    "same speculative decoding on all",
                )
        return reasons

    # -- worker sets -------------------------------------------------------------------------

    def draw_worker_set(
        self,
        model: str,
        *,
        served_name: str | None = None,
        pins: Iterable[Pin | None] = (),
        likely: bool = False,
    ) -> str | None:
        """The worker set that a request goes to; None where the workers of the model are one pool.

        As a Dynamo frontend: at random, by the number of available workers, before a worker in it
        is chosen. A pinned worker decides the set (Dynamo refuses the request where it drew
        another one). ``likely``: the set with the most workers, for a dry run.
        """
        if model not in self._sets:
            return None
        shares = self.shares(model, served_name)
        for pin in pins:
            worker = None if pin is None else self._registry.get(pin.worker_id)
            own = () if worker is None else worker.worker_sets
            shares = {name: n for name, n in shares.items() if name in own} or shares
        if likely or not any(shares.values()):
            return max(shares, key=lambda name: shares[name])
        drawn = int(self._sample() * sum(shares.values()))
        passed = accumulate(shares.values())
        return next(name for name, end in zip(shares, passed, strict=True) if drawn < end)

    def shares(self, model: str, served_name: str | None) -> dict[str, int]:
        """Worker set of the model -> its available workers, those that serve the name; empty where
        the workers of the model are one pool."""
        registry = self._registry
        usable = registry.serving(model, served_name) & ~registry.unavailable
        return {
            name: sum(bool(registry.mask_of((worker_id,)) & usable) for worker_id in members)
            for name, members in self._sets.get(model, {}).items()
        }

    # -- changes -----------------------------------------------------------------------------

    def update(self, now: float) -> None:
        """Workers came, left or changed."""
        self._by_name = {}
        self._pools, self._other_sizes = {}, {}
        sets: dict[str, dict[str, list[int]]] = {}
        outside = set()
        #: Most workers of a large fleet add nothing to what an equal one has added.
        added: dict[tuple[Any, ...], _Pool] = {}
        for worker in self._registry:
            model, facts = worker.model, worker.runtime_config
            kind = (model, worker.block_size, facts.context_length, facts.enable_eagle)
            pool = added.get(kind)
            if pool is None:
                pool = added[kind] = self._add(worker, None)
            for name in worker.worker_sets:
                pool = self._add(worker, name)
                if worker.role is not Role.PREFILL:
                    sets.setdefault(model, {}).setdefault(name, []).append(worker.worker_id)
            if not worker.worker_sets:
                outside.add(model)
            if pool.block_size != worker.block_size:
                self._other_sizes[worker.name] = (
                    f"worker {worker.name} has blocks of {worker.block_size} tokens, others of "
                    f"{model} have {pool.block_size}; its cache cannot be matched: use one block "
                    "size"
                )
        self._sets = {
            model: named for model, named in sets.items() if len(named) > 1 or model in outside
        }
        self._name_models()
        self._note_left(now)

    def _note_left(self, now: float) -> None:
        served = self._registry.models()
        before = self._names
        bases = {name: base for name, (base, _) in self.adapters.items()}
        self._names = {**self.aliases, **bases, **{model: model for model in served}}
        for name, model in before.items():
            if name not in self._names and model not in served:
                self._left[name] = now
        for name in self._left.keys() & self._names.keys():
            del self._left[name]
        while len(self._left) > _MOST_LEFT:
            del self._left[next(iter(self._left))]

    def _add(self, worker: Worker, worker_set: str | None) -> _Pool:
        facts = worker.runtime_config
        first = _Pool(worker.block_size, facts.context_length)
        pool = self._pools.setdefault((worker.model, worker_set), first)
        pool.eagle = pool.eagle or facts.enable_eagle
        pool.add_length(facts.context_length)
        return pool

    def _name_models(self) -> None:
        """One base for each adapter and alias: where several models have one of that name, the
        first."""
        holders: dict[str, dict[str, set[int]]] = {}
        for worker in self._registry:
            for name in worker.adapters:
                models = holders.setdefault(name, {})
                models.setdefault(worker.model, set()).add(worker.worker_id)
        served = set(self._registry.models())
        first = {name: min(models.items()) for name, models in holders.items()}
        self.adapters = {
            name: (base, frozenset(ids))
            for name, (base, ids) in first.items()
            if name not in served
        }
        named = [worker for worker in self._registry if worker.aliases]
        by_model = sorted(named, key=lambda worker: worker.model, reverse=True)
        self.aliases = {
            alias: worker.model
            for worker in by_model
            for alias in worker.aliases
            if alias not in served
        }

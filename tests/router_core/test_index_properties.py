"""The prefix index against a naive model, under random histories.

The model keeps, per slot, the set of paths (tuples of local hashes) with the slot's name for each,
and answers every question by looking at all of them. Locals and names come from small sets, so
that prefixes are shared, names clash and workers disagree.
"""

import json
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router_core.events import Fault
from router_core.hashing import sequence_hashes
from router_core.index import PrefixIndex
from router_core.worker_sets import Overlaps

Path = tuple[int, ...]

SLOTS = st.sampled_from([0, 1, 2, 3, 40, 65])
LOCALS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
ODD_NAMES = st.integers(0, 6)


class Model:
    """What a slot holds, said as simply as possible."""

    def __init__(self) -> None:
        self.paths: dict[Path, int] = {}

    def path(self, name: int) -> Path | None:
        return next((path for path, known in self.paths.items() if known == name), None)

    def store(
        self, parent: int | None, names: Sequence[int], local: Path
    ) -> tuple[int, int, Fault | None]:
        at: Path | None = () if parent is None else self.path(parent)
        if at is None:
            return 0, 0, Fault.UNKNOWN_PARENT
        stored = known = 0
        for name, block in zip(names, local, strict=True):
            at = (*at, block)
            if self.path(name) not in (None, at):
                return stored, known, Fault.HASH_CONFLICT
            known += at in self.paths
            stored += at not in self.paths
            self.paths[at] = name
        return stored, known, None

    def remove(self, names: Sequence[int]) -> tuple[int, int, int]:
        named = [self.path(name) for name in names]
        removed = {path for path in named if path is not None}
        below = {path for path in self.paths if any(path[: len(top)] == top for top in removed)}
        for path in below:
            del self.paths[path]
        return len(removed), len(below) - len(removed), named.count(None)

    def depth(self, prompt: Path) -> int:
        depth = 0
        while depth < len(prompt) and prompt[: depth + 1] in self.paths:
            depth += 1
        return depth


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.models: dict[int, Model] = {}
        self.dropping: dict[int, int] = {}
        self.own: set[int] = set()

    @initialize(own=st.sets(SLOTS))
    def engines_disagree(self, own: set[int]) -> None:
        """Slots in ``own`` run engines whose hashes nobody else has."""
        self.own = own

    def model(self, slot: int) -> Model:
        return self.models.setdefault(slot, Model())

    def name(self, slot: int, path: Path) -> int:
        salt = 1_000 + slot if slot in self.own else 7
        return hash((salt, path)) % 2**64

    def parent_of(self, slot: int, data: st.DataObject, path: Path) -> tuple[int | None, Path]:
        """Mostly a place where the chain goes on, now and then anything."""
        held = sorted(self.model(slot).paths)
        at = data.draw(st.sampled_from([(), *held, path[:1], path[:2]]), "parent path")
        if not at:
            return None, at
        return self.model(slot).paths.get(at, self.name(slot, at)), at

    @rule(slot=SLOTS, local=LOCALS, data=st.data(), odd=st.none() | ODD_NAMES)
    def store(self, slot: int, local: Path, data: st.DataObject, odd: int | None) -> None:
        parent, at = self.parent_of(slot, data, local)
        names = [self.name(slot, at + local[: n + 1]) for n in range(len(local))]
        if odd is not None:
            names[data.draw(st.integers(0, len(names) - 1), "odd at")] = odd
        result = self.index.store(slot, parent, names, local)
        if slot in self.dropping:
            assert result.refused is not None
            assert result.refused.code == Fault.SLOT_DROPPED
            return
        stored, known, fault = self.model(slot).store(parent, names, local)
        assert (result.stored, result.known) == (stored, known)
        assert (result.refused.code if result.refused else None) == fault
        if result.refused is not None:
            assert result.refused.blocks == len(local) - stored - known

    @rule(slot=SLOTS, data=st.data())
    def remove(self, slot: int, data: st.DataObject) -> None:
        everyones = sorted(
            {name for model in self.models.values() for name in model.paths.values()}
        )
        own = sorted(self.model(slot).paths.values())
        choice = st.one_of(
            *(st.sampled_from(names) for names in (own, own, everyones) if names), ODD_NAMES
        )
        names = data.draw(st.lists(choice, min_size=1, max_size=4), "names")
        result = self.index.remove(slot, names)
        if slot in self.dropping:
            assert (result.removed, result.hidden, result.unknown) == (0, 0, len(names))
            return
        expected = self.model(slot).remove(names)
        assert (result.removed, result.hidden, result.unknown) == expected

    @rule(slot=SLOTS)
    def clear(self, slot: int) -> None:
        if slot in self.dropping:
            assert self.index.clear(slot) == 0
        else:
            assert self.index.clear(slot) == len(self.model(slot).paths)
            self.models.pop(slot)

    @rule(slot=SLOTS)
    def lose(self, slot: int) -> None:
        self.index.begin_drop(slot)
        held = len(self.model(slot).paths)
        self.models.pop(slot)
        if held:
            self.dropping[slot] = held

    @rule(blocks=st.integers(0, 9))
    def sweep(self, blocks: int) -> None:
        before = sum(self.dropping.values())
        left = self.index.sweep(blocks)
        assert max(0, before - blocks) <= left <= before
        self.dropping = {
            slot: self.index.block_count(slot)
            for slot in self.dropping
            if not self.index.is_free(slot)
        }
        assert left == sum(self.dropping.values())

    @rule()
    def sweep_to_the_end(self) -> None:
        for _ in range(10_000):
            if not self.index.sweep(5):
                break
        assert all(self.index.is_free(slot) for slot in self.dropping)
        self.dropping = {}

    @rule()
    def restore(self) -> None:
        self.index = PrefixIndex.restore(json.loads(json.dumps(self.index.dump())))
        self.dropping = {}

    @rule(prompt=LOCALS, candidates=st.none() | st.sets(SLOTS))
    def match(self, prompt: Path, candidates: set[int] | None) -> None:
        self.check(prompt, candidates)

    @rule(data=st.data())
    def match_a_long_one(self, data: st.DataObject) -> None:
        held = sorted({path for model in self.models.values() for path in model.paths})
        if held:
            deep = data.draw(st.sampled_from(held), "held")
            self.check(deep + data.draw(LOCALS, "tail"), None)
            self.check(deep, None)

    def check(self, prompt: Path, candidates: set[int] | None) -> None:
        mask = None if candidates is None else sum(1 << slot for slot in candidates)
        found = self.index.find_matches(sequence_hashes(prompt), mask)
        expected = {
            slot: model.depth(prompt)
            for slot, model in self.models.items()
            if (candidates is None or slot in candidates) and model.depth(prompt)
        }
        assert dict(found.items()) == expected
        self.check_shape(found)

    @staticmethod
    def check_shape(found: Overlaps) -> None:
        depths = [depth for depth, _ in found.levels]
        assert depths == sorted(set(depths), reverse=True)
        assert all(mask > 0 for _, mask in found.levels)
        assert sum(mask.bit_count() for _, mask in found.levels) == found.mask.bit_count()

    @invariant()
    def counts(self) -> None:
        held = {slot: len(model.paths) for slot, model in self.models.items()} | self.dropping
        for slot in (0, 1, 2, 3, 40, 65):
            assert self.index.block_count(slot) == held.get(slot, 0)
            assert self.index.is_free(slot) == (not held.get(slot, 0))
        assert self.index.entry_count == sum(held.values())
        if not self.dropping:
            distinct = {path for model in self.models.values() for path in model.paths}
            assert self.index.node_count == len(distinct)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        """Names and links exist for live blocks alone; an empty index is empty throughout."""
        index, names = self.index, self.index._names
        assert set(names.shared.values()) == set(names.names) <= set(index._owners)
        assert {block: name for name, block in names.shared.items()} == names.names
        for slot, own in names.own.items():
            assert own.names
            assert {block: name for name, block in own.blocks.items()} == own.names
            assert all(index._owners[block] >> slot & 1 for block in own.names)
        links = index._children
        assert set(links.only) | set(links.branches) <= set(index._owners)
        assert not set(links.only) & set(links.branches)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)

"""Cache groups of hybrid models against a naive engine that searches every point of reuse."""

import json
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.hashing import sequence_hashes
from router_core.index import PrefixIndex

Path = tuple[int, ...]


class Engine:
    """The cache of one engine: for each group the set of its blocks, a block being a prefix.

    ``windows``: group -> (span, needed); ``needed`` None is a second group of full attention.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.salt = self.random.choice([7, seed])
        kinds = [(1, 1), (1, 3), (2, 1), (3, 2), (1, None), (2, None), (1, 0)]
        chosen = self.random.choices(kinds, k=self.random.randint(1, 3))
        # The main group is the first one with full attention.
        chosen.sort(key=lambda kind: kind[1] is None)
        windows = sum(needed is not None for _, needed in chosen)
        self.main = self.random.randint(0, windows)
        groups = [group for group in range(len(chosen) + 1) if group != self.main]
        self.windows = dict(zip(groups, chosen, strict=True))
        self.held: dict[int, set[Path]] = {group: set() for group in range(len(chosen) + 1)}
        self.copies: Counter[tuple[int, Path]] = Counter()

    def name(self, path: Path) -> int:
        return hash((self.salt, path)) % 2**64

    def usable(self, prompt: Path, limit: int) -> int:
        main = self.held[self.main]
        for depth in range(min(limit, len(prompt)), 0, -1):
            if all(prompt[:n] in main for n in range(1, depth + 1)) and all(
                self._allows(group, prompt, depth) for group in self.windows
            ):
                return depth
        return 0

    def _allows(self, group: int, prompt: Path, depth: int) -> bool:
        span, needed = self.windows[group]
        if depth % span:
            return False
        last = depth // span
        first = 1 if needed is None else max(1, last - needed + 1)
        return all(prompt[: n * span] in self.held[group] for n in range(first, last + 1))

    def store(self, index: PrefixIndex, slot: int, prompt: Path) -> None:
        for group in self.held:
            if group == self.main:
                names = [self.name(prompt[: n + 1]) for n in range(len(prompt))]
                index.store(slot, None, names, prompt, group)
                self.held[group] |= {prompt[: n + 1] for n in range(len(prompt))}
                continue
            span, needed = self.windows[group]
            blocks = [prompt[: (n + 1) * span] for n in range(len(prompt) // span)]
            if needed is not None:
                # An engine does not cache blocks of a window that no prompt can reuse.
                blocks = [path for path in blocks if self.random.random() < 0.8]
            names = [self.name(path) for path in blocks]
            if needed is None and span == 1:
                index.store(slot, None, names, prompt, group)
            else:
                index._groups_of(slot).store(group, names, span, needed)
            self.held[group] |= set(blocks)
            self.copies.update((group, path) for path in blocks)

    def remove(self, index: PrefixIndex, slot: int) -> None:
        group = self.random.choice(sorted(self.held))
        if not self.held[group]:
            return
        path = self.random.choice(sorted(self.held[group]))
        index.remove(slot, [self.name(path)], group)
        self.copies[group, path] -= 1
        if self.copies[group, path] > 0:
            return
        gone = {path}
        if group == self.main:  # an engine cannot use them either, until they are stored again
            gone = {one for one in self.held[group] if one[: len(path)] == path}
        self.held[group] -= gone


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_reuse_is_what_all_groups_allow(seed: int) -> None:
    source = random.Random(seed)
    index = PrefixIndex()
    engines = {slot: Engine(seed + slot) for slot in range(3)}
    stock = [tuple(source.randrange(2) for _ in range(9)) for _ in range(3)]
    plain = 70  # a slot of an engine without groups, beside them
    index.store(plain, None, [hash((7, stock[0][: n + 1])) % 2**64 for n in range(9)], stock[0])
    for _ in range(25):
        slot, engine = source.choice(sorted(engines.items()))
        if source.random() < 0.6:
            engine.store(index, slot, source.choice(stock)[: source.randint(1, 9)])
        elif source.random() < 0.95:
            engine.remove(index, slot)
        else:
            index.clear(slot)
            engine.copies.clear()
            for held in engine.held.values():
                held.clear()
        if source.random() < 0.1:
            index = PrefixIndex.restore(json.loads(json.dumps(index.dump())))
        if source.random() < 0.1:
            index = index.copy()
        prompt = source.choice(stock)
        limit = source.choice([8, 9])
        found = index.find_matches(sequence_hashes(prompt), limit=limit)
        for slot, engine in engines.items():
            assert found.get(slot) == engine.usable(prompt, limit), (slot, engine.windows)
            assert index.block_count(slot) == sum(map(len, engine.held.values()))
        if prompt == stock[0]:
            assert found.get(plain) == 9, "without groups the limit has no effect"
    for slot in engines:
        index.begin_drop(slot)
    index.sweep(10_000)
    assert all(index.is_free(slot) and not index.block_count(slot) for slot in engines)


def test_a_group_that_is_not_indexed_removes_nothing() -> None:
    """Names are equal in all groups: an eviction in one says nothing about another."""
    index = PrefixIndex()
    index.store(0, None, [1, 2], [5, 6])
    assert index.remove(0, [1, 2], group=3).removed == 0
    assert index.find_matches(sequence_hashes([5, 6])).get(0) == 2
    index.store_window(0, 1, [2], needed=1)
    assert index.remove(0, [1, 2], group=3).removed == 0
    assert index.remove(0, [2], group=1).removed == 1
    assert index.find_matches(sequence_hashes([5, 6])).get(0) == 0


@given(st.integers(0, 2**32), st.booleans())
def test_a_block_is_held_until_its_last_copy_is_removed(seed: int, beside: bool) -> None:
    """An engine that computes the same prefix twice at a time caches and evicts both copies."""
    source = random.Random(seed)
    index = PrefixIndex()
    prompt = tuple(range(6))
    names = [100 + n for n in range(6)]
    if beside:  # another worker with the same blocks changes nothing
        index.store(1, None, names, prompt)
    copies: Counter[int] = Counter()
    for _ in range(30):
        if source.random() < 0.5:
            first = source.randint(0, len(+copies))  # copies of blocks after a hit
            last = source.randint(first, 6)
            if first < last:
                parent = names[first - 1] if first else None
                index.store(0, parent, names[first:last], prompt[first:last], counted=True)
                copies.update(range(first, last))
        elif +copies:
            end = max(+copies)  # an engine evicts the ends of prompts first
            index.remove(0, [names[end]])
            copies[end] -= 1
        if source.random() < 0.1:
            index = PrefixIndex.restore(json.loads(json.dumps(index.dump())))
        assert index.find_matches(sequence_hashes(prompt)).get(0) == len(+copies)
    plain = PrefixIndex()
    for _ in range(2):  # Dynamo's publishers announce a block once, so it is not counted
        plain.store(0, None, names, prompt)
    plain.remove(0, names[3:])
    assert plain.find_matches(sequence_hashes(prompt)).get(0) == 3


def test_copies_in_a_window_count() -> None:
    index = PrefixIndex()
    index.store(0, None, [1, 2], [5, 6])
    for _ in range(2):
        index.store_window(0, 1, [2], needed=1)
    assert index.remove(0, [2], group=1).removed == 0
    assert index.find_matches(sequence_hashes([5, 6])).get(0) == 2
    assert index.remove(0, [2], group=1).removed == 1
    assert index.find_matches(sequence_hashes([5, 6])).get(0) == 0

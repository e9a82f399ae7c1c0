"""The prefix index against a naive model, under random histories.

The model keeps, per slot, the set of paths (tuples of local hashes) with the slot's name for each,
and answers every question by looking at all of them. Locals and names come from small sets, so
that prefixes are shared, names clash and workers disagree. A history is drawn from a seed rather
than rule by rule: its steps can so be weighted until the rare states are common, and the last test
counts that they are. Shrinking shortens the history.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from router_core import block_ownership
from router_core import runs as runs_module
from router_core.events import Fault
from router_core.hashing import sequence_hashes
from router_core.index import PrefixIndex
from router_core.runs import LIMIT, POSITION_BITS, ROOT
from router_core.worker_sets import slots_of

Path = tuple[int, ...]

SLOTS = [0, 1, 2, 3, 40, 65]


class Model:
    """The blocks of one slot, in the simplest form."""

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


def masks(held: int | tuple[int, ...], length: int) -> list[int]:
    """The holders of each block of a run."""
    if isinstance(held, int):
        return [held] * length
    found: list[int] = []
    for end, mask in zip(held[::2], held[1::2], strict=True):
        assert end > len(found), "ends ascend"
        assert not found or (found[-1] & mask == mask != found[-1]), "masks shrink"
        found += [mask] * (end - len(found))
    assert len(found) == length
    assert len(held) > 2
    return found


class History:
    """One random history, applied to the index and to the model, compared after every step."""

    def __init__(self, seed: int, say: Callable[[str], object] = str) -> None:
        self.random = random.Random(seed)
        self.say = say
        self.index = PrefixIndex()
        self.models: dict[int, Model] = {slot: Model() for slot in SLOTS}
        self.dropping: set[int] = set()
        # Slots whose engines have hashes of their own.
        self.own = {slot for slot in SLOTS if self.random.random() < self.random.choice([0, 0.5])}
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        steps = [
            self.store,
            self.remove,
            self.clear,
            self.lose,
            self.sweep,
            self.restore,
            self.copy,
        ]
        [step] = self.random.choices(steps, weights=[50, 16, 1, 4, 8, 1, 1])
        slot = self.random.choice(SLOTS)
        self.say(f"{step.__name__} {slot}")
        step(slot)
        self.check_counts()
        self.check_no_leftovers()
        for _ in range(3):
            self.match()

    # ---- steps

    def some_locals(self) -> Path:
        return tuple(self.random.randrange(3) for _ in range(self.random.randint(1, 5)))

    def held_path(self, slot: int | None = None) -> Path:
        """A path that the slot holds, or any slot; () if there is none."""
        models = self.models.values() if slot is None else [self.models[slot]]
        held = sorted(path for model in models for path in model.paths)
        return self.random.choice(held) if held else ()

    def name(self, slot: int, path: Path) -> int:
        salt = 1_000 + slot if slot in self.own else 7
        return hash((salt, path)) % 2**64

    def odd_name(self) -> int:
        """A name that any block of any worker may have."""
        return self.random.randrange(8)

    def store(self, slot: int) -> None:
        model = self.models[slot]
        at = () if self.random.random() < 0.4 else self.held_path(slot)
        if self.random.random() < 0.1:
            at = self.held_path()
        # Half of the time what another worker has there, so that prefixes are shared.
        other = self.held_path()
        same_as_other = other[: len(at)] == at and len(other) > len(at)
        local = other[len(at) :] if same_as_other and self.random.random() < 0.7 else ()
        local = local or self.some_locals()
        parent = model.paths.get(at, self.name(slot, at)) if at else None
        names = [self.name(slot, at + local[: n + 1]) for n in range(len(local))]
        if self.random.random() < 0.35:
            names[self.random.randrange(len(names))] = self.odd_name()
        result = self.index.store(slot, parent, names, local)
        if slot in self.dropping:
            assert result.refused is not None
            assert result.refused.code == Fault.SLOT_DROPPED
            return
        stored, known, fault = model.store(parent, names, local)
        assert (result.stored, result.known) == (stored, known)
        assert (result.refused.code if result.refused else None) == fault
        if result.refused is not None:
            assert result.refused.blocks == len(local) - stored - known
            self.seen[result.refused.code] += 1

    def remove(self, slot: int) -> None:
        model = self.models[slot]
        names = []
        for _ in range(self.random.randint(1, 3)):
            path = self.held_path(slot if self.random.random() < 0.8 else None)
            holder = self.random.choice([slot, *SLOTS])
            names.append(self.models[holder].paths.get(path, self.name(slot, path)))
        if self.random.random() < 0.3:
            names.append(self.odd_name())
        if self.random.random() < 0.5:
            names = self.neighbours(slot)
        bit = 1 << slot
        if slot not in self.dropping:
            found = self.index._names_in_run(slot, bit, names)
            self.seen["neighbours of a run"] += found is not None
        result = self.index.remove(slot, names)
        if slot in self.dropping:
            assert (result.removed, result.hidden, result.unknown) == (0, 0, len(names))
            return
        assert (result.removed, result.hidden, result.unknown) == model.remove(names)
        self.seen["hidden"] += result.hidden > 0
        self.seen["unknown"] += result.unknown > 0

    def neighbours(self, slot: int) -> list[int]:
        """The names of a part of a path, first or last block first, sometimes with another one."""
        model = self.models[slot]
        path = self.held_path(slot if self.random.random() < 0.9 else None)
        first = max(0, len(path) - self.random.randint(2, 4))
        parts = [path[: n + 1] for n in range(first, len(path))]
        names = [model.paths.get(part, self.name(slot, part)) for part in parts]
        if len(names) > 1 and self.random.random() < 0.3:
            names[self.random.randrange(len(names))] = self.odd_name()
        return (names[::-1] if self.random.random() < 0.5 else names) or [self.odd_name()]

    def clear(self, slot: int) -> None:
        assert self.index.clear(slot) == len(self.models[slot].paths)
        self.models[slot] = Model()

    def lose(self, slot: int) -> None:
        self.index.begin_drop(slot)
        if self.models[slot].paths:
            self.dropping.add(slot)
        self.models[slot] = Model()

    def sweep(self, slot: int) -> None:
        blocks = self.random.randrange(12)
        before = sum(self.index.block_count(slot) for slot in self.dropping)
        left = self.index.sweep(blocks)
        assert max(0, before - blocks) <= left <= before
        for slot in list(self.dropping):
            if self.index.is_free(slot):
                self.dropping.discard(slot)
                self.seen["swept"] += 1
        assert left == sum(self.index.block_count(slot) for slot in self.dropping)

    def copy(self, slot: int) -> None:
        """The history goes on with a copy; what is done to the first one does not matter."""
        first, self.index = self.index, self.index.copy()
        first.begin_drop(slot)
        first.sweep(3)
        first.store(slot, None, [1, 2], [0, 1])

    def restore(self, slot: int) -> None:
        self.index = PrefixIndex.restore(json.loads(json.dumps(self.index.dump())))
        self.dropping = set()

    # ---- comparisons

    def match(self) -> None:
        held = self.held_path()
        prompt = held[: self.random.randint(0, 12)] + self.random.choice([(), self.some_locals()])
        among = set(SLOTS)
        candidates = None
        if self.random.random() < 0.3:
            among = {slot for slot in SLOTS if self.random.random() < 0.6}
            candidates = sum(1 << slot for slot in among)
        found = self.index.find_matches(sequence_hashes(prompt), candidates)
        assert self.index.find_matches_local(prompt, candidates) == found
        depths = {slot: self.models[slot].depth(prompt) for slot in among}
        expected = {slot: depth for slot, depth in depths.items() if depth}
        items = list(found.items())
        assert dict(items) == expected
        assert len(items) == len(expected), "a slot is in one level"
        levels = [depth for depth, _ in found.levels]
        assert levels == sorted(set(levels), reverse=True)
        assert all(mask > 0 for _, mask in found.levels)
        self.seen[f"{len(levels)} levels"] += 1
        self.seen["matches while a slot is swept"] += bool(levels and self.dropping)

    def check_counts(self) -> None:
        for slot, model in self.models.items():
            if slot in self.dropping:
                assert self.index.block_count(slot) > 0
            else:
                assert self.index.block_count(slot) == len(model.paths)
                assert self.index.is_free(slot) == (not model.paths)
        assert self.index.entry_count == sum(self.index.block_count(slot) for slot in SLOTS)
        distinct = {path for model in self.models.values() for path in model.paths}
        assert self.index.node_count >= len(distinct)
        if not self.dropping:
            assert self.index.node_count == len(distinct)

    def check_no_leftovers(self) -> None:
        """The columns agree with each other, and names, links and roots exist for live blocks."""
        index, names, runs = self.index, self.index._names, self.index._runs
        live = [run for run, length in enumerate(runs.lengths) if length]
        assert sorted({*range(1, len(runs.bodies))} - {*runs.free}) == live
        assert runs.block_count == sum(runs.lengths)
        blocks = {
            run << POSITION_BITS | at: mask
            for run in live
            for at, mask in enumerate(masks(runs.holders[run], runs.lengths[run]))
        }
        assert all(blocks.values()), "each block has a holder"
        assert sorted(names.shared.values()) == sorted({*blocks} - names.unnamed)
        assert names.unnamed <= {*blocks}
        for block in {*blocks} - names.unnamed:
            name = names.shared_name(block)
            assert name is not None
            assert names.find(name) == block
        for slot, own in names.own.items():
            assert own.names
            assert {block: name for name, block in own.blocks.items()} == own.names
            assert all(blocks[block] >> slot & 1 for block in own.names)
        assert sorted(runs.starts.values()) == live
        kids: dict[int, list[int]] = {}
        for run in live:
            above = runs.above[run]
            assert runs.start(runs.sequence(run << POSITION_BITS), above) == run
            if above != ROOT:
                kids.setdefault(above, []).append(run)
                assert not blocks[run << POSITION_BITS] & ~blocks[above], "prefix-closed"
        assert sorted(kids) == sorted(runs.kids)
        for run, fork in runs.forks.items():
            assert {run << POSITION_BITS | at for at in slots_of(fork)} == {
                above for above in kids if above >> POSITION_BITS == run
            }
            assert sorted(runs.kids_from(run, 0)) == sorted(
                kid for above, some in kids.items() if above >> POSITION_BITS == run for kid in some
            )
        roots = {run for run in live if runs.above[run] == ROOT}
        for slot in SLOTS:
            held = {run for run in roots if runs.end(run, 1 << slot)}
            assert index._held_roots(slot) == held
            assert index._root_counts.get(slot, 0) == len(held)
            assert len(index._roots.get(slot, ())) <= 2 * len(held) + 20
        self.seen["own names"] += bool(names.own)
        self.seen["unnamed"] += bool(names.unnamed)
        self.seen["branches"] += bool(runs.forks)
        self.seen["steps"] += any(type(held) is tuple for held in runs.holders)


@pytest.fixture(params=[3, LIMIT], ids=["short runs", "runs"], autouse=True)
def limit(request: pytest.FixtureRequest) -> Iterator[int]:
    """Also with runs so short that most prompts take several; two names may be neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (block_ownership, runs_module):
            patch.setattr(module, "LIMIT", request.param)
        patch.setattr(block_ownership, "_FEW_NAMES", 2)
        yield request.param


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 100))
def test_index_equals_the_model(seed: int, steps: int) -> None:
    history = History(seed, note)
    for _ in range(steps):
        history.step()
    while history.index.sweep(5):
        history.match()
    history.dropping = set()
    history.check_counts()


def test_the_histories_reach_the_rare_states() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        history = History(seed)
        for _ in range(100):
            history.step()
        seen += history.seen
    for state, least in {
        "2 levels": 500,
        "3 levels": 100,
        "4 levels": 20,
        "matches while a slot is swept": 300,
        "own names": 1000,
        "branches": 1000,
        "unnamed": 300,
        "steps": 1000,
        "hidden": 100,
        "unknown": 100,
        "neighbours of a run": 10,
        "swept": 40,
        Fault.UNKNOWN_PARENT: 40,
        Fault.HASH_CONFLICT: 40,
    }.items():
        assert seen[state] >= least, f"{state}: {seen[state]} in {seen}"


class ByName(PrefixIndex):
    """Looks up the names of a removal one by one."""

    __slots__ = ()

    def _names_in_run(self, slot: int, bit: int, block_hashes: Sequence[int]) -> int | None:
        return None


@pytest.mark.parametrize("seed", range(10))
def test_removals_of_neighbours_equal_removals_by_name(seed: int) -> None:
    """Workers with one hash function, which mostly drop the end of a prompt."""
    draw = random.Random(seed)
    quick, plain, single = PrefixIndex(), ByName(), PrefixIndex()
    shared = tuple(range(40))
    prompts = [shared[: draw.randrange(41)] + (100 + n,) * 30 for n in range(8)]
    in_run = 0
    for _ in range(200):
        slot, prompt = draw.choice(SLOTS), draw.choice(prompts)
        names = sequence_hashes(prompt)
        if draw.random() < 0.4:
            assert quick.store(slot, None, names, prompt) == plain.store(slot, None, names, prompt)
            single.store(slot, None, names, prompt)
        else:
            first = draw.randrange(len(names))
            part = names[first : first + draw.choice([2, 4, 8, 70])]
            if draw.random() < 0.7:
                part.reverse()
            if draw.random() < 0.2:
                part[draw.randrange(len(part))] = draw.choice(names)
            in_run += quick._names_in_run(slot, 1 << slot, part) is not None
            assert quick.remove(slot, part) == plain.remove(slot, part)
            for name in part:
                single.remove(slot, [name])
        assert quick.block_count(slot) == plain.block_count(slot) == single.block_count(slot)
        for asked in map(sequence_hashes, prompts):
            assert quick.find_matches(asked) == plain.find_matches(asked)
            assert quick.find_matches(asked) == single.find_matches(asked)
    assert in_run

import pytest

from dynctl.adapters import memory as discovery_memory
from dynctl.adapters.memory import MemoryDiscovery
from dynctl.adapters.ports import Deleted, DiscoveryEntry, Listed, Put


async def test_changes_pile_up_in_order_for_a_reader_that_is_away():
    discovery = MemoryDiscovery()
    changes = discovery.watch()
    assert await anext(changes) == Listed(())
    discovery.put("a", b"1")
    discovery.put("a", b"1")
    discovery.put("a", b"2")
    discovery.delete("a")
    discovery.delete("a")
    seen = [await anext(changes) for _ in range(3)]
    assert seen == [Put(DiscoveryEntry("a", b"1")), Put(DiscoveryEntry("a", b"2")), Deleted("a")]
    await changes.aclose()


async def test_a_reader_that_is_too_far_behind_is_given_a_new_list(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(discovery_memory, "_PENDING", 3)
    discovery = MemoryDiscovery()
    changes = discovery.watch()
    await anext(changes)
    for number in range(10):
        discovery.put("a", b"%d" % number)
    assert await anext(changes) == Listed((DiscoveryEntry("a", b"9"),))
    discovery.put("a", b"end")
    assert await anext(changes) == Put(DiscoveryEntry("a", b"end"))
    await changes.aclose()


async def test_a_closed_one_gives_nothing_more():
    discovery = MemoryDiscovery()
    await discovery.close()
    assert [change async for change in discovery.watch()] == []

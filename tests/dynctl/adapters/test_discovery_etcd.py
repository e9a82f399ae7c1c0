"""Failover, lists and watches of etcd, with sessions that follow a script."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import cast

import pytest

from dynctl.adapters.etcd import discovery as discovery_etcd
from dynctl.adapters.etcd.address import EtcdEndpoint, etcd_access
from dynctl.adapters.etcd.discovery import (
    EtcdCompacted,
    EtcdDiscovery,
    EtcdFailure,
    EtcdTooLarge,
    Page,
    one_line,
    range_end,
)
from dynctl.adapters.ports import Deleted, DiscoveryEntry, Interrupted, Listed, Put
from dynctl.base.errors import Unreachable, UsageProblem


@dataclass
class Script:
    """What the sessions meet, one after the other; the last one for ever."""

    watches: list[list[Put | Deleted | EtcdFailure]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Host -> what it says to everything."""
    store: dict[bytes, bytes] = field(default_factory=dict)
    most: int = 1000
    """Entries that fit into one answer."""
    opened: list[str] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    closed: int = 0
    revision: int = 7


class Session:
    def __init__(self, script: Script, endpoint: EtcdEndpoint) -> None:
        self._script = script
        self._host = endpoint.host

    async def open(self, timeout: float) -> None:
        self._script.opened.append(self._host)
        if self._host in self._script.failures:
            raise EtcdFailure(self._script.failures[self._host])

    async def page(self, key: bytes, end: bytes, limit: int, revision: int, timeout: float) -> Page:
        self._script.limits.append(limit)
        keys = sorted(stored for stored in self._script.store if key <= stored < end)
        if min(limit, len(keys)) > self._script.most:
            raise EtcdTooLarge("larger than max")
        entries = [(stored, self._script.store[stored]) for stored in keys[:limit]]
        return Page(entries, self._script.revision, len(keys) > limit)

    async def watch(
        self, key: bytes, end: bytes, revision: int
    ) -> AsyncGenerator[Put | Deleted, None]:
        assert (key, end, revision) == (b"v1/", b"v10", self._script.revision + 1)
        for change in self._script.watches.pop(0) if self._script.watches else []:
            if isinstance(change, EtcdFailure):
                raise change
            yield change
        await asyncio.sleep(3600)

    async def close(self) -> None:
        self._script.closed += 1


def discovery_of(script: Script, *hosts: str) -> EtcdDiscovery:
    access = etcd_access(hosts or ("one",))
    return EtcdDiscovery(access, lambda endpoint: Session(script, endpoint), b"v1/", "etcd")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_etcd, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(discovery_etcd, "_LONGEST_PAUSE_S", 0.002)


async def test_a_compaction_is_a_new_list_and_no_interruption():
    script = Script(watches=[[Deleted("v1/a"), EtcdCompacted("gone")], [Deleted("v1/b")]])
    discovery = discovery_of(script)
    changes = discovery.watch()
    seen = [await anext(changes) for _ in range(4)]
    assert seen == [Listed(()), Deleted("v1/a"), Listed(()), Deleted("v1/b")]
    assert script.closed == 1
    await changes.aclose()
    assert script.closed == len(script.opened) == 2
    await discovery.close()


async def test_a_failure_closes_the_session_and_goes_on_with_the_next_member():
    script = Script(watches=[[EtcdFailure("broke")]])
    discovery = discovery_of(script, "one", "two")
    changes = discovery.watch()
    assert await anext(changes) == Listed(())
    assert await anext(changes) == Interrupted("etcd at one:2379: broke")
    assert await anext(changes) == Listed(())
    assert script.opened == ["one", "two"]
    await changes.aclose()
    assert script.closed == 2


async def test_an_etcd_that_went_back_gives_processes_time_to_return(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(discovery_etcd, "RETURN_S", 0.2)
    a, b, c = (DiscoveryEntry(f"v1/{name}", b"1") for name in "abc")
    script = Script(store={b"v1/a": b"1", b"v1/b": b"1"})
    script.watches = [
        [Put(c), EtcdFailure("gone")],
        [Put(a), Put(b), Deleted("v1/c"), EtcdFailure("gone")],
        [],
    ]
    discovery = discovery_of(script)
    changes = discovery.watch()
    assert [await anext(changes) for _ in range(2)] == [Listed((a, b)), Put(c)]
    script.store, script.revision = {b"v1/c": b"1"}, 1
    assert await anext(changes) == Interrupted("etcd at one:2379: gone")
    assert "has older data" in cast(Interrupted, await anext(changes)).reason
    assert await anext(changes) == Listed((c, a, b))
    assert await anext(changes) == Deleted("v1/c")
    script.store = {}
    assert await anext(changes) == Interrupted("etcd at one:2379: gone")
    assert "has older data" in cast(Interrupted, await anext(changes)).reason
    assert await asyncio.wait_for(anext(changes), 10) == Listed(()), "none returned in time"
    await changes.aclose()


async def test_one_outage_is_one_interruption():
    script = Script(failures={"one": "down", "two": "down too"})
    discovery = discovery_of(script, "one", "two")
    changes = discovery.watch()
    assert await anext(changes) == Interrupted("one:2379: down; two:2379: down too")
    waiting = asyncio.ensure_future(anext(changes))
    for _ in range(5000):
        if len(script.opened) >= 8:
            break
        await asyncio.sleep(0.001)
    assert len(script.opened) >= 8
    assert not waiting.done()
    script.failures.clear()
    assert await waiting == Listed(())
    await changes.aclose()
    await discovery.close()


async def test_an_answer_that_is_too_large_is_asked_for_in_smaller_pages():
    store = {b"v1/%03d" % number: b"{}" for number in range(100)}
    script = Script(store=store, most=40)
    listed = await discovery_of(script).list()
    assert [entry.key.encode() for entry in listed.entries] == sorted(store)
    assert script.limits == [500, 31, 31, 31, 31]


async def test_one_entry_that_is_too_large_says_so():
    script = Script(store={b"v1/a": b"{}"}, most=0)
    with pytest.raises(Unreachable, match="larger than max"):
        await discovery_of(script).list()
    assert script.closed == 1


async def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery_etcd, "MAX_BYTES", 100)
    script = Script(store={b"v1/a": b"x" * 60, b"v1/b": b"x" * 60})
    with pytest.raises(Unreachable, match="more than 100 bytes"):
        await discovery_of(script).list()


async def test_keys_that_are_no_text_are_still_listed():
    script = Script(store={b"v1/\xff": b"{}"})
    assert await discovery_of(script).list() == Listed((DiscoveryEntry("v1/\\xff", b"{}"),))


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"v1/", b"v10"), (b"a\xff", b"b"), (b"\xff", b"\0"), (b"", b"\0")]
)
def test_range_end(prefix: bytes, end: bytes):
    assert range_end(prefix) == end


def test_what_a_server_says_cannot_move_the_cursor():
    assert one_line("a\nb\x1b[2J" + "c" * 500) == "a b?[2J" + "c" * 193


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://etcd-0:2379,https://etcd-1:2380/", "etcd-0:2379, https://etcd-1:2380"),
        ("etcd-0", "etcd-0:2379"),
        ("10.0.0.1:1 , 10.0.0.1:1,", "10.0.0.1:1"),
        ("http://[::1]:2379", "[::1]:2379"),
        ("HTTPS://E:1", "https://e:1"),
    ],
)
def test_endpoints(text: str, shown: str):
    assert str(etcd_access([text])) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "ftp://a:1",
        "http://",
        "a:b",
        "a:99999",
        "a:0",
        "http://a/path",
        "a b",
        "a:1?x",
        "[::1",
    ],
)
def test_endpoints_that_cannot_be_used(text: str):
    with pytest.raises(UsageProblem) as caught:
        etcd_access([text])
    assert "ETCD_ENDPOINTS" in caught.value.hint


def test_a_password_in_an_endpoint_is_not_repeated():
    with pytest.raises(UsageProblem) as caught:
        etcd_access(["http://root:s3cret@etcd:2379"])
    assert "s3cret" not in caught.value.message + caught.value.hint
    assert "ETCD_AUTH_PASSWORD" in caught.value.hint


def test_credentials_are_not_in_the_repr():
    access = etcd_access(["a"], user="observer", password="s3cret")
    assert "s3cret" not in repr(access)


def test_a_user_needs_a_password():
    with pytest.raises(UsageProblem) as caught:
        etcd_access(["a"], user="observer")
    assert "ETCD_AUTH_PASSWORD" in caught.value.hint


def test_a_certificate_without_a_scheme_means_tls():
    broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    with pytest.raises(UsageProblem, match="invalid certificates"):
        etcd_access(["a"], ca=broken)

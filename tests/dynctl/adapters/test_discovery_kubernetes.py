"""Kubernetes discovery: which workers are there, and how it is followed through trouble."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynctl.adapters.dynamo.planes import open_planes
from dynctl.adapters.kubernetes.discovery import KubernetesDiscovery
from dynctl.adapters.ports import Deleted, DiscoveryChange, DiscoveryEntry, Interrupted, Listed, Put
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from tests.dynctl.adapters.kube_lab import (
    DEFINITION,
    METADATA,
    NAMESPACE,
    bind,
    endpoint,
    endpoint_slice,
    metadata,
    opened,
    rule,
)
from tests.kube.api_server import ApiServer
from tests.waiting import patience

WORKERS = f"{METADATA}/namespaces/{NAMESPACE}/dynamoworkermetadatas"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        running.store.create(DEFINITION)
        yield running


def data(number: int, text: str = "x") -> dict[str, Any]:
    """What worker ``number`` registers."""
    return {
        "endpoints": {f"ns/backend/generate/{number:x}": {"instance_id": number, "text": text}},
        "model_cards": {f"ns/backend/generate/{number:x}": {"card": number}},
        "event_channels": {},
        "unknown": {"a": 1},
    }


def instance(number: int) -> str:
    return f"v1/instances/ns/backend/generate/{number:x}"


def card(number: int) -> str:
    return f"v1/mdc/ns/backend/generate/{number:x}"


def worker(server: ApiServer, number: int, *, ready: bool = True, **values: Any) -> None:
    """A pod ``w-N`` with an EndpointSlice of its own and metadata."""
    server.store.create(
        endpoint_slice(f"s-{number}", [endpoint(f"w-{number}", f"uid-{number}", ready=ready)])
    )
    server.store.create(metadata(f"w-{number}", data(number), uid=f"uid-{number}", **values))


OTHER = "other"


def twin(server: ApiServer, number: int) -> None:
    """A pod of the same name in another namespace, which registers the same keys."""
    server.store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OTHER}})
    for body in (
        endpoint_slice(f"s-{number}", [endpoint(f"w-{number}", "uid-x", ready=True)]),
        metadata(f"w-{number}", data(number, "y"), uid="uid-x"),
    ):
        text = json.dumps(body).replace(f'"namespace": "{NAMESPACE}"', f'"namespace": "{OTHER}"')
        server.store.create(json.loads(text))


@asynccontextmanager
async def discovering(
    server: ApiServer, folder: Path, namespace: str | None = NAMESPACE, **values: Any
) -> AsyncIterator[KubernetesDiscovery]:
    before = set(threading.enumerate())
    one = KubernetesDiscovery(opened(server, folder, **values), namespace, debounce_s=0.05)
    try:
        yield one
    finally:
        await one.close()
    left = {thread for thread in threading.enumerate() if thread.name.startswith("dynctl")}
    assert left <= before


@asynccontextmanager
async def watching(
    server: ApiServer, folder: Path, **values: Any
) -> AsyncIterator[Callable[[], Awaitable[DiscoveryChange]]]:
    """The next change, on demand."""
    async with discovering(server, folder, **values) as discovery:
        changes = discovery.watch()

        async def following() -> DiscoveryChange:
            return await asyncio.wait_for(anext(changes), patience(20))

        yield following
        await changes.aclose()


def keys(change: DiscoveryChange) -> set[str]:
    assert isinstance(change, Listed)
    return {entry.key for entry in change.entries}


async def listed(server: ApiServer, folder: Path) -> set[str]:
    async with discovering(server, folder) as discovery:
        return keys(await discovery.list())


# -- who is there --------------------------------------------------------------------------------


async def test_a_ready_worker_and_all_that_it_registered(server: ApiServer, tmp_path: Path):
    worker(server, 255)
    async with discovering(server, tmp_path) as discovery:
        found = {entry.key: json.loads(entry.value) for entry in (await discovery.list()).entries}
    assert found == {
        "v1/instances/ns/backend/generate/ff": {"instance_id": 255, "text": "x"},
        "v1/mdc/ns/backend/generate/ff": {"card": 255},
    }


async def test_metadata_without_a_ready_pod_is_left_out(server: ApiServer, tmp_path: Path):
    worker(server, 1)
    worker(server, 2, ready=False)
    server.store.create(metadata("w-3", data(3), uid="uid-3"))
    hidden = endpoint_slice("hidden", [endpoint("w-3", "uid-3")], enabled=False)
    server.store.create(hidden)
    assert await listed(server, tmp_path) == {instance(1), card(1)}


async def test_a_pod_is_ready_where_nothing_else_is_said(server: ApiServer, tmp_path: Path):
    server.store.create(endpoint_slice("s", [endpoint("w-1", "uid-1", ready=None)]))
    server.store.create(metadata("w-1", data(1), uid="uid-1"))
    assert instance(1) in await listed(server, tmp_path)


@pytest.mark.parametrize(
    ("of_slice", "of_metadata", "there"),
    [("a", "a", True), ("a", "b", False), ("", "b", True), ("a", "", True), ("", "", True)],
)
async def test_a_recreated_pod_does_not_inherit(
    server: ApiServer, tmp_path: Path, of_slice: str, of_metadata: str, there: bool
):
    server.store.create(endpoint_slice("s", [endpoint("w-1", of_slice)]))
    server.store.create(metadata("w-1", data(1), uid=of_metadata))
    assert (instance(1) in await listed(server, tmp_path)) is there


async def test_one_of_several_slices_is_enough(server: ApiServer, tmp_path: Path):
    """A pod stands in a slice a Service and an address family."""
    worker(server, 1)
    server.store.create(endpoint_slice("other", [endpoint("w-1", "uid-1", ready=False)]))
    assert instance(1) in await listed(server, tmp_path)


async def test_containers_of_a_pod_each_have_metadata(server: ApiServer, tmp_path: Path):
    worker(server, 1)
    server.store.create(metadata("w-1-engine-0", data(2), owner="w-1", uid="uid-1"))
    assert {instance(1), instance(2)} <= await listed(server, tmp_path)


async def test_one_namespace_or_all(server: ApiServer, tmp_path: Path):
    worker(server, 1)
    other = endpoint("w-2", "uid-2") | {
        "targetRef": {"kind": "Pod", "namespace": "far", "name": "w-2", "uid": "uid-2"}
    }
    server.store.create(endpoint_slice("s", [other], namespace="far"))
    server.store.create(metadata("w-2", data(2), uid="uid-2", namespace="far"))
    # Of the same name as a ready pod elsewhere, and not ready itself.
    server.store.create(metadata("w-1", data(3), namespace="far"))
    assert await listed(server, tmp_path) == {instance(1), card(1)}
    async with discovering(server, tmp_path, None) as discovery:
        assert "all namespaces" in discovery.title
        assert keys(await discovery.list()) == {instance(1), card(1), instance(2), card(2)}


async def test_more_workers_than_a_page(server: ApiServer, tmp_path: Path):
    for number in range(230):
        worker(server, number)
    server.faults.expire_continue(WORKERS)
    assert len(await listed(server, tmp_path)) == 460


async def test_metadata_of_another_shape_does_no_harm(server: ApiServer, tmp_path: Path):
    worker(server, 1)
    for number, spec in enumerate([{}, {"data": []}, {"data": {"endpoints": 3}}, []]):
        body = metadata(f"odd-{number}", {}) | {"spec": spec}
        server.store.create(body)
        server.store.create(endpoint_slice(f"odd-{number}", [endpoint(f"odd-{number}")]))
    server.store.create(endpoint_slice("odd", [{"addresses": ["x"]}]))
    assert await listed(server, tmp_path) == {instance(1), card(1)}


async def test_the_title_tells_cluster_and_namespace(server: ApiServer, tmp_path: Path):
    async with discovering(server, tmp_path, context="west") as discovery:
        assert discovery.title == f"kubernetes west ({server.url}), namespace {NAMESPACE}"


# -- what does not let us look -------------------------------------------------------------------


async def test_without_the_definition(tmp_path: Path):
    with ApiServer() as server:
        async with discovering(server, tmp_path) as discovery:
            with pytest.raises(Unreachable) as caught:
                await discovery.list()
    assert "does not serve dynamoworkermetadatas (nvidia.com/v1alpha1)" in caught.value.message
    assert "CRDs" in caught.value.hint


async def test_without_the_right_the_missing_rule_is_told(tmp_path: Path):
    with ApiServer(rbac=True) as server:
        server.store.create(DEFINITION)
        server.add_user("poor-token", "poor")
        bind(server, "poor", rule("nvidia.com", "dynamoworkermetadatas", "get list watch"))
        async with discovering(server, tmp_path, token="poor-token") as discovery:
            with pytest.raises(Unreachable) as caught:
                await discovery.list()
            changes = discovery.watch()
            values = await asyncio.wait_for(anext(changes), patience(20))
            await changes.aclose()
    assert "not allowed to list endpointslices in namespace lab" in caught.value.message
    assert "apiGroups: [discovery.k8s.io], resources: [endpointslices]" in caught.value.hint
    assert "verbs: [get, list, watch]" in caught.value.hint
    assert isinstance(values, Interrupted)
    assert "not allowed to list endpointslices" in values.reason


async def test_with_an_expired_token(tmp_path: Path):
    with ApiServer(rbac=True) as server:
        async with discovering(server, tmp_path, token="old") as discovery:
            with pytest.raises(Unreachable, match="does not accept the credentials"):
                await discovery.list()


# -- following -----------------------------------------------------------------------------------


def wanted(change: DiscoveryChange) -> dict[str, str]:
    match change:
        case Put(DiscoveryEntry(key, value)):
            return {key: json.loads(value).get("text", "")}
        case Deleted(key):
            return {key: "gone"}
        case _:
            raise AssertionError(change)


async def test_a_worker_comes_changes_and_goes(server: ApiServer, tmp_path: Path):
    async with watching(server, tmp_path) as following:
        assert keys(await following()) == set()
        worker(server, 1)
        assert wanted(await following()) | wanted(await following()) == {
            instance(1): "x",
            card(1): "",
        }
        patch = {"spec": {"data": data(1, "changed")}}
        server.store.patch_merge("dynamoworkermetadatas", "w-1", patch, NAMESPACE)
        assert wanted(await following()) == {instance(1): "changed"}
        server.store.delete("dynamoworkermetadatas", "w-1", NAMESPACE)
        assert wanted(await following()) | wanted(await following()) == {
            instance(1): "gone",
            card(1): "gone",
        }


async def test_readiness_alone_brings_and_takes_a_worker(server: ApiServer, tmp_path: Path):
    worker(server, 1, ready=False)
    async with watching(server, tmp_path) as following:
        assert keys(await following()) == set()
        for ready, values in ((True, {instance(1): "x", card(1): ""}), (False, None)):
            body = server.store.get("endpointslices", "s-1", NAMESPACE)
            body["endpoints"] = [endpoint("w-1", "uid-1", ready=ready)]
            server.store.update(body)
            seen = {**wanted(await following()), **wanted(await following())}
            assert seen == (values or {instance(1): "gone", card(1): "gone"})


async def test_a_burst_is_told_once(server: ApiServer, tmp_path: Path):
    worker(server, 1)
    async with watching(server, tmp_path) as following:
        await following()
        for number in range(20):
            patch = {"spec": {"data": data(1, str(number))}}
            server.store.patch_merge("dynamoworkermetadatas", "w-1", patch, NAMESPACE)
        seen = [await following()]
        while wanted(seen[-1]) != {instance(1): "19"}:
            seen.append(await following())
        assert len(seen) < 20


async def test_a_version_that_is_too_old_lists_again_and_tells_only_differences(
    server: ApiServer, tmp_path: Path
):
    worker(server, 1)
    server.faults.expire_watch(WORKERS, times=2)
    async with watching(server, tmp_path) as following:
        assert keys(await following()) == {instance(1), card(1)}
        worker(server, 2)
        assert wanted(await following()) | wanted(await following()) == {
            instance(2): "x",
            card(2): "",
        }


async def test_a_cut_watch_interrupts_and_is_listed_anew(server: ApiServer, tmp_path: Path):
    worker(server, 1)
    async with watching(server, tmp_path) as following:
        await following()
        await asyncio.to_thread(until_watched, server)
        refused = server.faults.answer(WORKERS, 503)
        server.faults.cut_watches()
        values = await following()
        assert isinstance(values, Interrupted)
        worker(server, 2)
        server.faults.remove(refused)
        assert keys(await following()) == {instance(1), card(1), instance(2), card(2)}
        worker(server, 3)
        assert set(wanted(await following())) <= {instance(3), card(3)}


def until_watched(server: ApiServer) -> None:
    """Both watches run; only their requests show that."""
    ticks = threading.Event()
    for _ in range(1000):
        watched = {one.path for one in list(server.requests) if one.query.get("watch")}
        if watched == {WORKERS, SLICES}:
            return
        ticks.wait(0.01)
    raise AssertionError("no watch runs")


async def test_a_cluster_that_is_away_at_first(tmp_path: Path):
    with ApiServer() as server:
        server.store.create(DEFINITION)
        worker(server, 1)
        refused = server.faults.answer("", 500, message="not yet")
        async with watching(server, tmp_path) as following:
            values = await following()
            assert isinstance(values, Interrupted)
            assert "not yet" in values.reason
            server.faults.remove(refused)
            assert keys(await following()) == {instance(1), card(1)}


async def test_a_late_reader_gets_a_list_of_its_own(server: ApiServer, tmp_path: Path):
    worker(server, 1)
    async with discovering(server, tmp_path) as discovery:
        first = discovery.watch()
        assert keys(await anext(first)) == {instance(1), card(1)}
        second = discovery.watch()
        assert keys(await asyncio.wait_for(anext(second), patience(10))) == {instance(1), card(1)}
        watches = [one for one in server.requests if one.query.get("watch")]
        assert len(watches) <= 2
        await first.aclose()
        await second.aclose()


async def test_close_ends_waiting_readers_at_once(server: ApiServer, tmp_path: Path):
    async with discovering(server, tmp_path) as discovery:
        changes = discovery.watch()
        assert await anext(changes) == Listed(())
        await asyncio.to_thread(until_watched, server)

        async def rest() -> list[DiscoveryChange]:
            return [one async for one in changes]

        waiting = asyncio.ensure_future(rest())
        await asyncio.sleep(0)
        await discovery.close()
        assert await asyncio.wait_for(waiting, patience(10)) == []
        with pytest.raises(Unreachable):
            await discovery.list()


# -- by its name ---------------------------------------------------------------------------------


async def test_it_is_opened_by_option_and_by_dynamos_variable(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    worker(server, 1)
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", namespace="far")
    planes = open_planes(
        GlobalOptions(discovery="kubernetes", kubeconfig=kubeconfig, namespace=NAMESPACE)
    )
    assert keys(await planes.discovery.list()) == {instance(1), card(1)}
    await planes.discovery.close()
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "kubernetes")
    for options, title in (
        (GlobalOptions(kubeconfig=kubeconfig), "namespace far"),
        (GlobalOptions(kubeconfig=kubeconfig, all_namespaces=True), "all namespaces"),
    ):
        planes = open_planes(options)
        assert planes.title.endswith(title)
        await planes.discovery.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (GlobalOptions(namespace="a", all_namespaces=True), "-n a and -A"),
        (GlobalOptions(namespace="../nodes"), "not a namespace name"),
        (GlobalOptions(namespace=""), "not a namespace name"),
        (GlobalOptions(kube_context="absent"), "defined: test"),
    ],
)
async def test_options_that_cannot_be_used(
    server: ApiServer, tmp_path: Path, options: GlobalOptions, words: str
):
    from dataclasses import replace

    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
    with pytest.raises(UsageProblem) as caught:
        open_planes(replace(options, discovery="kubernetes", kubeconfig=kubeconfig))
    assert words in f"{caught.value.message} {caught.value.hint}"


async def test_one_key_in_two_namespaces_is_refused(server: ApiServer, tmp_path: Path) -> None:
    """One of the two workers would be lost without a word."""
    worker(server, 1)
    async with discovering(server, tmp_path, None) as discovery:
        assert len((await discovery.list()).entries) == 2
        twin(server, 1)
        with pytest.raises(Unreachable, match=f"namespaces {NAMESPACE} and {OTHER} register"):
            await discovery.list()
        changes = discovery.watch()
        async with asyncio.timeout(patience(10)):
            change = await anext(changes)
        assert isinstance(change, Interrupted)
        assert "register the same key" in change.reason
        await changes.aclose()
    async with discovering(server, tmp_path) as discovery:
        assert len((await discovery.list()).entries) == 2

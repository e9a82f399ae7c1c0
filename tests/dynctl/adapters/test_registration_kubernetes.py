"""Registration of a pod in a cluster, with the permissions of the manifest and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynctl.adapters.dynamo.planes import expect_registrar
from dynctl.adapters.kubernetes.registration import own_pod
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.wire.dynamo.discovery import EndpointId, encode_entry, instance_of
from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.dynctl.adapters.kube_lab import NAMESPACE
from tests.dynctl.adapters.kube_pods import KIND, PodLab, serving_cluster
from tests.kube.api_server import ApiServer
from tests.waiting import patience, until

AT = EndpointId("dynamo", "backend", "generate")
ID = instance_id("worker-0")


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with serving_cluster() as running:
        yield running


@pytest.fixture
def lab(server: ApiServer, tmp_path: Path) -> Iterator[PodLab]:
    made = PodLab(server, tmp_path)
    yield made
    made.close()


def entry(name: str = "generate", port: int = 1) -> tuple[str, bytes]:
    return encode_entry(instance_of(AT._replace(name=name), ID, f"127.0.0.1:{port}"))


async def test_a_pod_registers_with_the_permissions_of_the_manifest(lab: PodLab):
    """Frontends read it while the pod is ready; it goes with the lease, and with the pod."""
    registrar = lab.registrar()
    lease = await registrar.grant()
    assert lease.id == ID
    for name in ("generate", "other"):
        await lease.put(*entry(name))
    [body] = lab.objects()
    [owner] = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Pod", lab.pod.uid, False)
    assert set(body["spec"]["data"]) == {
        "endpoints", "model_cards", "event_channels", "event_sources",
    }  # fmt: skip
    assert body["metadata"]["managedFields"][0]["manager"] == "dynamo-worker"
    assert await lab.keys() == []  # the pod is not ready yet
    lab.ready()
    assert await lab.keys() == sorted([entry()[0], entry("other")[0]])
    await lease.delete(entry("other")[0])
    assert await lab.keys() == [entry()[0]]
    await registrar.close()
    assert lab.objects() == []

    again = await registrar.grant()
    await again.put(*entry())
    lab.server.store.delete("Pod", lab.pod.name, NAMESPACE)
    await until(lambda: lab.objects() == [])
    await registrar.close()


async def test_an_object_that_another_process_removes_comes_back(lab: PodLab):
    registrar = lab.registrar(again_s=0.05)
    lease = await registrar.grant()
    await lease.put(*entry())
    lab.server.store.delete(KIND, lab.pod.name, NAMESPACE)
    await until(lambda: len(lab.objects()) == 1)
    await registrar.close()
    assert lab.objects() == []


async def test_without_the_permissions_the_error_names_them(lab: PodLab):
    with pytest.raises(Unreachable, match="forbidden") as caught:
        await lab.registrar("other").grant()
    assert "list, create, patch and delete of dynamoworkermetadatas" in str(caught.value.hint)


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    made = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with made:
        yield int(made.sockets[0].getsockname()[1])


async def test_one_process_of_a_pod_registers(lab: PodLab):
    """A second one waits while the first listens, and takes over what a killed one has left."""
    async with listening() as port:
        first = lab.registrar()
        await (await first.grant()).put(*entry(port=port))
        second = lab.registrar()
        with pytest.raises(Unreachable, match=f"listens at 127.0.0.1:{port}"):
            await second.grant()
        # Its own addresses do not hold it up, such as after a removal that did not arrive.
        await (await first.grant()).put(*entry(port=port))
    lease = await second.grant()
    await lease.put(*entry("other"))
    [body] = lab.objects()
    assert [one["endpoint"] for one in body["spec"]["data"]["endpoints"].values()] == ["other"]
    await second.close()
    await first.close()
    assert lab.objects() == []


async def test_a_removal_waits_for_an_apply_that_was_cancelled(lab: PodLab):
    """Else the apply arrives behind it, and the object stays."""
    registrar = lab.registrar()
    lease = await registrar.grant()
    began, go_on = asyncio.Event(), asyncio.Event()
    loop, apply = asyncio.get_running_loop(), lease._writer.apply

    def slow(*words: Any, **more: Any) -> Any:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(patience(20))
        return apply(*words, **more)

    lease._writer.apply = slow  # type: ignore[method-assign]
    putting = asyncio.create_task(lease.put(*entry()))
    await began.wait()
    putting.cancel()
    await asyncio.wait([putting])
    closing = asyncio.create_task(registrar.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert lab.objects() == []


POD = {"POD_NAME": "worker-0", "POD_UID": "u", "POD_NAMESPACE": "prod"}


def test_the_own_pod_is_named_by_the_variables_of_dynamos_workers():
    assert own_pod(POD, "default").object_name == "worker-0"
    assert own_pod({**POD, "POD_NAMESPACE": ""}, "default").namespace == "default"
    mode = {"DYN_KUBE_DISCOVERY_MODE": "container"}
    assert own_pod({**POD, **mode, "CONTAINER_NAME": "main"}, "").object_name == "worker-0"
    sidecar = own_pod({**POD, **mode, "CONTAINER_NAME": "engine-0"}, "")
    assert instance_id(sidecar.object_name) == 8051026481054291  # as Dynamo 1.6.1


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "POD_NAME and POD_UID are not set"),
        ({"POD_NAME": "a"}, "POD_UID is not set"),
        ({**POD, "DYN_KUBE_DISCOVERY_MODE": "container"}, "CONTAINER_NAME is not set"),
        ({**POD, "DYN_KUBE_DISCOVERY_MODE": "node"}, "expected pod or container"),
    ],
)
def test_outside_a_pod_the_refusal_names_what_is_missing(
    variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
):
    for name in (*POD, "DYN_KUBE_DISCOVERY_MODE", "CONTAINER_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageProblem, match=named):
        expect_registrar(GlobalOptions(discovery="kubernetes"))

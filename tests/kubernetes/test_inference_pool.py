"""`serve epp --pool` on a real API server, with the published definition of InferencePools.

The picker has the rights of its manifest. Pods are objects without a node; their engines are
processes of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
import yaml

from dynctl.base.options import GlobalOptions
from dynctl.serving.routing.config import PickerConfig, PoolConfig
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import start_engine
from tests.dynctl.serving.fleets import QUICK_ENGINE, TOKENIZER, chat_body
from tests.dynctl.serving.gateways import Gateway, gateway, set_headers
from tests.kube.client import Api, ApiError
from tests.kube.objects import Json, small
from tests.kube.test_inference_pool import DOMAINS, pool
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.manifests import account_token, apply_accounts
from tests.kubernetes.objects import create, has_condition, namespace_of, path_of
from tests.waiting import until

POOLS: Final = os.environ.get("DYNCTL_INFERENCE_POOLS", "")
"""Read when imported: the environment of tests is emptied."""
SPACE: Final = "inference"
PATH: Final = f"/apis/inference.networking.k8s.io/v1/namespaces/{SPACE}/inferencepools"


def install_pools(plane: ControlPlane) -> None:
    """The definition of InferencePools."""
    if not Path(POOLS).is_file():
        pytest.skip("the definition of InferencePools could not be fetched")
    definition = yaml.safe_load(Path(POOLS).read_text())
    path = path_of("CustomResourceDefinition", "", definition["metadata"]["name"])
    with plane.api() as api:
        create(api, definition)
        plane.wait(lambda: has_condition(api.get(path), "Established"), path)


@pytest.fixture(scope="module")
def space(control_plane: ControlPlane) -> Iterator[Api]:
    install_pools(control_plane)
    with control_plane.api() as api:
        create(api, namespace_of(SPACE))
        create(api, account("default"))
        apply_accounts(api, SPACE)
        yield api


def account(name: str) -> Json:
    metadata = {"name": name, "namespace": SPACE}
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}


def add_pod(api: Api, name: str, zone: str) -> None:
    """A pod of the pool that is Ready, at the loopback address, and that no node gets: a kubelet
    would report another status."""
    body = small.pod(name, SPACE, "", app="llama", **{DOMAINS["zone"]: zone})
    body["spec"].pop("nodeName", None)
    body["spec"]["schedulerName"] = "none"
    body["metadata"].pop("uid", None)
    create(api, body)
    set_ready(api, name, ready=True)


def set_ready(api: Api, name: str, *, ready: bool) -> None:
    status = small.running(small.pod(name, SPACE, ""), ready=ready, ip="127.0.0.1")["status"]
    api.patch(f"{path_of('Pod', SPACE, name)}/status", {"status": status})


def names(site: Gateway) -> set[str]:
    return {worker.name for worker in site.service.router.registry}


async def test_the_picker_follows_a_pool_and_its_pods(
    control_plane: ControlPlane, space: Api
) -> None:
    token = account_token(space, "dynctl-epp", SPACE)
    options = GlobalOptions(kubeconfig=control_plane.kubeconfig(token, SPACE), namespace=SPACE)
    config = PoolConfig(options, "llama", domains=DOMAINS)
    engine = await start_engine(EngineConfig(**{**QUICK_ENGINE, "name": "e0"}), TOKENIZER)
    port = int(engine.url.rpartition(":")[2])
    try:
        create_pool(space, port)
        add_pod(space, "vllm-0", "us-east-1a")
        given = PickerConfig(port=0, health_port=0, tls=False, pool=config)
        async with gateway([], picker=given) as site:
            assert names(site) == {"vllm-0"}
            worker = site.service.router.registry.by_name("vllm-0")
            assert dict(worker.domains) == {"zone": "us-east-1a"}
            answer = await site.request().ask(chat_body("hello"))
            assert set_headers(answer)["x-gateway-destination-endpoint"] == f"127.0.0.1:{port}"
            add_pod(space, "vllm-1", "us-east-1b")
            await until(lambda: names(site) == {"vllm-0", "vllm-1"})
            set_ready(space, "vllm-0", ready=False)
            await until(lambda: names(site) == {"vllm-1"})
            space.patch(f"{PATH}/llama", {"spec": {"selector": {"matchLabels": {"app": "x"}}}})
            await until(lambda: names(site) == set())
            status, _ = await site.request().refused(chat_body("hello"))
            assert status == 503
    finally:
        await engine.close()
        # A second try of this test begins without them.
        for path in (f"{PATH}/llama", *(path_of("Pod", SPACE, f"vllm-{n}") for n in (0, 1))):
            with suppress(ApiError):
                space.delete(path, gracePeriodSeconds=0)


def create_pool(api: Api, port: int) -> None:
    body = pool([port])
    body["metadata"]["namespace"] = SPACE
    api.create(PATH, body)

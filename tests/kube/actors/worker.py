"""The writes of worker processes to the API server: each registers once, when it serves."""

from __future__ import annotations

from collections.abc import Callable

from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.kube import objects
from tests.kube.actors.acting import Clock, Hands, message_of
from tests.kube.actors.kubelet import Kubelet, Sandbox
from tests.kube.actors.process import Process, State
from tests.kube.client import ApiError
from tests.kube.deployment import card_config, env_of, role_of
from tests.kube.objects import Json, logs

Published = Callable[[Json], Json | None]
"""What becomes of a worker's metadata before it is written; None writes nothing."""


class Workers:
    """``hands`` gives those of a namespace's service account. ``publish``: pod name -> how.

    ``publish_all`` is for pods that ``publish`` does not name. Pods whose discovery is not
    Kubernetes register in ``elsewhere``: by pod, the metadata that they would have written.
    """

    def __init__(self, kubelet: Kubelet, hands: Callable[[str, str], Hands], clock: Clock) -> None:
        self.publish: dict[str, Published] = {}
        self.publish_all: Published = as_it_is
        self.elsewhere: dict[tuple[str, str], Json] = {}
        self._kubelet, self._hands, self._clock = kubelet, hands, clock

    def due(self) -> float | None:
        return None

    def step(self) -> bool:
        did = False
        for one in self._kubelet.sandboxes.values():
            process = one.process
            if process is None or process.registered or process.state is not State.SERVING:
                continue
            if one.reported is None or "podIP" not in one.reported:
                continue
            self._register(one, process)
            did = True
        return did

    def _register(self, one: Sandbox, process: Process) -> None:
        process.registered = True
        labels = one.pod["metadata"]["labels"]
        if labels.get("leaderworkerset.sigs.k8s.io/worker-index", "0") != "0":
            return
        if labels.get("grove.io/podclique", "").endswith("-wkr"):
            return
        name = one.pod["metadata"]["name"]
        body = self.publish.get(name, self.publish_all)(_metadata(one, process))
        if body is None:
            return
        key = objects.key_of(one.pod)
        if env_of(one.pod).get("DYN_DISCOVERY_BACKEND") != "kubernetes":
            self.elsewhere[key] = body
            process.log += logs.registered(self._clock.now)
            return
        account = one.pod["spec"].get("serviceAccountName", "default")
        try:
            self._hands(key[0], account).apply(body, manager="dynamo-worker")
        except ApiError as refused:
            process.refused = True
            process.log += logs.not_persisted(self._clock.now, key, message_of(refused))
        else:
            process.log += logs.registered(self._clock.now)


def _metadata(one: Sandbox, process: Process) -> Json:
    config = process.config or {}
    pod = {**one.pod, "status": {**one.pod["status"], "podIP": one.ip}}
    return objects.worker_metadata(
        pod,
        role_of(pod),
        domains=config.get("topology_domains"),
        transfer_domain=config.get("kv_transfer_domain"),
        enforcement=config.get("kv_transfer_enforcement", "required"),
        weight=config.get("kv_transfer_preferred_weight"),
    )


# -- ways to publish -------------------------------------------------------------------------------


def as_it_is(body: Json) -> Json | None:
    """As Dynamo 1.6 does it."""
    return body


def nothing(body: Json) -> Json | None:
    """A worker that never registers."""
    return None


def without_card(body: Json) -> Json | None:
    """A worker that serves its endpoints and failed to register its model."""
    body["spec"]["data"]["model_cards"] = {}
    return body


def without_topology(body: Json) -> Json | None:
    """A runtime without topology support: before 1.2, or a sidecar."""
    config = card_config(body)
    for name in [*config]:
        if name == "topology_domains" or name.startswith("kv_transfer_"):
            del config[name]
    config.pop("taints", None)
    return body


def without_taints(body: Json) -> Json | None:
    """A runtime that publishes domains and derives no taints."""
    card_config(body)["taints"] = []
    return body


def with_config(**fields: object) -> Published:
    """Other fields of the card's runtime_config; None removes one."""

    def publish(body: Json) -> Json | None:
        config = card_config(body)
        config.update(fields)
        for name in [name for name, value in fields.items() if value is None]:
            del config[name]
        return body

    return publish


def with_wrong_id(body: Json) -> Json | None:
    """A runtime that hashes the name in another way: every id is one more."""
    number = instance_id(body["metadata"]["name"])
    data = body["spec"]["data"]
    for bucket in ("endpoints", "model_cards"):
        data[bucket] = {
            key.rpartition("/")[0] + f"/{number + 1:x}": {**value, "instance_id": number + 1}
            for key, value in data[bucket].items()
        }
    return body

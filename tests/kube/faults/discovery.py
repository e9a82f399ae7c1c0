"""Faults of discovery: backends, slices, accounts, metadata, routers."""

from __future__ import annotations

from dynctl.wire.kubernetes.names import DISCOVERY_BACKEND_LABEL
from tests.kube import objects
from tests.kube.actors import Simulation
from tests.kube.actors.worker import nothing, with_wrong_id, without_card
from tests.kube.faults.fault import DECODE, Fault, main_of, spoil_pod, then_settle
from tests.kube.objects import Json

_BINDING = "my-llm-k8s-service-discovery-rolebinding"


def _in_etcd(body: Json) -> Json:
    for one in main_of(body)["env"]:
        if one["name"] == "DYN_DISCOVERY_BACKEND":
            one["value"] = "etcd"
    return body


def _no_backend(body: Json) -> Json:
    main = main_of(body)
    main["env"] = [one for one in main["env"] if one["name"] != "DYN_DISCOVERY_BACKEND"]
    del body["metadata"]["labels"][DISCOVERY_BACKEND_LABEL]
    return body


def _unready(sim: Simulation) -> None:
    sim.kubelet.unready = {DECODE}


def _ignored(sim: Simulation) -> None:
    sim.slices.ignores = {DECODE}


def _stale_slice(sim: Simulation) -> None:
    sim.slices.on = False
    sim.recreate(DECODE)


def _unbound(sim: Simulation) -> None:
    sim.store.delete("RoleBinding", _BINDING, "prod")
    sim.recreate(DECODE)


def _unregistered(sim: Simulation) -> None:
    sim.workers.publish[DECODE] = nothing
    sim.recreate(DECODE)


def _cardless(sim: Simulation) -> None:
    sim.workers.publish[DECODE] = without_card
    sim.recreate(DECODE)


def _earlier_life(sim: Simulation) -> None:
    owners = sim.store.get("dwm", DECODE, "prod")["metadata"]["ownerReferences"]
    owners[0]["uid"] = objects.uid_of("Pod", "prod", DECODE, 1)
    sim.edit("dwm", DECODE, {"metadata": {"ownerReferences": owners}})


def _orphan(sim: Simulation) -> None:
    name = "my-llm-decode-a-7"
    gone = sim.pod(DECODE)
    gone["metadata"] |= {"name": name, "uid": objects.uid_of("Pod", "prod", name)}
    sim.store.create(objects.worker_metadata(gone, "decode", domains={"zone": "us-east-1a"}))


def _other_id(sim: Simulation) -> None:
    sim.workers.publish[DECODE] = with_wrong_id
    sim.recreate(DECODE)


def _missed(sim: Simulation) -> None:
    sim.frontends.misses["my-llm-frontend-0"] = {DECODE}


DISCOVERY_FAULTS = (
    Fault(
        "worker-in-another-backend",
        "DYT0701",
        then_settle(lambda sim: spoil_pod(sim, DECODE, _in_etcd)),
    ),
    Fault(
        "backend-not-set",
        "DYT0708",
        then_settle(lambda sim: spoil_pod(sim, DECODE, _no_backend)),
    ),
    Fault("pod-not-ready", "DYT0702", then_settle(_unready), also=("DYT0113",)),
    Fault("pod-in-no-slice", "DYT0702", then_settle(_ignored)),
    Fault("slice-names-an-earlier-pod", "DYT0702", then_settle(_stale_slice)),
    Fault("workers-may-not-register", "DYT0703", then_settle(_unbound), also=("DYT0113",)),
    Fault("worker-without-metadata", "DYT0704", then_settle(_unregistered)),
    Fault("worker-without-a-card", "DYT0710", then_settle(_cardless)),
    Fault("metadata-of-an-earlier-pod", "DYT0705", then_settle(_earlier_life)),
    Fault("metadata-of-no-pod", "DYT0709", then_settle(_orphan)),
    Fault("worker-with-another-id", "DYT0706", then_settle(_other_id)),
    Fault("router-misses-a-worker", "DYT0904", then_settle(_missed)),
)

"""A single fault has its own code, and otherwise only codes of true consequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dynctl.wire.kubernetes.names import LABEL_KEY_ANNOTATION
from dynctl.wire.kubernetes.objects import LabelWrite, Termination
from tests.dynctl.verify.scene import DECODE, NODE, NOW, SPACE, B, Scene
from tests.kube.objects import ZONE

LINE = "topology file /etc/dynamo/topology/zone was not populated within 30s. Exiting."
Fault = Callable[[Scene], None]


def node_relabelled(scene: Scene) -> None:
    scene.node(NODE, ZONE, B)


def node_without_label(scene: Scene) -> None:
    """A new pod came to it: no label, an empty file, and the engine gives up again and again."""
    scene.node(NODE, ZONE, None)
    label_missing(scene)


def label_missing(scene: Scene) -> None:
    scene.not_started(DECODE)
    scene.label(DECODE, ZONE, None)
    scene.main(DECODE, last_end=Termination(1, "Error", NOW - 60))
    scene.log(DECODE, timed_out=LINE)


def label_just_missing(scene: Scene) -> None:
    scene.not_started(DECODE, running=True)
    scene.label(DECODE, ZONE, None)
    scene.file(DECODE, "")
    scene.pod(DECODE, scheduled=NOW - 12, created=NOW - 13)


def annotation_missing(scene: Scene) -> None:
    scene.annotate(DECODE, LABEL_KEY_ANNOTATION, None)
    label_missing(scene)


def label_by_hand(scene: Scene) -> None:
    """Somebody put another value on the pod before it started."""
    scene.label(DECODE, ZONE, B)
    scene.file(DECODE, B)
    scene.card(DECODE, topology_domains={"zone": B}, taints=[f"dynamo.topology/zone={B}"])
    scene.log(DECODE, domains={"zone": B})


def kubelet_late(scene: Scene) -> None:
    """The node and the label were changed; neither file nor worker followed."""
    scene.label(DECODE, ZONE, B)
    scene.pod(DECODE, node="gpu-b-0")
    scene.pod(DECODE, label_writes=(LabelWrite("manager", frozenset({ZONE}), NOW - 600),))


def worker_late(scene: Scene) -> None:
    """As before, and the file followed."""
    kubelet_late(scene)
    scene.file(DECODE, B)


def file_empty_at_start(scene: Scene) -> None:
    scene.not_started(DECODE, running=True)
    scene.files[SPACE, DECODE] = {}
    scene.file(DECODE, "")


def gave_up(scene: Scene) -> None:
    scene.not_started(DECODE)
    scene.main(DECODE, last_end=Termination(1, "Error", NOW - 60))
    scene.log(DECODE, timed_out=LINE)


def volume_missing(scene: Scene) -> None:
    scene.not_started(DECODE, running=True)
    scene.pod(DECODE, volumes=())
    scene.main(DECODE, mounts=())
    scene.files[SPACE, DECODE] = {}
    scene.file(DECODE, None)


def topology_switched_off(scene: Scene) -> None:
    scene.env(DECODE, DYN_TOPOLOGY_ENABLED=None)
    _published_nothing(scene)


def never_written(scene: Scene) -> None:
    scene.never_written(DECODE)
    scene.label(DECODE, ZONE, None)


def sidecar(scene: Scene) -> None:
    """The runtime does not support topology."""
    _published_nothing(scene)


def _published_nothing(scene: Scene) -> None:
    fields = ("topology_domains", "taints", "kv_transfer_domain", "kv_transfer_enforcement")
    scene.card(DECODE, **dict.fromkeys(fields))
    scene.log(DECODE, domains=None)


def other_policy(scene: Scene) -> None:
    """Started with other variables than the policy's."""
    scene.env(DECODE, DYN_KV_TRANSFER_ENFORCEMENT="preferred")
    scene.env(DECODE, DYN_KV_TRANSFER_PREFERRED_WEIGHT="0.5")
    _published_other(scene)


def card_of_another_policy(scene: Scene) -> None:
    _published_other(scene)


def _published_other(scene: Scene) -> None:
    scene.card(DECODE, kv_transfer_enforcement="preferred", kv_transfer_preferred_weight=0.5)
    scene.log(DECODE, enforcement="preferred", weight=0.5)


def taint_missing(scene: Scene) -> None:
    scene.card(DECODE, taints=[])


def not_registered(scene: Scene) -> None:
    scene.gone(DECODE)


def not_ready(scene: Scene) -> None:
    scene.pod(DECODE, ready=False)
    scene.endpoints = [
        replace(one, ready=False) if one.pod == DECODE else one for one in scene.endpoints
    ]
    scene.unknown(DECODE)


def recreated(scene: Scene) -> None:
    """The metadata of an earlier pod of that name stayed, with its topology."""
    scene.metadata[DECODE] = replace(scene.metadata[DECODE], owner_uid="gone")
    scene.card(DECODE, topology_domains={"zone": B}, taints=[f"dynamo.topology/zone={B}"])
    scene.unknown(DECODE)


def another_backend(scene: Scene) -> None:
    scene.env(DECODE, DYN_DISCOVERY_BACKEND="etcd")
    scene.gone(DECODE)


def router_forgot(scene: Scene) -> None:
    scene.unknown(DECODE)


#: Four decode workers for two prefill workers become three: the ratio of the domains is off.
FEWER = {"DYT0908"}
#: Three and five.
MOVED = {"DYT0908"}


@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        (node_relabelled, {"DYT0404"}),
        (node_without_label, FEWER),
        (label_missing, {"DYT0403"} | FEWER),
        (label_just_missing, {"DYT0411"} | FEWER),
        (annotation_missing, {"DYT0402"} | FEWER),
        (label_by_hand, {"DYT0404"} | MOVED),
        (kubelet_late, {"DYT0504"}),
        (worker_late, {"DYT0802"}),
        (file_empty_at_start, {"DYT0503"} | FEWER),
        (gave_up, {"DYT0601"} | FEWER),
        (volume_missing, {"DYT0502"} | FEWER),
        (topology_switched_off, {"DYT0501", "DYT0903"} | FEWER),
        (never_written, {"DYT0402", "DYT0903"} | FEWER),
        (sidecar, {"DYT0801", "DYT0903"} | FEWER),
        (other_policy, {"DYT0501"}),
        (card_of_another_policy, {"DYT0803"}),
        (taint_missing, {"DYT0804", "DYT0903"} | FEWER),
        (not_registered, {"DYT0704"} | FEWER),
        (not_ready, {"DYT0702"} | FEWER),
        (recreated, {"DYT0705"} | FEWER),
        (another_backend, {"DYT0701"} | FEWER),
        (router_forgot, {"DYT0904"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_single_fault_has_one_code(fault: Fault, codes: set[str]):
    scene = Scene()
    fault(scene)
    assert set(scene.found()) == codes


def test_a_healthy_deployment_has_none():
    assert Scene().found() == {}

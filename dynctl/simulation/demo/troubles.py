"""The troubles of the simulated clusters, and what the commands show of them."""

from __future__ import annotations

from typing import Final

from dynctl.adapters.kubernetes.demo_cluster import HEALTHY, PREFIX
from dynctl.base.errors import UsageProblem
from dynctl.documents.demo import ClusterTrouble, ClusterTroubles

_COMMANDS: Final = (
    "dynctl topology verify --kube-context {}",
    "dynctl workers list --discovery kubernetes --kube-context {}",
    "dynctl top --discovery kubernetes --kube-context {}",
)


def cluster_trouble(name: str) -> ClusterTrouble:
    """The trouble with a name. Raises UsageProblem."""
    for trouble in cluster_troubles().troubles:
        if trouble.name == name:
            return trouble
    raise UsageProblem(f"{name}: unknown trouble", f"known: {', '.join(trouble_names())}")


def trouble_names() -> list[str]:
    """The names of all troubles."""
    return [name for name, _ in _TROUBLES]


def cluster_troubles() -> ClusterTroubles:
    """All troubles, those of the labels first."""
    troubles = [
        ClusterTrouble(name, codes.split(), happened, seen, _commands(name, codes.split()[0]))
        for name, (codes, happened, seen) in _TROUBLES
    ]
    commands = ["dynctl demo --cluster NAME", _COMMANDS[0].format(PREFIX + HEALTHY)]
    return ClusterTroubles(troubles, commands)


def _commands(name: str, code: str) -> list[str]:
    commands = [command.format(PREFIX + name) for command in _COMMANDS]
    return [*commands, f"dynctl explain {code}"]


#: Name -> the codes that verify reports, what happened, and what the lists of workers show.
_TROUBLES: Final = (
    (
        "relabelled-node",
        (
            "DYT0404",
            "Node gpu-a-1 got the label of another zone while its pods were running.",
            "The lists show nothing: its workers keep the zone of their start.",
        ),
    ),
    (
        "missing-label",
        (
            "DYT0403",
            "The zone label of pod my-llm-decode-a-0 was removed.",
            "The lists show nothing: the worker keeps its zone until it restarts.",
        ),
    ),
    (
        "wrong-field-path",
        (
            "DYT0502 DYT0907 DYT0908",
            "The topology file of pod my-llm-decode-a-0 has the value of another label.",
            "The worker has a zone of its own, my-llm-decode-a.",
        ),
    ),
    (
        "crash-loop",
        (
            "DYT0410 DYT0113 DYT0901",
            "Component decode-a was updated with the strategy Recreate, and the new engine ends "
            "at once.",
            "Zone us-east-1a has no decode worker: it is STRANDED.",
        ),
    ),
    (
        "missing-image",
        (
            "DYT0410 DYT0113 DYT0908",
            "The image of pod my-llm-decode-a-0 does not exist.",
            "Zone us-east-1a has 2 of 3 decode workers.",
        ),
    ),
    (
        "no-room",
        (
            "DYT0410 DYT0113 DYT0908",
            "No node of zone us-east-1a has a free GPU for pod my-llm-decode-a-0.",
            "Zone us-east-1a has 2 of 3 decode workers.",
        ),
    ),
    (
        "quota",
        (
            "DYT0409 DYT0113 DYT0908",
            "A quota of namespace prod refuses the third pod of component decode-a.",
            "Zone us-east-1a has 2 of 3 decode workers.",
        ),
    ),
    (
        "stopped-kubelet",
        (
            "DYT0702 DYT0113 DYT0907",
            "The kubelet of node gpu-b-1 has stopped; files and logs of its pods are not readable.",
            "Zone us-east-1b has no prefill worker.",
        ),
    ),
    (
        "deleted-role",
        (
            "DYT0703 DYT0113 DYT0908",
            "The workers' permission to register was deleted.",
            "The worker that started afterwards is missing.",
        ),
    ),
    (
        "missing-service",
        (
            "DYT0702 DYT0901",
            "The Service of component decode-a was deleted; its pods run.",
            "Zone us-east-1a has no decode worker: it is STRANDED.",
        ),
    ),
)

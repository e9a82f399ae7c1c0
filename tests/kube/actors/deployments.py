"""The Deployment controller for the operator's Deployment: all wanted replicas are ready."""

from __future__ import annotations

from tests.kube.actors.acting import Hands
from tests.kube.objects import key_of


class Deployments:
    """``broken``: names of Deployments whose pods do not become ready."""

    def __init__(self, hands: Hands) -> None:
        self.broken: set[str] = set()
        self._hands = hands

    def due(self) -> float | None:
        return None

    def step(self) -> bool:
        did = False
        for body in self._hands.list("Deployment"):
            wanted = body["spec"].get("replicas", 1)
            up = 0 if body["metadata"]["name"] in self.broken else wanted
            there = body.get("status", {})
            if (there.get("replicas", 0), there.get("readyReplicas", 0)) == (wanted, up):
                continue
            status = {
                "replicas": wanted,
                "readyReplicas": up,
                "availableReplicas": up,
                "updatedReplicas": wanted,
            }
            self._hands.merge("Deployment", *key_of(body), {"status": status}, subresource="status")
            did = True
        return did

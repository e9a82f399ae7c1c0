"""The fault matrix: everything that can go wrong between a node's label and the router, on a
living cluster, with the code by which verify must name it.

A fault is done to the cluster as it happens in the world (a node is relabelled, a right is
missing, a kubelet lags), and what follows from it follows by itself.
"""

from tests.kube.faults.access import ACCESS_FAULTS
from tests.kube.faults.discovery import DISCOVERY_FAULTS
from tests.kube.faults.fault import Fault, fault_of, injected
from tests.kube.faults.graphs import GRAPH_FAULTS
from tests.kube.faults.nodes import NODE_FAULTS
from tests.kube.faults.operators import OPERATOR_FAULTS
from tests.kube.faults.pods import POD_FAULTS
from tests.kube.faults.topologies import TOPOLOGY_FAULTS
from tests.kube.faults.workers import WORKER_FAULTS

FAULTS: tuple[Fault, ...] = (
    *ACCESS_FAULTS,
    *GRAPH_FAULTS,
    *TOPOLOGY_FAULTS,
    *NODE_FAULTS,
    *OPERATOR_FAULTS,
    *POD_FAULTS,
    *DISCOVERY_FAULTS,
    *WORKER_FAULTS,
)

__all__ = ["FAULTS", "Fault", "fault_of", "injected"]

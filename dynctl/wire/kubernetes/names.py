"""Labels, annotations and paths of Dynamo's operator (1.2 and later)."""

from __future__ import annotations

from typing import Final

GRAPH_LABEL: Final = "nvidia.com/dynamo-graph-deployment-name"
COMPONENT_LABEL: Final = "nvidia.com/dynamo-component"
COMPONENT_TYPE_LABEL: Final = "nvidia.com/dynamo-component-type"
SUB_COMPONENT_TYPE_LABEL: Final = "nvidia.com/dynamo-sub-component-type"
DYNAMO_NAMESPACE_LABEL: Final = "nvidia.com/dynamo-namespace"
DISCOVERY_ENABLED_LABEL: Final = "nvidia.com/dynamo-discovery-enabled"
DISCOVERY_BACKEND_LABEL: Final = "nvidia.com/dynamo-discovery-backend"
WORKER_HASH_LABEL: Final = "nvidia.com/dynamo-worker-hash"
DOMAIN_LABEL_PREFIX: Final = "nvidia.com/dynamo-topology."
"""With a Grove topology, the operator copies each level to ``PREFIX<domain>``."""
DRAFT_LABEL_PREFIX: Final = "grove.io/topology."
"""From a draft of the design; no release writes or reads it."""

LABEL_KEY_ANNOTATION: Final = "nvidia.com/topology-label-key"
CLUSTER_TOPOLOGY_ANNOTATION: Final = "nvidia.com/topology-cluster-topology-name"
ENABLE_GROVE_ANNOTATION: Final = "nvidia.com/enable-grove"
STRATEGY_ANNOTATION: Final = "nvidia.com/deployment-strategy"
"""How a component is updated: RollingUpdate, or RECREATE."""
RECREATE: Final = "Recreate"
"""All earlier pods of the component end before new ones are created."""


ZONE_LABEL: Final = "topology.kubernetes.io/zone"
"""The label of nodes in clouds."""

MAIN_CONTAINER: Final = "main"
TOPOLOGY_VOLUME: Final = "topology-labels"
MOUNT_PATH: Final = "/etc/dynamo/topology"
DRAFT_MOUNT_PATH: Final = "/etc/podinfo/topology"

LABEL_MISSING_REASON: Final = "TopologyLabelMissing"
"""The reason of the operator's event for a node without the label."""
NOT_CREATED_REASON: Final = "FailedCreate"
"""The reason of a controller's event for a pod that could not be created."""

OPERATOR_APP: Final = "dynamo-operator"
"""The value of app.kubernetes.io/name of the operator's Deployment."""

"""A Kubernetes API server for tests: real sockets, the real protocol, objects in memory.

Made to be talked to by unmodified clients (kubectl, the official Python client, Dynamo itself),
which is also what keeps it honest: see tests/kube/witness. What it does not do: protobuf, SPDY,
admission webhooks, CEL in general, aggregated discovery, garbage collection in the background
(deleting cascades at once), pods that run.
"""

from tests.kube.api_server.faults import Fault, Faults
from tests.kube.api_server.server import ADMIN_TOKEN, ApiServer, Request
from tests.kube.api_server.status import StatusError
from tests.kube.api_server.streams import Ran

__all__ = ["ADMIN_TOKEN", "ApiServer", "Fault", "Faults", "Ran", "Request", "StatusError"]

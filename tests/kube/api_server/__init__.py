"""A Kubernetes API server for tests: real sockets, the real protocol, objects in memory.

Made to be talked to by unmodified clients (kubectl, the official Python client, Dynamo itself),
which is also what keeps it honest: see tests/kube/witness and tests/kube/test_contract.py.

What it does not do, and a real one does:

- tables: ``kubectl get`` prints names and ages only;
- protobuf: answers are JSON whatever else is accepted, bodies in it get 415 (so kubectl's
  ``auth can-i`` and ``create namespace`` fail; ``apply`` and the Python client's reviews do not);
- SPDY, and with it kubectl's ``port-forward``;
- aggregated discovery, and fields in OpenAPI (so no ``kubectl explain``);
- CEL: only the rules of ``kvTransferPolicy``, as predicates in rules.py;
- schemas of built-in kinds: their unknown fields are kept, and admission.py checks little;
- list maps of custom resources: their lists are one field to apply and managedFields;
- webhooks, admission plugins, quotas, deletecollection, scale, eviction;
- anything in the background: deleting cascades at once, pods end at once, nothing runs.

Texts of refusals follow the sources of Kubernetes 1.32 to 1.34; `make test-kube` holds
test_contract.py, with the most common ones, against a running 1.36.
"""

from tests.kube.api_server.faults import Fault, Faults
from tests.kube.api_server.server import ADMIN_TOKEN, ApiServer, Request
from tests.kube.api_server.status import StatusError
from tests.kube.api_server.streams import Ran

__all__ = ["ADMIN_TOKEN", "ApiServer", "Fault", "Faults", "Ran", "Request", "StatusError"]

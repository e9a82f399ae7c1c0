"""gRPC's health service: which parts of a process serve."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from dynctl.wire.envoy.schema import DecodeError, message

CHECK: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"

_REQUEST: Final = message("HealthCheckRequest")
_RESPONSE: Final = message("HealthCheckResponse")


class Serving(IntEnum):
    """The state of a service. gRPC's numbers."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


def service_of(data: bytes) -> str:
    """The service that a HealthCheckRequest names; empty: the whole process. Raises ValueError."""
    try:
        return str(_REQUEST.FromString(data).service)
    except DecodeError:
        raise ValueError("not a HealthCheckRequest") from None


def status_message(state: Serving) -> bytes:
    """A HealthCheckResponse."""
    return bytes(_RESPONSE(status=int(state)).SerializeToString())

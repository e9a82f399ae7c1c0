"""A real Envoy with an ext_proc filter that asks a picker, as gateways of Kubernetes have it.

``DYNCTL_ENVOY`` names the program; ``make test-envoy`` installs one and sets it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.dynamo.processes import Process, ProcessGroup
from tests.ports import free_port
from tests.waiting import patience, until_now

# Read when imported, since the tests' environment is emptied of DYNCTL_* variables.
PROGRAM = os.environ.get("DYNCTL_ENVOY", "")
_START_S = 30.0
_HTTP2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_SUBSET = "envoy.filters.http.set_metadata"


def _typed(name: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/{name}", **fields}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def configuration(
    port: int,
    admin: int,
    picker: int,
    *,
    request_body: str = "FULL_DUPLEX_STREAMED",
    response_body: str = "FULL_DUPLEX_STREAMED",
    eager: bool = False,
    subset: Sequence[str] | str | None = None,
    tls: bool = True,
    fail_open: bool = False,
) -> dict[str, Any]:
    """The configuration of an Envoy that asks the picker at ``picker``."""
    limit = f"{patience(10):g}s"  # of what works: no test waits for one
    trailers = {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
    ext_proc = _typed(
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": limit},
        failure_mode_allow=fail_open,
        message_timeout=limit,
        processing_mode={
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": request_body,
            "response_body_mode": response_body,
            **trailers,
        },
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )
    if eager:
        ext_proc["send_body_without_waiting_for_header_response"] = True
    filters: list[dict[str, Any]] = []
    if subset is not None:
        filters.append(
            {
                "name": _SUBSET,
                "typed_config": _typed(
                    "envoy.extensions.filters.http.set_metadata.v3.Config",
                    metadata=[
                        {
                            "metadata_namespace": "envoy.lb.subset_hint",
                            "value": {"x-gateway-destination-endpoint-subset": subset},
                        }
                    ],
                ),
            }
        )
    filters += [
        {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
        {
            "name": "envoy.filters.http.router",
            "typed_config": _typed("envoy.extensions.filters.http.router.v3.Router"),
        },
    ]
    route = {"cluster": "workers", "timeout": "0s", "idle_timeout": "0s"}
    manager = _typed(
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        codec_type="AUTO",
        route_config={
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
        http_filters=filters,
    )
    picker_cluster: dict[str, Any] = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": limit,
        "typed_extension_protocol_options": {
            _HTTP2: _typed(_HTTP2, explicit_http_config={"http2_protocol_options": {}})
        },
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(picker)}}]}],
        },
    }
    if tls:
        picker_cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": _typed(
                "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                common_tls_context={"alpn_protocols": ["h2"]},
            ),
        }
    workers = {
        "name": "workers",
        "type": "ORIGINAL_DST",
        "connect_timeout": limit,
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {
            "use_http_header": True,
            "http_header_name": "x-gateway-destination-endpoint",
        },
    }
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [
                {
                    "name": "gateway",
                    "address": _address(port),
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [picker_cluster, workers],
        },
    }


class Gateway:
    """A running Envoy."""

    def __init__(self, port: int, admin: int, process: Process) -> None:
        self.port, self.admin, self.process = port, admin, process
        self.http = httpx.Client(base_url=self.url, timeout=patience(60), trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def statistics(self, part: str) -> Mapping[str, int]:
        """Counters and gauges whose names have ``part``."""
        answer = httpx.get(
            f"http://127.0.0.1:{self.admin}/stats",
            params={"filter": part, "format": "json"},
            trust_env=False,
            timeout=patience(5),
        )
        return {one["name"]: one["value"] for one in answer.json()["stats"] if "value" in one}

    def close(self) -> None:
        self.http.close()
        self.process.kill(signal.SIGTERM)


def start_gateway(group: ProcessGroup, directory: Path, picker: int, **given: Any) -> Gateway:
    """Start an Envoy before the picker and wait until it accepts requests. ``shown``: its whole
    configuration, with ``admin``."""
    port, admin = free_port(), free_port()
    threads, shown = given.pop("threads", 1), given.pop("shown", None)
    if shown is not None:
        admin = shown["admin"]["address"]["socket_address"]["port_value"]
    file = directory / f"envoy-{port}.json"
    file.write_text(json.dumps(shown or configuration(port, admin, picker, **given)))
    command = [PROGRAM, "-c", str(file), "--use-dynamic-base-id", "--log-level", "warning"]
    command += ["--concurrency", str(threads)]
    process = group.start(f"envoy-{port}", command, {"PATH": os.environ["PATH"]})
    gateway = Gateway(port, admin, process)

    def ready() -> bool:
        if not process.alive:
            raise AssertionError(f"Envoy ended\n{process.tail(60)}")
        try:
            return httpx.get(f"http://127.0.0.1:{admin}/ready", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    until_now(ready, _START_S)
    return gateway

"""Messages of ext_proc and gRPC's health by Envoy's own stubs (`xds-protos`), as JSON on stdout.

Run by the Python that has the stubs. tests/dynctl/wire/ext_proc_messages.json is its output;
tests/envoy/test_stubs.py compares the two.
"""

import json
import sys
from typing import Any

from envoy.config.core.v3 import base_pb2  # type: ignore[import-not-found]
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc  # type: ignore[import-not-found]
from google.protobuf import struct_pb2  # type: ignore[import-untyped]

OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def headers(**values: str) -> Any:
    return base_pb2.HeaderMap(
        headers=[
            base_pb2.HeaderValue(
                key=name.replace("__", ":").replace("_", "-"), raw_value=value.encode()
            )
            for name, value in values.items()
        ]
    )


def subset(value: Any) -> Any:
    inner = struct_pb2.Struct()
    inner["x-gateway-destination-endpoint-subset"] = value
    return base_pb2.Metadata(filter_metadata={"envoy.lb.subset_hint": inner})


def mutation(given: dict[str, str], removed: list[str]) -> Any:
    found = ext_proc.HeaderMutation(remove_headers=removed)
    for name, value in given.items():
        header = base_pb2.HeaderValue(key=name, raw_value=value.encode())
        found.set_headers.append(base_pb2.HeaderValueOption(header=header, append_action=OVERWRITE))
    return found


def requests() -> dict[str, Any]:
    message = ext_proc.ProcessingRequest
    full = ext_proc.ProtocolConfiguration(request_body_mode=4, response_body_mode=4)
    eager = ext_proc.ProtocolConfiguration(
        request_body_mode=1,
        response_body_mode=0,
        send_body_without_waiting_for_header_response=True,
    )
    first = headers(__path="/v1/chat/completions", __method="POST", X_Twice="a")
    first.headers.add(key="x-twice", raw_value=b"b")
    first.headers.add(key="x-text", value="c")
    return {
        "request headers": message(
            request_headers=ext_proc.HttpHeaders(headers=first),
            protocol_config=full,
            attributes={"envoy.filters.http.ext_proc": struct_pb2.Struct()},
        ),
        "request headers, all of the request": message(
            request_headers=ext_proc.HttpHeaders(headers=headers(__path="/"), end_of_stream=True),
            protocol_config=eager,
        ),
        "subset as a list": message(
            request_headers=ext_proc.HttpHeaders(headers=headers()),
            metadata_context=subset(["10.0.0.1:8000", "10.0.0.2:8000"]),
        ),
        "subset as a text": message(
            request_headers=ext_proc.HttpHeaders(headers=headers()),
            metadata_context=subset("10.0.0.1:8000, 10.0.0.2:8000"),
        ),
        "empty subset": message(
            request_headers=ext_proc.HttpHeaders(headers=headers()), metadata_context=subset([])
        ),
        "observability": message(
            request_headers=ext_proc.HttpHeaders(headers=headers()), observability_mode=True
        ),
        "request body": message(request_body=ext_proc.HttpBody(body=b"piece")),
        "end of the request body": message(request_body=ext_proc.HttpBody(end_of_stream=True)),
        "request trailers": message(
            request_trailers=ext_proc.HttpTrailers(trailers=headers(a="b"))
        ),
        "response headers": message(
            response_headers=ext_proc.HttpHeaders(headers=headers(__status="200"))
        ),
        "response body": message(
            response_body=ext_proc.HttpBody(body=b"data: x\n\n", end_of_stream=True)
        ),
        "response trailers": message(response_trailers=ext_proc.HttpTrailers()),
    }


def answers() -> dict[str, Any]:
    message, common = ext_proc.ProcessingResponse, ext_proc.CommonResponse
    metadata = struct_pb2.Struct()
    metadata["envoy.lb"] = {"x-gateway-destination-endpoint": "10.0.0.1:8000"}
    destination = {"x-gateway-destination-endpoint": "10.0.0.1:8000"}
    chosen = common(
        header_mutation=mutation(destination, ["x-prefiller-host-port"]), clear_route_cache=True
    )
    empty = common(header_mutation=mutation({}, []))
    piece = ext_proc.StreamedBodyResponse(body=b"piece", end_of_stream=True)
    streamed = common(body_mutation=ext_proc.BodyMutation(streamed_response=piece))
    return {
        "choice": message(
            request_headers=ext_proc.HeadersResponse(response=chosen), dynamic_metadata=metadata
        ),
        "choice with a buffered body": message(
            request_body=ext_proc.BodyResponse(response=chosen), dynamic_metadata=metadata
        ),
        "headers pass": message(response_headers=ext_proc.HeadersResponse(response=empty)),
        "body passes": message(response_body=ext_proc.BodyResponse(response=common())),
        "piece of the request": message(request_body=ext_proc.BodyResponse(response=streamed)),
        "piece of the response": message(response_body=ext_proc.BodyResponse(response=streamed)),
        "trailers pass": message(response_trailers=ext_proc.TrailersResponse()),
        "refusal": message(
            immediate_response=ext_proc.ImmediateResponse(
                status={"code": 503},
                headers=mutation({"retry-after": "1"}, []),
                body=b"{}",
                details="dynctl_503",
            )
        ),
    }


if __name__ == "__main__":
    found = {
        kind: {name: one.SerializeToString(deterministic=True).hex() for name, one in made.items()}
        for kind, made in (("requests", requests()), ("answers", answers()))
    }
    sys.stdout.write(json.dumps(found, indent=2) + "\n")

"""The protobuf messages of ext_proc and of gRPC's health service, as far as they are used.

Names and numbers are facts of Envoy's ``service/ext_proc/v3/external_processor.proto``,
``config/core/v3/base.proto``, ``type/v3/http_status.proto``, of ``google/protobuf/struct.proto``
and of ``grpc/health/v1/health.proto``. A map is the repeated entry that it is on the wire, and an
enum its number. Fields that are left out are skipped by the decoder. A test compares the bytes with
those of Envoy's own stubs.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2  # type: ignore[import-untyped]
from google.protobuf.descriptor_pool import DescriptorPool  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]

__all__ = ["DecodeError", "message"]

_PACKAGE: Final = "dynctl.envoy"
#: Message -> its fields: name, number, type; ``[]`` is repeated, ``|`` a member of the one oneof.
_MESSAGES: Final = {
    "HeaderValue": "key 1 string, value 2 string, raw_value 3 bytes",
    "HeaderMap": "headers 1 HeaderValue[]",
    "ListValue": "values 1 Value[]",
    "Value": "null_value 1 int32|, number_value 2 double|, string_value 3 string|, "
    "bool_value 4 bool|, struct_value 5 Struct|, list_value 6 ListValue|",
    "FieldsEntry": "key 1 string, value 2 Value",
    "Struct": "fields 1 FieldsEntry[]",
    "MetadataEntry": "key 1 string, value 2 Struct",
    "Metadata": "filter_metadata 1 MetadataEntry[]",
    "HttpHeaders": "headers 1 HeaderMap, end_of_stream 3 bool",
    "HttpBody": "body 1 bytes, end_of_stream 2 bool, end_of_stream_without_message 3 bool",
    "HttpTrailers": "trailers 1 HeaderMap",
    "ProtocolConfiguration": "request_body_mode 1 int32, response_body_mode 2 int32, "
    "send_body_without_waiting_for_header_response 3 bool",
    "ProcessingRequest": "request_headers 2 HttpHeaders|, response_headers 3 HttpHeaders|, "
    "request_body 4 HttpBody|, response_body 5 HttpBody|, request_trailers 6 HttpTrailers|, "
    "response_trailers 7 HttpTrailers|, metadata_context 8 Metadata, observability_mode 10 bool, "
    "protocol_config 11 ProtocolConfiguration",
    "HeaderValueOption": "header 1 HeaderValue, append_action 3 int32",
    "HeaderMutation": "set_headers 1 HeaderValueOption[], remove_headers 2 string[]",
    "StreamedBodyResponse": "body 1 bytes, end_of_stream 2 bool",
    "BodyMutation": "streamed_response 3 StreamedBodyResponse",
    "CommonResponse": "header_mutation 2 HeaderMutation, body_mutation 3 BodyMutation, "
    "clear_route_cache 5 bool",
    "HeadersResponse": "response 1 CommonResponse",
    "BodyResponse": "response 1 CommonResponse",
    "TrailersResponse": "header_mutation 1 HeaderMutation",
    "HttpStatus": "code 1 int32",
    "ImmediateResponse": "status 1 HttpStatus, headers 2 HeaderMutation, body 3 bytes, "
    "details 5 string",
    "ProcessingResponse": "request_headers 1 HeadersResponse|, "
    "response_headers 2 HeadersResponse|, request_body 3 BodyResponse|, "
    "response_body 4 BodyResponse|, "
    "request_trailers 5 TrailersResponse|, response_trailers 6 TrailersResponse|, "
    "immediate_response 7 ImmediateResponse|, dynamic_metadata 8 Struct",
    "HealthCheckRequest": "service 1 string",
    "HealthCheckResponse": "status 1 int32",
}


def _file() -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="dynctl/envoy.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        if "|" in fields:
            made.oneof_decl.add(name="kind")
        for field_text in fields.split(", "):
            label, number, kind = field_text.split()
            plain = kind.rstrip("[]|")
            added = made.field.add(
                name=label,
                number=int(number),
                label=field.LABEL_REPEATED if kind.endswith("[]") else field.LABEL_OPTIONAL,
            )
            if plain in _MESSAGES:
                added.type, added.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{plain}"
            else:
                added.type = getattr(field, f"TYPE_{plain.upper()}")
            if kind.endswith("|"):
                added.oneof_index = 0
    return file


# A pool of its own: a program may have Envoy's stubs loaded too.
_POOL: Final = DescriptorPool()
_POOL.AddSerializedFile(_file().SerializeToString())


def message(name: str) -> Any:
    """The class of a message."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))

"""Bodies of requests and answers: JSON and YAML in; objects, lists and tables out."""

from collections.abc import Sequence
from typing import Any

import msgspec
import yaml
from aiohttp import web

from tests.kube.api_server import tables
from tests.kube.api_server.routing import Target
from tests.kube.api_server.status import StatusError, bad_request, unsupported_media_type

Json = dict[str, Any]

_READABLE = ("application/json", "application/yaml")


async def body_of(request: web.Request, accepted: Sequence[str] = _READABLE) -> Any:
    """The decoded body; None for an empty one. Raises 415 and 400."""
    data = await request.read()
    kind = request.content_type.lower() if request.headers.get("Content-Type") else accepted[0]
    if kind not in accepted:
        raise unsupported_media_type(accepted)
    if not data.strip():
        return None
    try:
        if kind.endswith("yaml"):
            return _yaml(data)
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, yaml.YAMLError, UnicodeDecodeError) as problem:
        raise bad_request(f"error decoding the body: {problem}") from None


def _yaml(data: bytes) -> Any:
    """JSON is YAML, and much faster to decode as JSON."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return yaml.load(data, Loader=_Loader)


class _Loader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]
    """Timestamps stay strings, as in Kubernetes' YAML."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for letter, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def answer(body: Json, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body) + b"\n",
        status=status,
        content_type="application/json",
        headers=headers,
    )


def refusal(error: StatusError) -> web.Response:
    return answer(error.body, error.code, error.headers)


def shape_of(request: web.Request) -> str:
    """Which of the Accept header's shapes is given: Table, PartialObjectMetadata, or ``""``.

    Raises 406 where only protobuf or something foreign would do.
    """
    accepted = request.headers.get("Accept", "*/*")
    for choice in accepted.split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        if kind in ("application/json", "application/*", "*/*"):
            if given.get("as", "") not in ("Table", ""):
                return "PartialObjectMetadata"
            return given.get("as", "")
    raise StatusError(
        406,
        "NotAcceptable",
        "only the following media types are accepted: application/json, application/yaml",
        {},
    )


class Shaper:
    """Shows stored objects of one target as one request wants them."""

    def __init__(self, request: web.Request, target: Target, now: float) -> None:
        self._target = target
        self._shape = shape_of(request)
        self._include = request.query.get("includeObject", "Metadata")
        self._now = now

    def one(self, body: Json) -> Json:
        if self._shape == "Table":
            revision = body["metadata"].get("resourceVersion", "")
            return self._table([body], {"resourceVersion": revision})
        return tables.partial(body) if self._shape else body

    def many(self, bodies: list[Json], metadata: Json) -> Json:
        if self._shape == "Table":
            return self._table(bodies, metadata)
        resource = self._target.resource
        if self._shape:
            items = [tables.partial(body) for body in bodies]
            kind, version = "PartialObjectMetadataList", "meta.k8s.io/v1"
        else:
            # Items of built-in lists carry no kind and apiVersion of their own.
            items = bodies if resource.custom else [_bare(body) for body in bodies]
            kind, version = f"{resource.kind}List", resource.api_version(self._target.version)
        return {"kind": kind, "apiVersion": version, "metadata": metadata, "items": items}

    def event(self, kind: str, body: Json) -> Json:
        if kind == "ERROR":
            return {"type": kind, "object": body}
        if kind == "BOOKMARK" and self._shape == "Table":
            return {"type": kind, "object": self._table([], body["metadata"])}
        return {"type": kind, "object": self.one(body)}

    def _table(self, bodies: list[Json], metadata: Json) -> Json:
        resource, version = self._target.resource, self._target.version
        return tables.table(resource, version, bodies, self._now, metadata, self._include)


def _bare(body: Json) -> Json:
    return {name: value for name, value in body.items() if name not in ("kind", "apiVersion")}

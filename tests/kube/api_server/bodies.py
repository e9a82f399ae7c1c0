"""Bodies of requests and answers: JSON and YAML in, objects and lists out."""

from collections.abc import Sequence
from typing import Any

import msgspec
import yaml
from aiohttp import web

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


def require_json(request: web.Request) -> None:
    """Raise 406 where the Accept header has only protobuf or something foreign."""
    accepted = request.headers.get("Accept", "*/*")
    kinds = {choice.partition(";")[0].strip() for choice in accepted.split(",")}
    if kinds.isdisjoint(("application/json", "application/*", "*/*")):
        raise StatusError(
            406,
            "NotAcceptable",
            "only the following media types are accepted: application/json, application/yaml",
            {},
        )


def list_of(target: Target, bodies: list[Json], metadata: Json) -> Json:
    """The list of objects of a target."""
    resource = target.resource
    return {
        "kind": f"{resource.kind}List",
        "apiVersion": resource.api_version(target.version),
        "metadata": metadata,
        # Items of built-in lists carry no kind and apiVersion of their own.
        "items": bodies if resource.custom else [_bare(body) for body in bodies],
    }


def _bare(body: Json) -> Json:
    return {name: value for name, value in body.items() if name not in ("kind", "apiVersion")}

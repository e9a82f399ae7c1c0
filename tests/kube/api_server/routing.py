"""Parse a URL: resource, object, and verb of authorization."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.kube.api_server.parameters import flag
from tests.kube.api_server.rbac import Attributes
from tests.kube.api_server.resources import Registry, Resource
from tests.kube.api_server.status import StatusError, method_not_allowed, no_such_resource
from tests.kube.api_server.storage import Place

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class NoSuchPath(StatusError):
    """A group or version that is not served at all: answered in plain text."""

    def __init__(self) -> None:
        super().__init__(404, "NotFound", "404 page not found")


@dataclass(frozen=True, slots=True)
class Target:
    """``name`` and ``subresource`` are "" where the path stops earlier; ``namespace`` is "" for
    all namespaces and for what has none."""

    resource: Resource
    version: str
    namespace: str
    name: str
    subresource: str

    @property
    def place(self) -> Place:
        return (self.namespace, self.name)

    def verb(self, method: str, query: Mapping[str, str]) -> str:
        """Authorization's word; raises 405 where the path does not take the method."""
        custom_verb = _VERBS.get(method)
        if custom_verb is not None:
            on_collection = not self.name
            if on_collection is not (method == "POST") and self.subresource not in _POSTED:
                raise method_not_allowed()
            return custom_verb
        if method not in ("GET", "HEAD"):
            raise method_not_allowed()
        if flag(query, "watch"):
            return "watch"
        return "get" if self.name else "list"

    def attributes(self, method: str, query: Mapping[str, str]) -> Attributes:
        return Attributes(
            verb=self.verb(method, query),
            group=self.resource.group,
            resource=self.resource.plural,
            subresource=self.subresource,
            name=self.name,
            namespace=self.namespace or (self.name if self.resource.plural == "namespaces" else ""),
        )


_POSTED = ("binding", "exec", "portforward")


def target_of(registry: Registry, path: str) -> Target:
    """Raises 404: in plain text for an unknown group or version, as a Status for a resource."""
    parts = [part for part in path.split("/") if part]
    if parts[:2] == ["api", "v1"]:
        group, version, rest = "", "v1", parts[2:]
    elif parts[:1] == ["apis"] and len(parts) >= 3:
        group, version, rest = parts[1], parts[2], parts[3:]
        if version not in registry.groups().get(group, ()):
            raise NoSuchPath
    else:
        raise NoSuchPath
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource = registry.serving(group, version, rest[0]) if rest else None
    if resource is None or (namespace and not resource.namespaced) or len(rest) > 3:
        raise no_such_resource()
    name, subresource = (*rest[1:], "", "")[:2]
    if (name and resource.namespaced and not namespace) or (
        subresource and subresource not in resource.subresources
    ):
        raise no_such_resource()
    return Target(resource, version, namespace, name, subresource)

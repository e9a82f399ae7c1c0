"""The served resources: built-in ones and those of CustomResourceDefinitions."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")
REVIEW_VERBS = ("create",)


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object under one path segment, in all of its served versions.

    ``schemas`` are by version and empty for what is built in: built-in objects are not checked
    against a schema. ``storage_version`` is the one that objects are kept in.
    """

    group: str
    plural: str
    kind: str
    namespaced: bool
    versions: tuple[str, ...] = ("v1",)
    storage_version: str = "v1"
    singular: str = ""
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ALL_VERBS
    categories: tuple[str, ...] = ()
    custom: bool = False
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What the objects are kept under: group and plural."""
        return (self.group, self.plural)

    @property
    def qualified(self) -> str:
        """``pods``, ``deployments.apps``: how error messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def api_version(self, version: str | None = None) -> str:
        version = version or self.storage_version
        return f"{self.group}/{version}" if self.group else version

    @property
    def has_status(self) -> bool:
        return "status" in self.subresources


_RBAC = "rbac.authorization.k8s.io"
_REVIEWS = "authorization.k8s.io"

BUILT_IN = (
    Resource("", "namespaces", "Namespace", False, short_names=("ns",), subresources=("status",)),
    Resource("", "nodes", "Node", False, short_names=("no",), subresources=("status",)),
    Resource(
        "",
        "pods",
        "Pod",
        True,
        short_names=("po",),
        subresources=("status", "binding", "exec", "log", "portforward"),
        categories=("all",),
    ),
    Resource("", "events", "Event", True, short_names=("ev",)),
    Resource(
        "",
        "services",
        "Service",
        True,
        short_names=("svc",),
        subresources=("status",),
        categories=("all",),
    ),
    Resource("", "serviceaccounts", "ServiceAccount", True, short_names=("sa",)),
    Resource("", "configmaps", "ConfigMap", True, short_names=("cm",)),
    Resource(
        "apps",
        "deployments",
        "Deployment",
        True,
        short_names=("deploy",),
        subresources=("status",),
        categories=("all",),
    ),
    Resource("batch", "cronjobs", "CronJob", True, short_names=("cj",), subresources=("status",)),
    Resource("discovery.k8s.io", "endpointslices", "EndpointSlice", True),
    Resource("coordination.k8s.io", "leases", "Lease", True),
    Resource(_RBAC, "roles", "Role", True),
    Resource(_RBAC, "rolebindings", "RoleBinding", True),
    Resource(_RBAC, "clusterroles", "ClusterRole", False),
    Resource(_RBAC, "clusterrolebindings", "ClusterRoleBinding", False),
    Resource(
        _REVIEWS, "selfsubjectaccessreviews", "SelfSubjectAccessReview", False, verbs=REVIEW_VERBS
    ),
    Resource(_REVIEWS, "subjectaccessreviews", "SubjectAccessReview", False, verbs=REVIEW_VERBS),
    Resource(
        _REVIEWS, "localsubjectaccessreviews", "LocalSubjectAccessReview", True, verbs=REVIEW_VERBS
    ),
    Resource(
        "apiextensions.k8s.io",
        "customresourcedefinitions",
        "CustomResourceDefinition",
        False,
        short_names=("crd", "crds"),
        subresources=("status",),
    ),
)

CRDS = next(resource for resource in BUILT_IN if resource.kind == "CustomResourceDefinition")
NAMESPACES = next(resource for resource in BUILT_IN if resource.kind == "Namespace")
ACCESS_RULES = tuple(resource for resource in BUILT_IN if resource.group == _RBAC)
PODS = next(resource for resource in BUILT_IN if resource.kind == "Pod")


def from_definition(definition: Mapping[str, Any]) -> Resource:
    """The resource that a CustomResourceDefinition (``apiextensions.k8s.io/v1``) makes served."""
    spec = definition["spec"]
    names = spec["names"]
    served = [version for version in spec["versions"] if version.get("served", True)]
    storage = next(version for version in spec["versions"] if version.get("storage"))
    return Resource(
        group=spec["group"],
        plural=names["plural"],
        kind=names["kind"],
        namespaced=spec.get("scope", "Namespaced") == "Namespaced",
        versions=tuple(version["name"] for version in served),
        storage_version=storage["name"],
        singular=names.get("singular", names["kind"].lower()),
        short_names=tuple(names.get("shortNames", ())),
        subresources=tuple(
            name
            for name in ("status",)
            if any(name in version.get("subresources", {}) for version in served)
        ),
        categories=tuple(names.get("categories", ())),
        custom=True,
        schemas={
            version["name"]: version.get("schema", {}).get("openAPIV3Schema", {})
            for version in spec["versions"]
        },
    )


class Registry:
    """The resources served now. Not locked: a write replaces a whole entry."""

    def __init__(self, resources: Iterable[Resource] = BUILT_IN) -> None:
        self._resources = {resource.key: resource for resource in resources}

    def __iter__(self) -> Iterator[Resource]:
        return iter(tuple(self._resources.values()))

    def add(self, resource: Resource) -> None:
        self._resources[resource.key] = resource

    def remove(self, group: str, plural: str) -> None:
        self._resources.pop((group, plural), None)

    def serving(self, group: str, version: str, plural: str) -> Resource | None:
        resource = self._resources.get((group, plural))
        return resource if resource is not None and version in resource.versions else None

    def by_kind(self, group: str, kind: str) -> Resource | None:
        return next((r for r in self if r.kind == kind and r.group == group), None)

    def named(self, word: str) -> Resource:
        """By kind, plural, singular, short name or ``plural.group``, in any case; or KeyError."""
        low = word.lower()
        for resource in self:
            names = (resource.kind.lower(), resource.plural, resource.qualified)
            if low in (*names, *resource.short_names):
                return resource
        raise KeyError(f"no resource is called {word!r}; is its CustomResourceDefinition created?")

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Group -> its versions in the order of preference (v1, v1beta1, v1alpha1)."""
        found: dict[str, set[str]] = {}
        for resource in self:
            found.setdefault(resource.group, set()).update(resource.versions)
        return {
            group: tuple(sorted(versions, key=_preference)) for group, versions in found.items()
        }


def _preference(version: str) -> tuple[int, str]:
    stage = 2 if "alpha" in version else 1 if "beta" in version else 0
    return (stage, version)

"""Authentication by bearer token, and authorization by RBAC roles and bindings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.kube.api_server.resources import Resource
from tests.kube.api_server.status import StatusError
from tests.kube.api_server.storage import Storage

Json = dict[str, Any]

_GROUP = "rbac.authorization.k8s.io"
_OPEN_PATHS = ("/version", "/healthz", "/livez", "/readyz", "/api", "/apis", "/openapi")


@dataclass(frozen=True, slots=True)
class User:
    name: str
    groups: tuple[str, ...] = ()


ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))
ADMIN = User("kubernetes-admin", ("system:masters", "system:authenticated"))


def user_of(name: str, groups: tuple[str, ...]) -> User:
    """With the groups of all users, and of service accounts."""
    implied: tuple[str, ...] = ("system:authenticated",)
    if name.startswith("system:serviceaccount:"):
        namespace = name.split(":")[2]
        implied += ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
    return User(name, (*groups, *(group for group in implied if group not in groups)))


@dataclass(frozen=True, slots=True)
class Attributes:
    """A request as authorization sees it. ``path`` is set for what is not a resource."""

    verb: str
    group: str = ""
    resource: str = ""
    subresource: str = ""
    name: str = ""
    namespace: str = ""
    path: str = ""

    @property
    def full_resource(self) -> str:
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


class Authorizer:
    """``enabled`` False allows everything, as an API server without authorization does."""

    def __init__(self, storage: Storage, *, enabled: bool) -> None:
        self._storage = storage
        self._enabled = enabled

    def allowed(self, user: User, wanted: Attributes) -> tuple[bool, str]:
        """(whether, RBAC's own words for why)."""
        if not self._enabled or "system:masters" in user.groups:
            return True, ""
        if wanted.path:
            open_path = any(
                wanted.path == path or wanted.path.startswith(f"{path}/") for path in _OPEN_PATHS
            )
            return open_path and user is not ANONYMOUS, ""
        if wanted.resource == "selfsubjectaccessreviews" and user is not ANONYMOUS:
            return True, ""
        for reason, rules in self._rules(user, wanted.namespace):
            if any(_permits(rule, wanted) for rule in rules):
                return True, f"RBAC: allowed by {reason}"
        return False, ""

    def _rules(self, user: User, namespace: str) -> Iterator[tuple[str, list[Json]]]:
        for plural in ("clusterrolebindings", "rolebindings"):
            _, bindings = self._storage.snapshot((_GROUP, plural))
            for binding in bindings:
                inside = binding["metadata"].get("namespace", "")
                if plural == "rolebindings" and (not namespace or inside != namespace):
                    continue
                subject = next(
                    (s for s in binding.get("subjects") or () if _is(user, s, inside)), None
                )
                role = binding["roleRef"]
                place = (inside, role["name"]) if role["kind"] == "Role" else ("", role["name"])
                found = self._storage.read((_GROUP, f"{role['kind'].lower()}s"), place)
                if subject is None or found is None:
                    continue
                name = binding["metadata"]["name"] + (f"/{inside}" if inside else "")
                yield (
                    f'{binding["kind"]} "{name}" of {role["kind"]} "{role["name"]}" to '
                    f'{subject["kind"]} "{subject["name"]}"',
                    found.get("rules") or [],
                )

    def demand(self, user: User, resource: Resource | None, wanted: Attributes) -> None:
        """Raises 403 as RBAC words it."""
        if self.allowed(user, wanted)[0]:
            return
        if wanted.path or resource is None:
            raise StatusError(
                403,
                "Forbidden",
                f'forbidden: User "{user.name}" cannot {wanted.verb} path "{wanted.path}"',
                {},
            )
        where = (
            f'in the namespace "{wanted.namespace}"' if wanted.namespace else "at the cluster scope"
        )
        named = f'{resource.qualified} "{wanted.name}"' if wanted.name else resource.qualified
        details = {"name": wanted.name, "group": wanted.group, "kind": wanted.resource}
        raise StatusError(
            403,
            "Forbidden",
            f'{named} is forbidden: User "{user.name}" cannot {wanted.verb} resource '
            f'"{wanted.full_resource}" in API group "{wanted.group}" {where}',
            {key: value for key, value in details.items() if value},
        )


def _is(user: User, subject: Mapping[str, Any], binding_namespace: str) -> bool:
    if subject["kind"] == "Group":
        return subject["name"] in user.groups
    if subject["kind"] == "ServiceAccount":
        namespace = subject.get("namespace") or binding_namespace
        return user.name == f"system:serviceaccount:{namespace}:{subject['name']}"
    return bool(subject["name"] == user.name)


def _permits(rule: Mapping[str, Any], wanted: Attributes) -> bool:
    names = rule.get("resourceNames")
    return (
        bool({"*", wanted.verb} & set(rule.get("verbs") or ()))
        and bool({"*", wanted.group} & set(rule.get("apiGroups") or ()))
        and bool(
            {"*", wanted.full_resource, f"*/{wanted.subresource}" if wanted.subresource else "*"}
            & set(rule.get("resources") or ())
        )
        and (not names or wanted.name in names)
    )


def review(authorizer: Authorizer, body: Json, user: User | None) -> Json:
    """The answered access review; ``user`` is the asker for a SelfSubjectAccessReview."""
    spec = body.get("spec") or {}
    who = user or user_of(spec.get("user", ""), tuple(spec.get("groups") or ()))
    wanted = spec.get("resourceAttributes")
    if wanted is not None:
        wanted = Attributes(
            verb=wanted.get("verb", ""),
            group=wanted.get("group", ""),
            resource=wanted.get("resource", ""),
            subresource=wanted.get("subresource", ""),
            name=wanted.get("name", ""),
            namespace=wanted.get("namespace", ""),
        )
    else:
        path = spec.get("nonResourceAttributes") or {}
        wanted = Attributes(verb=path.get("verb", ""), path=path.get("path", "/"))
    allowed, reason = authorizer.allowed(who, wanted)
    return body | {"status": {"allowed": allowed} | ({"reason": reason} if reason else {})}

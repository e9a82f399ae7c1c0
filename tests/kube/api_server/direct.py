"""Direct writes to the store from Python: no HTTP, no authorization, fast for large fixtures."""

from collections.abc import Mapping
from typing import Any

from tests.kube.api_server.conformance import Writer
from tests.kube.api_server.resources import ACCESS_RULES, CRDS
from tests.kube.api_server.selectors import field_predicate, label_predicate
from tests.kube.api_server.store import Json, Store, copied

_DIRECT = "fixture"
Bodies = list[Json]


class DirectStore:
    """Thread-safe. ``resource`` is a kind, plural, short name or ``plural.group``; results are
    copies. Refusals are StatusError, an unknown resource is KeyError.

    A namespace that is not there is created, a ``status`` is kept as given, and so are a ``uid``
    and a ``creationTimestamp``.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(
        self, body: Mapping[str, Any], *, namespace: str | None = None, manager: str = _DIRECT
    ) -> Json:
        group, _, version = body["apiVersion"].rpartition("/")
        resource = self._store.registry.by_kind(group, body["kind"])
        if resource is None or version not in resource.versions:
            raise KeyError(f"{body['apiVersion']} {body['kind']} is not served here")
        place = self._place(resource.namespaced, "", namespace or _namespace_of(body))
        writer = Writer(manager, trusted=True)
        result: Json = copied(
            self._store.write_new(resource, version, place[0], dict(body), writer)
        )
        return result

    def get(
        self,
        resource: str,
        name: str,
        namespace: str | None = None,
        *,
        version: str | None = None,
    ) -> Json:
        found = self._store.registry.named(resource)
        place = self._place(found.namespaced, name, namespace)
        result: Json = copied(self._store.read(found, version or found.storage_version, place))
        return result

    def update(self, body: Mapping[str, Any], *, manager: str = _DIRECT) -> Json:
        """Replace all of it, the status too when ``body`` has one."""
        group, _, version = body["apiVersion"].rpartition("/")
        found = self._store.registry.by_kind(group, body["kind"])
        if found is None:
            raise KeyError(f"{body['apiVersion']} {body['kind']} is not served here")
        place = self._place(found.namespaced, body["metadata"]["name"], _namespace_of(body))
        writer = Writer(manager, trusted=True)
        result: Json = copied(self._store.write_over(found, version, place, dict(body), writer))
        return result

    def patch_merge(
        self,
        resource: str,
        name: str,
        patch: Mapping[str, Any],
        namespace: str | None = None,
        *,
        manager: str = _DIRECT,
    ) -> Json:
        """RFC 7396, of the spec, the metadata and the status alike."""
        found = self._store.registry.named(resource)
        place = self._place(found.namespaced, name, namespace)
        writer = Writer(manager, trusted=True)
        patched = self._store.patch(
            found, found.storage_version, place, "merge", dict(patch), writer
        )
        result: Json = copied(patched)
        return result

    def delete(self, resource: str, name: str, namespace: str | None = None) -> None:
        """Delete, with everything that it owns."""
        found = self._store.registry.named(resource)
        place = self._place(found.namespaced, name, namespace)
        self._store.delete(found, found.storage_version, place, {})

    def list(
        self,
        resource: str,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
    ) -> Bodies:
        """By namespace and name; all namespaces for None."""
        found = self._store.registry.named(resource)
        holds, fits = label_predicate(labels), field_predicate(fields, found)
        _, bodies = self._store.storage.snapshot(found.key)
        chosen = [
            body
            for body in bodies
            if (namespace is None or body["metadata"].get("namespace") == namespace)
            and holds(body)
            and fits(body)
        ]
        result: Bodies = copied(chosen)
        return result

    def compact(self) -> None:
        """Forget the past: watches and continue tokens of before are answered with 410."""
        self._store.storage.compact()

    def changed(self, resource: str) -> int:
        """The last revision in which a list of it may have changed: its objects, its definition,
        or who may list it. -1 while it is not served."""
        storage = self._store.storage
        try:
            key = self._store.registry.named(resource).key
        except KeyError:
            return -1
        return storage.changed(key, CRDS.key, *(one.key for one in ACCESS_RULES))

    @property
    def revision(self) -> int:
        """The resource version of the last write."""
        return self._store.storage.revision

    @staticmethod
    def _place(namespaced: bool, name: str, namespace: str | None) -> tuple[str, str]:
        return ((namespace or "default") if namespaced else "", name)


def _namespace_of(body: Mapping[str, Any]) -> str | None:
    namespace: str | None = body["metadata"].get("namespace")
    return namespace

"""The semantics of writing: creation, replacement, patches, server-side apply, deletion.

All rules for writes, over HTTP or directly from a test, are here: versions and
conversion, schemas, generations, optimistic concurrency, managed fields, garbage collection.
"""

import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tests.kube.api_server import admission, ownership, schemas
from tests.kube.api_server.conformance import Writer, conforming, object_to, placed, typed
from tests.kube.api_server.merging import json_patch, merge_patch, strategic_patch
from tests.kube.api_server.ownership import Manager
from tests.kube.api_server.resources import CRDS, NAMESPACES, Registry, Resource, from_definition
from tests.kube.api_server.status import (
    MODIFIED_MEANWHILE,
    already_exists,
    bad_request,
    conflict,
    not_found,
)
from tests.kube.api_server.storage import Place, Storage, place_of

Json = dict[str, Any]
Converter = Callable[[Json, str], Json]

NAMESPACES_FROM_START = ("default", "kube-node-lease", "kube-public", "kube-system")
_PATCHES: Mapping[str, Callable[[Any, Any], Any]] = {
    "merge": merge_patch,
    "strategic": strategic_patch,
    "json": json_patch,
}


def copied(body: Any) -> Any:
    """A deep copy of a JSON value, faster than copy.deepcopy."""
    return msgspec.json.decode(msgspec.json.encode(body))


class Store:
    """``converters``: name of a CustomResourceDefinition -> what shows an object in a version."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.storage = Storage()
        self.registry = Registry()
        self.converters: dict[str, Converter] = {}
        for name in NAMESPACES_FROM_START:
            self.write_new(NAMESPACES, "v1", "", {"metadata": {"name": name}}, Writer())

    def timestamp(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.clock()))

    def shown(self, resource: Resource, body: Json, version: str) -> Json:
        """The stored ``body`` as that version shows it; must not be changed by the caller."""
        wanted = resource.api_version(version)
        if body["apiVersion"] == wanted:
            return body
        return self._converted(resource, body, wanted)

    def _converted(self, resource: Resource, body: Json, wanted: str) -> Json:
        converter = self.converters.get(resource.qualified)
        if converter is None:
            return body | {"apiVersion": wanted}
        return converter(copied(body), wanted) | {"apiVersion": wanted}

    def read(self, resource: Resource, version: str, place: Place) -> Json:
        body = self.storage.read(resource.key, place)
        if body is None:
            raise not_found(resource, place[1])
        return self.shown(resource, body, version)

    # -- writing -----------------------------------------------------------------------------------

    def write_new(
        self,
        resource: Resource,
        version: str,
        namespace: str,
        body: Json,
        writer: Writer,
        *,
        applied: bool = False,
    ) -> Json:
        """Create. ``body`` is not kept. Returns the stored object in ``version``.

        ``applied``: its ``managedFields`` are right already.
        """
        body = typed(resource, version, copied(body))
        metadata = placed(resource, namespace, body)
        if "generateName" in metadata and not metadata.get("name"):
            letters = random.choices("bcdfghjklmnpqrstvwxz2456789", k=5)
            metadata["name"] = metadata["generateName"] + "".join(letters)
        admission.check_metadata(resource, body)
        if writer.trusted:
            metadata.pop("resourceVersion", None)
        elif metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        uid = str(uuid.uuid4())
        if not (writer.trusted and metadata.get("uid")):
            metadata["uid"] = uid
        if not (writer.trusted and metadata.get("creationTimestamp")):
            metadata["creationTimestamp"] = self.timestamp()
        if resource.custom or resource.kind in ("Pod", "Deployment"):
            metadata["generation"] = metadata.get("generation", 1) if writer.trusted else 1
        if resource.custom and resource.has_status and not writer.trusted:
            body.pop("status", None)
        body = conforming(resource, version, body, writer)
        if not resource.custom:
            admission.admit_new(resource, body, keep_status=writer.trusted, uid=uid)
        if not applied:
            manager = Manager(writer.manager, resource.api_version(version))
            keyed = not resource.custom
            ownership.record_update(None, body, manager, self.timestamp(), keyed=keyed)
        body = self._as_stored(resource, body)
        with self.storage.lock:
            self._check_namespace(resource, namespace, writer)
            place = place_of(body)
            if self.storage.read(resource.key, place) is not None:
                raise already_exists(resource, place[1])
            if not writer.dry_run:
                self.storage.write(resource.key, place, body)
                self._definition_changed(resource, body)
        return self.shown(resource, body, version)

    def write_over(
        self,
        resource: Resource,
        version: str,
        place: Place,
        body: Json,
        writer: Writer,
        *,
        applied: bool = False,
    ) -> Json:
        """Replace (or, by ``writer.subresource``, only the status). Returns the stored object.

        ``applied``: its ``managedFields`` are right already.
        """
        body = typed(resource, version, copied(body))
        metadata = placed(resource, place[0], body)
        name = metadata.setdefault("name", place[1])
        if name != place[1]:
            raise bad_request(
                f"the name of the object ({name}) does not match the name on the URL ({place[1]})"
            )
        with self.storage.lock:
            live = self.storage.read(resource.key, place)
            if live is None:
                raise not_found(resource, place[1])
            self._check_preconditions(resource, live, metadata)
            managed = metadata.get("managedFields", [])
            old = copied(self.shown(resource, live, version))
            if writer.subresource == "status":
                body = old | ({"status": body["status"]} if "status" in body else {})
            else:
                if resource.has_status and not writer.trusted:
                    body.pop("status", None)
                    body |= {"status": old["status"]} if "status" in old else {}
                elif writer.trusted and "status" not in body and "status" in old:
                    body["status"] = old["status"]
            for inherited in (
                *("uid", "creationTimestamp", "generation"),
                *("deletionTimestamp", "deletionGracePeriodSeconds"),
            ):
                if inherited in old["metadata"]:
                    body["metadata"][inherited] = old["metadata"][inherited]
            body["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
            admission.check_metadata(resource, body)
            body = conforming(resource, version, body, writer)
            if resource.kind == "Pod" and not writer.trusted:
                admission.check_pod_update(old, body)
            if applied:
                body["metadata"]["managedFields"] = managed
            else:
                body["metadata"]["managedFields"] = old["metadata"].get("managedFields", [])
                if body == old:
                    return self.shown(resource, live, version)
                manager = Manager(
                    writer.manager,
                    resource.api_version(version),
                    subresource=writer.subresource,
                )
                keyed = not resource.custom
                ownership.record_update(old, body, manager, self.timestamp(), keyed=keyed)
            body = self._as_stored(resource, body)
            return self._stored_over(resource, version, place, live, body, writer)

    def _stored_over(
        self,
        resource: Resource,
        version: str,
        place: Place,
        live: Json,
        body: Json,
        writer: Writer,
    ) -> Json:
        if _without_times(body) == _without_times(live):
            return self.shown(resource, live, version)
        if "generation" in live["metadata"] and _intent(resource, body) != _intent(resource, live):
            body["metadata"]["generation"] = live["metadata"]["generation"] + 1
        if writer.dry_run:
            return self.shown(resource, body, version)
        self.storage.write(resource.key, place, body)
        self._definition_changed(resource, body)
        metadata = body["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            return self._removed(resource, place)
        return self.shown(resource, body, version)

    def patch(
        self,
        resource: Resource,
        version: str,
        place: Place,
        kind: str,
        patch: Any,
        writer: Writer,
    ) -> Json:
        """``kind``: merge, strategic or json. Atomic: no write comes between reading and this."""
        with self.storage.lock:
            live = self.read(resource, version, place)
            result = _PATCHES[kind](live, patch)
            if not isinstance(result, dict) or not isinstance(result.get("metadata"), dict):
                raise bad_request("the patched object has no metadata")
            return self.write_over(resource, version, place, result, writer)

    def apply(
        self, resource: Resource, version: str, place: Place, config: Json, writer: Writer
    ) -> tuple[Json, bool]:
        """Server-side apply; (object, whether it was created)."""
        config = typed(resource, version, copied(config))
        metadata = placed(resource, place[0], config)
        metadata.setdefault("name", place[1])
        if metadata.pop("managedFields", None):
            raise bad_request("metadata.managedFields must be nil")
        if resource.custom:
            config, unknown = schemas.prune(config, resource.schemas[version])
            object_to(unknown, resource, version, writer)
        manager = Manager(
            writer.manager, resource.api_version(version), "Apply", writer.subresource
        )
        keyed = not resource.custom
        with self.storage.lock:
            stored = self.storage.read(resource.key, place)
            live = None if stored is None else copied(self.shown(resource, stored, version))
            self._check_preconditions(resource, live, metadata)
            metadata.pop("resourceVersion", None)
            uid = metadata.pop("uid", None)
            if uid and live is None:
                raise conflict(
                    resource,
                    place[1],
                    f"uid mismatch: the provided object specified uid {uid}, and no existing "
                    "object was found",
                )
            result = ownership.apply(
                live, config, manager, self.timestamp(), force=writer.force, keyed=keyed
            )
            if live is None:
                if writer.subresource:
                    raise not_found(resource, place[1])
                created = self.write_new(resource, version, place[0], result, writer, applied=True)
                return created, True
            return (
                self.write_over(resource, version, place, result, writer, applied=True),
                False,
            )

    # -- deleting ----------------------------------------------------------------------------------

    def delete(
        self, resource: Resource, version: str, place: Place, options: Mapping[str, Any]
    ) -> Json:
        """At once, with what it owns (``propagationPolicy: Orphan`` leaves that), unless there are
        finalizers: then it is only marked. Returns the last state."""
        with self.storage.lock:
            live = self.storage.read(resource.key, place)
            if live is None:
                raise not_found(resource, place[1])
            self._check_preconditions(resource, live, options.get("preconditions") or {})
            if live["metadata"].get("finalizers"):
                marked = copied(live)
                if "deletionTimestamp" not in marked["metadata"]:
                    marked["metadata"]["deletionTimestamp"] = self.timestamp()
                    marked["metadata"]["deletionGracePeriodSeconds"] = 0
                    self.storage.write(resource.key, place, marked)
                return self.shown(resource, marked, version)
            orphan = options.get("propagationPolicy") == "Orphan"
            return self._removed(resource, place, version, orphan=orphan)

    def _removed(
        self, resource: Resource, place: Place, version: str | None = None, *, orphan: bool = False
    ) -> Json:
        last = self.storage.remove(resource.key, place)
        uid = last["metadata"]["uid"]
        for key, other, body in self.storage.everything():
            owners = body["metadata"].get("ownerReferences") or ()
            owned = any(owner.get("uid") == uid for owner in owners)
            inside = resource.kind == "Namespace" and other[0] == place[1]
            instance = resource.kind == CRDS.kind and place[1] == f"{key[1]}.{key[0]}"
            if not (owned or inside or instance) or self.storage.read(key, other) is None:
                continue
            dependent = self.registry.by_kind(key[0], body["kind"])
            if dependent is None:
                continue
            left = [owner for owner in owners if owner.get("uid") != uid]
            if owned and (orphan or left):
                metadata = body["metadata"] | {"ownerReferences": left}
                self.storage.write(key, other, body | {"metadata": metadata})
            else:
                self._removed(dependent, other)
        if resource.kind == CRDS.kind:
            group_and_plural = last["spec"]["group"], last["spec"]["names"]["plural"]
            self.registry.remove(*group_and_plural)
        return self.shown(resource, last, version or resource.storage_version)

    # -- what both ways of writing need ------------------------------------------------------------

    def _check_namespace(self, resource: Resource, namespace: str, writer: Writer) -> None:
        if not resource.namespaced or self.storage.read(NAMESPACES.key, ("", namespace)):
            return
        if not writer.trusted:
            raise not_found(NAMESPACES, namespace)
        self.write_new(NAMESPACES, "v1", "", {"metadata": {"name": namespace}}, Writer())

    def _check_preconditions(
        self, resource: Resource, live: Json | None, wanted: Mapping[str, Any]
    ) -> None:
        if live is None:
            return
        metadata = live["metadata"]
        if wanted.get("uid", metadata["uid"]) != metadata["uid"]:
            raise conflict(
                resource,
                metadata["name"],
                f"Precondition failed: UID in precondition: {wanted['uid']}, UID in object meta: "
                f"{metadata['uid']}",
            )
        version = wanted.get("resourceVersion")
        if version and version != metadata["resourceVersion"]:
            raise conflict(resource, metadata["name"], MODIFIED_MEANWHILE)

    def _as_stored(self, resource: Resource, body: Json) -> Json:
        """In the version that objects are kept in; pruned again where a converter wrote it."""
        stored = resource.api_version()
        if body["apiVersion"] == stored:
            return body
        converted = self._converted(resource, body, stored)
        if resource.qualified not in self.converters:
            return converted
        schema = resource.schemas[resource.storage_version]
        converted, _ = schemas.prune(converted, schema)
        schemas.set_defaults(converted, schema)
        return converted

    def _definition_changed(self, resource: Resource, body: Json) -> None:
        if resource.kind == CRDS.kind:
            self.registry.add(from_definition(body))


def _intent(resource: Resource, body: Json) -> Json:
    left_out = {"metadata", "apiVersion"} | ({"status"} if resource.has_status else set())
    return {name: value for name, value in body.items() if name not in left_out}


def _without_times(body: Json) -> Json:
    entries = [entry | {"time": ""} for entry in body["metadata"].get("managedFields", ())]
    metadata = body["metadata"] | {"managedFields": entries}
    return body | {"metadata": metadata}

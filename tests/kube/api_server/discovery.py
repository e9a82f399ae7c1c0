"""Discovery of resources for clients: /version, /api, /apis and a little OpenAPI.

The OpenAPI documents describe no fields. They name, for each kind, a PATCH operation with the
``fieldValidation`` parameter, which is what kubectl looks for before it leaves validation to the
server.
"""

from typing import Any

from tests.kube.api_server.resources import Registry, Resource

Json = dict[str, Any]

VERSION: Json = {
    "major": "1",
    "minor": "34",
    "gitVersion": "v1.34.0",
    "gitCommit": "0000000000000000000000000000000000000000",
    "gitTreeState": "clean",
    "buildDate": "2025-08-27T00:00:00Z",
    "goVersion": "go1.24.6",
    "compiler": "gc",
    "platform": "linux/amd64",
}

_SUBRESOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "status": ("", ("get", "patch", "update")),
    "binding": ("Binding", ("create",)),
    "exec": ("PodExecOptions", ("create", "get")),
    "log": ("Pod", ("get",)),
    "portforward": ("PodPortForwardOptions", ("create", "get")),
}


def document(registry: Registry, path: str) -> Json | None:
    """The discovery document at ``path`` (no trailing slash), None where there is none."""
    parts = path.strip("/").split("/")
    if parts == ["version"]:
        return VERSION
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    groups = registry.groups()
    if parts == ["apis"]:
        named = [_group(name, groups[name]) for name in groups if name]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}
    if parts == ["api", "v1"]:
        return _resource_list(registry, "", "v1")
    if parts[0] == "apis" and len(parts) in (2, 3) and parts[1] and parts[1] in groups:
        if len(parts) == 2:
            return {"kind": "APIGroup", "apiVersion": "v1"} | _group(parts[1], groups[parts[1]])
        if parts[2] in groups[parts[1]]:
            return _resource_list(registry, parts[1], parts[2])
    if parts[:2] == ["openapi", "v3"]:
        return _openapi(registry, "/".join(parts[2:]))
    return None


def _group(name: str, versions: tuple[str, ...]) -> Json:
    entries = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": entries, "preferredVersion": entries[0]}


def _resource_list(registry: Registry, group: str, version: str) -> Json:
    entries: list[Json] = []
    for resource in registry:
        if resource.group == group and version in resource.versions:
            entries.append(_entry(resource))
            for name in resource.subresources:
                kind, verbs = _SUBRESOURCES[name]
                entries.append(
                    {
                        "name": f"{resource.plural}/{name}",
                        "singularName": "",
                        "namespaced": resource.namespaced,
                        "kind": kind or resource.kind,
                        "verbs": list(verbs),
                    }
                )
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": entries,
    }


def _entry(resource: Resource) -> Json:
    entry: Json = {
        "name": resource.plural,
        "singularName": resource.singular or resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    return entry


def _openapi(registry: Registry, place: str) -> Json | None:
    places = {
        _openapi_place(resource, version): (resource.group, version)
        for resource in registry
        for version in resource.versions
    }
    if not place:
        return {
            "paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}"} for name in sorted(places)}
        }
    if place not in places:
        return None
    group, version = places[place]
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
        "paths": {
            f"/{place}/{resource.plural}/{{name}}": {"patch": _patch_operation(resource, version)}
            for resource in registry
            if resource.group == group and version in resource.versions
        },
        "components": {"schemas": {}},
    }


def _openapi_place(resource: Resource, version: str) -> str:
    return f"apis/{resource.group}/{version}" if resource.group else f"api/{version}"


def _patch_operation(resource: Resource, version: str) -> Json:
    return {
        "parameters": [
            {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}},
            {"name": "fieldManager", "in": "query", "schema": {"type": "string"}},
            {"name": "dryRun", "in": "query", "schema": {"type": "string"}},
        ],
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": {
            "group": resource.group,
            "version": version,
            "kind": resource.kind,
        },
    }

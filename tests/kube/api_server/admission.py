"""Validation and defaults of built-in kinds: names, pods, definitions.

Far less than the real server checks; what is here is what Dynamo's operator, dynctl and people at
kubectl run into.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.kube.api_server.resources import Resource
from tests.kube.api_server.rules import unknown_rules
from tests.kube.api_server.status import Cause, invalid

Json = dict[str, Any]

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_RBAC_GROUP = "rbac.authorization.k8s.io"


def check_metadata(resource: Resource, body: Json) -> None:
    """Raises 422 for a name or labels that Kubernetes does not take."""
    metadata = body["metadata"]
    causes = []
    name = metadata.get("name", "")
    if not name:
        causes.append(
            Cause(
                "metadata.name",
                "FieldValueRequired",
                "Required value: name or generateName is required",
            )
        )
    elif resource.group != _RBAC_GROUP and (len(name) > 253 or not _SUBDOMAIN.fullmatch(name)):
        causes.append(
            Cause(
                "metadata.name",
                "FieldValueInvalid",
                f"Invalid value: {json.dumps(name)}: a lowercase RFC 1123 subdomain must consist "
                "of lower case alphanumeric characters, '-' or '.', and must start and end with "
                "an alphanumeric character (e.g. 'example.com', regex used for validation is "
                "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')",
            )
        )
    causes += _label_causes(metadata.get("labels") or {})
    if causes:
        raise invalid(resource.kind, name, causes, resource.group)


def _label_causes(labels: Json) -> Iterator[Cause]:
    for key, value in labels.items():
        prefix, slash, name = key.rpartition("/")
        if (
            (slash and (not _SUBDOMAIN.fullmatch(prefix) or len(prefix) > 253))
            or not _LABEL_PART.fullmatch(name)
            or len(name) > 63
        ):
            yield Cause(
                "metadata.labels",
                "FieldValueInvalid",
                f"Invalid value: {json.dumps(key)}: name part must consist of alphanumeric "
                "characters, '-', '_' or '.', and must start and end with an alphanumeric "
                "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for "
                "validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')",
            )
        if not isinstance(value, str) or (value and not _LABEL_PART.fullmatch(value)):
            yield Cause(
                "metadata.labels",
                "FieldValueInvalid",
                f"Invalid value: {json.dumps(value)}: a valid label must be an empty string or "
                "consist of alphanumeric characters, '-', '_' or '.', and must start and end "
                "with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', "
                "regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')",
            )
        elif len(value) > 63:
            yield Cause(
                "metadata.labels", "FieldValueTooLong", "Too long: may not be more than 63 bytes"
            )


def admit_new(resource: Resource, body: Json, *, keep_status: bool, uid: str) -> None:
    """Check and fill in a built-in object that is about to be created, in place."""
    if resource.kind == "Pod":
        _admit_pod(body, keep_status=keep_status)
    elif resource.kind == "Namespace":
        body["status"] = {"phase": "Active"}
        body["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = body["metadata"][
            "name"
        ]
    elif resource.kind == "CustomResourceDefinition":
        _admit_definition(body)
    elif resource.kind == "Deployment":
        if not keep_status:
            body["status"] = {}
        body.setdefault("spec", {}).setdefault("replicas", 1)
    elif resource.kind == "Service":
        spec = body.setdefault("spec", {})
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("clusterIP", f"10.96.{int(uid[:2], 16)}.{int(uid[2:4], 16)}")
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
        body.setdefault("status", {"loadBalancer": {}})


_POD_DEFAULTS: Json = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "serviceAccountName": "default",
    "serviceAccount": "default",
    "schedulerName": "default-scheduler",
    "enableServiceLinks": True,
    "preemptionPolicy": "PreemptLowerPriority",
    "priority": 0,
    "securityContext": {},
}
_CONTAINER_DEFAULTS: Json = {
    "resources": {},
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "imagePullPolicy": "IfNotPresent",
}


def _admit_pod(body: Json, *, keep_status: bool) -> None:
    spec = body.get("spec")
    causes = []
    if not isinstance(spec, dict) or not spec.get("containers"):
        causes.append(Cause("spec.containers", "FieldValueRequired", "Required value"))
        spec = {}
    for n, container in enumerate(spec.get("containers", [])):
        for name in ("name", "image"):
            if not container.get(name):
                path = f"spec.containers[{n}].{name}"
                causes.append(Cause(path, "FieldValueRequired", "Required value"))
    if causes:
        raise invalid("Pod", body["metadata"].get("name", ""), causes)
    if "serviceAccountName" in spec:
        spec["serviceAccount"] = spec["serviceAccountName"]
    for name, value in _POD_DEFAULTS.items():
        spec.setdefault(name, value)
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        for name, value in _CONTAINER_DEFAULTS.items():
            container.setdefault(name, value)
    for volume in spec.get("volumes", ()):
        if "downwardAPI" in volume:
            volume["downwardAPI"].setdefault("defaultMode", 420)
    if not keep_status or "status" not in body:
        body["status"] = {"phase": "Pending", "qosClass": "BestEffort"}


_MUTABLE_IN_PODS = ("image", "imagePullPolicy", "resources")


def check_pod_update(old: Json, new: Json) -> None:
    """Raises 422 when more of a pod's spec changes than its images and tolerations."""
    if _frozen(old["spec"]) != _frozen(new.get("spec", {})):
        message = (
            "Forbidden: pod updates may not change fields other than "
            "`spec.containers[*].image`,`spec.initContainers[*].image`,"
            "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
            "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it "
            "was previously negative)"
        )
        name = new["metadata"]["name"]
        raise invalid("Pod", name, [Cause("spec", "FieldValueForbidden", message)])


def _frozen(spec: Json) -> Json:
    free = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds")
    kept = {name: value for name, value in spec.items() if name not in free}
    for field in ("containers", "initContainers"):
        if field in kept:
            kept[field] = [
                {name: value for name, value in container.items() if name not in _MUTABLE_IN_PODS}
                for container in kept[field]
            ]
    return kept


def _admit_definition(body: Json) -> None:
    spec = body.get("spec", {})
    name = body["metadata"].get("name", "")
    causes = []
    names = spec.get("names", {})
    expected = f"{names.get('plural', '')}.{spec.get('group', '')}"
    if name != expected:
        causes.append(
            Cause(
                "metadata.name",
                "FieldValueInvalid",
                f'Invalid value: "{name}": must be spec.names.plural+"."+spec.group',
            )
        )
    versions = spec.get("versions") or []
    if sum(bool(version.get("storage")) for version in versions) != 1:
        causes.append(
            Cause(
                "spec.versions",
                "FieldValueInvalid",
                "Invalid value: must have exactly one version marked as storage version",
            )
        )
    causes += [
        Cause("spec.versions", "FieldValueInvalid", f"no predicate in rules.py for: {message}")
        for message in unknown_rules(versions)
    ]
    if causes:
        raise invalid("CustomResourceDefinition", name, causes, "apiextensions.k8s.io")
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", f"{names['kind']}List")
    storage = next(version["name"] for version in versions if version.get("storage"))
    body["status"] = {
        "acceptedNames": names,
        "storedVersions": [storage],
        "conditions": [
            {"type": kind, "status": "True", "reason": reason, "message": message}
            for kind, reason, message in (
                ("NamesAccepted", "NoConflicts", "no conflicts found"),
                ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
            )
        ],
    }

"""The contract of a Kubernetes API, through the official client.

Held against the test API server here, and by tests/kubernetes against a real one: what holds here
and not there is a fault of the test server. Each test has a namespace of its own, which is deleted;
nothing outside of it is changed.
"""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

from tests.waiting import patience

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """One namespace of one cluster. ``names`` of objects are free to use in it."""

    core: Any  # CoreV1Api: whose types have an optional None at every step.
    namespace: str

    def write(self, name: str, labels: Json | None = None, **data: str) -> Any:
        body = {"metadata": {"name": name, "labels": labels or {}}, "data": data}
        return self.core.create_namespaced_config_map(self.namespace, body)

    def names(self, **query: Any) -> list[str]:
        found = self.core.list_namespaced_config_map(self.namespace, **query)
        return [item.metadata.name for item in found.items if item.metadata.name != _GIVEN]

    def patch(self, name: str, body: Any, content_type: str, **query: Any) -> Json:
        """Patch a ConfigMap with a body of whatever content type."""
        # A default header is the one way that the client has had in all of its versions.
        headers = self.core.api_client.default_headers
        headers["Content-Type"] = content_type
        try:
            found = self.core.patch_namespaced_config_map(name, self.namespace, body, **query)
        finally:
            del headers["Content-Type"]
        shown: Json = self.core.api_client.sanitize_for_serialization(found)
        return shown


_GIVEN = "kube-root-ca.crt"
"""What a real cluster puts into every namespace."""


@pytest.fixture
def place(kubeconfig: Path) -> Iterator[Place]:
    name = f"dynctl-contract-{uuid.uuid4().hex[:8]}"
    with config.new_client_from_config(config_file=str(kubeconfig)) as connection:
        core: Any = client.CoreV1Api(connection)
        core.create_namespace({"metadata": {"name": name}})
        try:
            yield Place(core, name)
        finally:
            core.delete_namespace(name)


def refusal(code: int, reason: str) -> Any:
    """Expect an ApiException with this status and this reason in its Status body."""
    return pytest.raises(ApiException, check=lambda error: _is(error, code, reason))


def _is(error: ApiException, code: int, reason: str) -> bool:
    return error.status == code and f'"reason":"{reason}"' in str(error.body).replace(" ", "")


# -- writing and reading -------------------------------------------------------------------------


def test_a_created_object_has_identity_time_and_revision(place: Place):
    made = place.write("a", colour="red").metadata
    assert (made.name, made.namespace) == ("a", place.namespace)
    assert str(uuid.UUID(made.uid)) == made.uid
    assert made.creation_timestamp is not None
    assert int(made.resource_version) > 0
    read = place.core.read_namespaced_config_map("a", place.namespace)
    assert (read.metadata.uid, read.data) == (made.uid, {"colour": "red"})


def test_revisions_grow_with_every_write_of_whatever_object(place: Place):
    written = [int(place.write(name).metadata.resource_version) for name in ("a", "b", "c")]
    assert written == sorted(set(written))
    listed = place.core.list_namespaced_config_map(place.namespace).metadata.resource_version
    assert int(listed) >= written[-1]


def test_a_generated_name_starts_with_its_prefix(place: Place):
    body = {"metadata": {"generateName": "worker-"}}
    made = [place.core.create_namespaced_config_map(place.namespace, body) for _ in range(2)]
    names = {item.metadata.name for item in made}
    assert len(names) == 2
    assert all(name.startswith("worker-") and len(name) == len("worker-") + 5 for name in names)


def test_the_second_of_a_name_is_refused(place: Place):
    place.write("a")
    with refusal(409, "AlreadyExists") as refused:
        place.write("a")
    assert 'configmaps \\"a\\" already exists' in refused.value.body


def test_what_is_not_there_is_not_found(place: Place):
    with refusal(404, "NotFound") as refused:
        place.core.read_namespaced_config_map("nobody", place.namespace)
    assert 'configmaps \\"nobody\\" not found' in refused.value.body


def test_a_namespace_has_to_be_there_first(place: Place):
    absent = f"{place.namespace}-absent"
    with refusal(404, "NotFound") as refused:
        place.core.create_namespaced_config_map(absent, {"metadata": {"name": "a"}})
    assert f'namespaces \\"{absent}\\" not found' in refused.value.body


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "a" * 254])
def test_a_name_that_dns_would_not_take_is_invalid(place: Place, name: str):
    with refusal(422, "Invalid") as refused:
        place.write(name)
    assert "metadata.name" in refused.value.body


def test_a_label_value_that_kubernetes_would_not_take_is_invalid(place: Place):
    with refusal(422, "Invalid") as refused:
        place.write("a", {"zone": "not a value"})
    assert "metadata.labels" in refused.value.body


def test_a_pod_without_containers_is_invalid(place: Place):
    body = {"metadata": {"name": "a"}, "spec": {"containers": []}}
    with refusal(422, "Invalid") as refused:
        place.core.create_namespaced_pod(place.namespace, body)
    assert 'Pod \\"a\\" is invalid: spec.containers: Required value' in refused.value.body


def test_a_replacement_with_a_stale_revision_conflicts(place: Place):
    stale = place.write("a", colour="red")
    fresh = place.core.read_namespaced_config_map("a", place.namespace)
    fresh.data = {"colour": "blue"}
    place.core.replace_namespaced_config_map("a", place.namespace, fresh)
    stale.data = {"colour": "green"}
    with refusal(409, "Conflict") as refused:
        place.core.replace_namespaced_config_map("a", place.namespace, stale)
    assert "the object has been modified; please apply your changes" in refused.value.body
    assert place.core.read_namespaced_config_map("a", place.namespace).data["colour"] == "blue"


def test_a_replacement_that_changes_nothing_makes_no_revision(place: Place):
    before = place.write("a", colour="red")
    after = place.core.replace_namespaced_config_map("a", place.namespace, before)
    assert after.metadata.resource_version == before.metadata.resource_version


def test_what_is_deleted_is_gone_and_its_name_free_with_a_new_identity(place: Place):
    first = place.write("a")
    place.core.delete_namespaced_config_map("a", place.namespace)
    with refusal(404, "NotFound"):
        place.core.read_namespaced_config_map("a", place.namespace)
    assert place.write("a").metadata.uid != first.metadata.uid


def test_deleting_by_another_uid_is_refused(place: Place):
    place.write("a")
    options = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=str(uuid.uuid4())))
    with refusal(409, "Conflict"):
        place.core.delete_namespaced_config_map("a", place.namespace, body=options)


def test_what_an_object_owns_goes_with_it(place: Place):
    owner = place.write("owner")
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner"}
    reference["uid"] = owner.metadata.uid
    metadata = {"name": "owned", "ownerReferences": [reference]}
    place.core.create_namespaced_config_map(place.namespace, {"metadata": metadata})
    place.core.delete_namespaced_config_map("owner", place.namespace)
    deadline = time.monotonic() + patience(30)
    while place.names():
        assert time.monotonic() < deadline, "the owned object is still there"
        time.sleep(0.05)


# -- patches ---------------------------------------------------------------------------------------


def test_a_merge_patch_merges_objects_and_removes_by_null(place: Place):
    place.write("a", {"x": "1", "y": "2"}, colour="red", size="big")
    body = {"metadata": {"labels": {"x": None, "z": "3"}}, "data": {"size": None}}
    after = place.patch("a", body, "application/merge-patch+json")
    assert after["metadata"]["labels"] == {"y": "2", "z": "3"}
    assert after["data"] == {"colour": "red"}


def test_a_json_patch_follows_its_pointers_and_its_tests(place: Place):
    place.write("a", {"topology.kubernetes.io/zone": "a"})
    pointer = "/metadata/labels/topology.kubernetes.io~1zone"
    body = [
        {"op": "test", "path": pointer, "value": "a"},
        {"op": "replace", "path": pointer, "value": "b"},
        {"op": "add", "path": "/data", "value": {"k": "v"}},
    ]
    after = place.patch("a", body, "application/json-patch+json")
    assert after["metadata"]["labels"] == {"topology.kubernetes.io/zone": "b"}
    assert after["data"] == {"k": "v"}
    with refusal(422, "Invalid"):
        place.patch("a", body, "application/json-patch+json")


def test_a_strategic_patch_merges_lists_by_their_key(place: Place):
    containers = [
        {"name": "main", "image": "engine:1", "env": [{"name": "A", "value": "1"}]},
        {"name": "side", "image": "side:1"},
    ]
    # Nobody schedules it: the real cluster must not run it.
    spec = {"containers": containers, "schedulerName": "nobody"}
    place.core.create_namespaced_pod(place.namespace, {"metadata": {"name": "a"}, "spec": spec})
    change = {"spec": {"containers": [{"name": "main", "image": "engine:2"}]}}
    place.core.patch_namespaced_pod("a", place.namespace, change)
    after = place.core.read_namespaced_pod("a", place.namespace).spec.containers
    assert [(one.name, one.image) for one in after] == [("main", "engine:2"), ("side", "side:1")]
    assert after[0].env[0].value == "1"


def test_of_a_pods_spec_little_may_change(place: Place):
    spec = {"containers": [{"name": "main", "image": "e"}], "schedulerName": "nobody"}
    place.core.create_namespaced_pod(place.namespace, {"metadata": {"name": "a"}, "spec": spec})
    change = {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}]}}
    with refusal(422, "Invalid") as refused:
        place.core.patch_namespaced_pod("a", place.namespace, change)
    assert "pod updates may not change fields other than" in refused.value.body


def test_a_patch_of_an_unknown_content_type_is_unsupported(place: Place):
    place.write("a")
    with refusal(415, "UnsupportedMediaType"):
        place.patch("a", {"data": {}}, "application/json")


def test_server_side_apply_creates_then_removes_fields(place: Place):
    kind = {"apiVersion": "v1", "kind": "ConfigMap"}
    apply, query = "application/apply-patch+yaml", {"field_manager": "witness", "force": True}
    first = kind | {"metadata": {"name": "a", "labels": {"x": "1"}}, "data": {"k": "1", "l": "2"}}
    place.patch("a", first, apply, **query)
    place.patch("a", {"data": {"m": "3"}}, "application/merge-patch+json")
    second = kind | {"metadata": {"name": "a"}, "data": {"k": "4"}}
    after = place.patch("a", second, apply, **query)
    assert after["data"] == {"k": "4", "m": "3"}
    assert "x" not in after["metadata"].get("labels", {})
    entries = {entry["manager"]: entry for entry in after["metadata"]["managedFields"]}
    assert entries["witness"]["operation"] == "Apply"
    assert entries["witness"]["fieldsV1"] == {"f:data": {"f:k": {}}}


def test_server_side_apply_does_not_take_what_another_manager_wrote(place: Place):
    kind = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    apply = "application/apply-patch+yaml"
    place.patch("a", kind | {"data": {"k": "1"}}, apply, field_manager="one")
    with refusal(409, "Conflict") as refused:
        place.patch("a", kind | {"data": {"k": "2"}}, apply, field_manager="two")
    assert 'conflict with \\"one\\"' in refused.value.body
    assert ".data.k" in refused.value.body
    after = place.patch("a", kind | {"data": {"k": "2"}}, apply, field_manager="two", force=True)
    assert after["data"] == {"k": "2"}


def test_who_wrote_a_label_is_recorded(place: Place):
    place.core.create_namespaced_config_map(
        place.namespace, {"metadata": {"name": "a"}, "data": {"k": "v"}}, field_manager="maker"
    )
    change = {"metadata": {"labels": {"zone": "a"}}}
    after = place.patch("a", change, "application/merge-patch+json", field_manager="controller")
    (entry,) = [e for e in after["metadata"]["managedFields"] if e["manager"] == "controller"]
    assert entry["operation"] == "Update"
    assert "f:zone" in entry["fieldsV1"]["f:metadata"]["f:labels"]


def test_an_object_that_was_made_of_a_name_alone_is_not_tracked(place: Place):
    place.core.create_namespaced_config_map(place.namespace, {"metadata": {"name": "a"}})
    change = {"metadata": {"labels": {"zone": "a"}}}
    after = place.patch("a", change, "application/merge-patch+json", field_manager="controller")
    assert not after["metadata"].get("managedFields")


# -- lists -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("role=decode", ["a", "b"]),
        ("role==decode,zone=x", ["a"]),
        ("role!=decode", ["c", "d"]),
        ("zone in (x, y)", ["a", "b"]),
        ("zone notin (x)", ["b", "c", "d"]),
        ("zone", ["a", "b"]),
        ("!zone", ["c", "d"]),
        ("zone,role in (decode,prefill),zone!=y", ["a"]),
        ("zone=", []),
    ],
)
def test_label_selectors(place: Place, selector: str, chosen: list[str]):
    place.write("a", {"role": "decode", "zone": "x"})
    place.write("b", {"role": "decode", "zone": "y"})
    place.write("c", {"role": "prefill"})
    place.write("d")
    found = place.names(label_selector=selector)
    assert found == chosen


def test_field_selectors_know_few_fields_and_refuse_the_others(place: Place):
    for name in ("a", "b"):
        place.write(name)
    assert place.names(field_selector="metadata.name=b") == ["b"]
    assert place.names(field_selector="metadata.name!=b") == ["a"]
    with refusal(400, "BadRequest") as refused:
        place.names(field_selector="data.colour=red")
    assert "data.colour" in refused.value.body


def test_pages_show_one_revision_whatever_is_written_between_them(place: Place):
    for number in range(5):
        place.write(f"a{number}")
    selector = {"field_selector": f"metadata.name!={_GIVEN}"}
    first = place.core.list_namespaced_config_map(place.namespace, limit=2, **selector)
    place.write("a9")
    place.core.delete_namespaced_config_map("a3", place.namespace)
    second = place.core.list_namespaced_config_map(
        place.namespace, limit=2, _continue=first.metadata._continue, **selector
    )
    third = place.core.list_namespaced_config_map(
        place.namespace, limit=2, _continue=second.metadata._continue, **selector
    )
    names = [item.metadata.name for page in (first, second, third) for item in page.items]
    assert names == ["a0", "a1", "a2", "a3", "a4"]
    assert not third.metadata._continue
    assert first.metadata.resource_version == third.metadata.resource_version


def test_a_first_page_has_the_number_of_remaining_items(place: Place):
    for number in range(3):
        place.write(f"a{number}")
    everything = place.core.list_namespaced_config_map(place.namespace)
    page = place.core.list_namespaced_config_map(place.namespace, limit=1)
    assert page.metadata.remaining_item_count == len(everything.items) - 1


def test_a_continue_token_of_no_list_is_refused(place: Place):
    with refusal(400, "BadRequest"):
        place.names(limit=1, _continue="nonsense")


# -- watches ---------------------------------------------------------------------------------------


def watched(place: Place, revision: str, count: int, **query: Any) -> list[tuple[str, str]]:
    """(type, name) of the first ``count`` events after ``revision``."""
    found: list[tuple[str, str]] = []
    watching = watch.Watch()
    for event in watching.stream(
        place.core.list_namespaced_config_map,
        place.namespace,
        resource_version=revision,
        timeout_seconds=20,
        **query,
    ):
        found.append((event["type"], event["object"].metadata.name))
        if len(found) == count:
            watching.stop()
    return found


def test_a_watch_has_the_events_since_its_revision(place: Place):
    place.write("before")
    revision = place.core.list_namespaced_config_map(place.namespace).metadata.resource_version
    place.write("a")
    place.patch("a", {"data": {"k": "v"}}, "application/merge-patch+json")
    place.core.delete_namespaced_config_map("a", place.namespace)
    assert watched(place, revision, 3) == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


def test_through_a_selector_what_stops_matching_is_deleted(place: Place):
    revision = place.core.list_namespaced_config_map(place.namespace).metadata.resource_version
    place.write("other")
    place.write("a", {"in": "no"})
    for value in ("yes", "still", "no", "yes"):
        change = {"metadata": {"labels": {"in": value}}}
        place.patch("a", change, "application/merge-patch+json")
    place.core.delete_namespaced_config_map("a", place.namespace)
    found = watched(place, revision, 5, label_selector="in in (yes, still)")
    kinds = ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    assert found == [(kind, "a") for kind in kinds]


def test_a_watch_ends_when_its_time_is_up(place: Place):
    revision = place.core.list_namespaced_config_map(place.namespace).metadata.resource_version
    stream = watch.Watch().stream(
        place.core.list_namespaced_config_map,
        place.namespace,
        resource_version=revision,
        timeout_seconds=1,
        field_selector=f"metadata.name!={_GIVEN}",
    )
    assert list(stream) == []


# -- access ----------------------------------------------------------------------------------------


def test_an_administrator_gets_its_permissions(place: Place):
    attributes = client.V1ResourceAttributes(
        namespace=place.namespace, verb="create", resource="pods", subresource="exec"
    )
    body = client.V1SelfSubjectAccessReview(
        spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
    )
    review: Any = client.AuthorizationV1Api(place.core.api_client)
    assert review.create_self_subject_access_review(body).status.allowed is True

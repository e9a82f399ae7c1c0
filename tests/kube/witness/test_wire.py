"""Responses on the wire: lists, formats, refusals, dates, and the log of requests."""

import email.utils
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kube import crds
from tests.kube.api_server import ApiServer, StatusError
from tests.kube.client import Api, ApiError
from tests.kube.objects.small import config_map, pod, running

PODS = "/api/v1/namespaces/default/pods"
MAPS = "/api/v1/namespaces/default/configmaps"
NOON = 1795262400.0
Json = dict[str, Any]


@pytest.fixture
def stopped_clock() -> Iterator[ApiServer]:
    """A server whose time is 2026-11-21 12:00:00 UTC, for ever."""
    with ApiServer(clock=lambda: NOON) as server:
        yield server


def test_one_clock_rules_times_ages_and_the_date_header(stopped_clock: ApiServer):
    with Api(stopped_clock.url) as api:
        made = api.create(PODS, pod("web"))
        assert made["metadata"]["creationTimestamp"] == "2026-11-21T12:00:00Z"
        (entry,) = made["metadata"]["managedFields"]
        assert entry["time"] == "2026-11-21T12:00:00Z"
        response = api.http.get("/api/v1/nodes")
        dated = email.utils.parsedate_to_datetime(response.headers["Date"])
        assert dated.timestamp() == NOON
        refused = api.http.get("/api/v1/nodes/none")
        assert refused.headers["Date"] == response.headers["Date"]


def test_items_of_a_built_in_list_repeat_no_kind_and_those_of_a_custom_one_do(
    api_server: ApiServer, api: Api
):
    crds.install(api_server)
    api_server.store.create(pod("web"))
    found = api.get(PODS)
    assert (found["kind"], found["apiVersion"]) == ("PodList", "v1")
    assert "kind" not in found["items"][0]
    made = {"kind": "PodCliqueSet", "apiVersion": "grove.io/v1alpha1", "metadata": {"name": "p"}}
    api_server.store.create(made)
    found = api.get("/apis/grove.io/v1alpha1/podcliquesets")
    assert found["kind"] == "PodCliqueSetList"
    assert found["items"][0]["kind"] == "PodCliqueSet"


def test_lists_go_by_namespace_and_name_and_over_all_namespaces(api_server: ApiServer, api: Api):
    for namespace, name in (("b", "x"), ("a", "z"), ("a", "y"), ("default", "w")):
        api_server.store.create(pod(name, namespace))
    names = [item["metadata"]["name"] for item in api.list("/api/v1/pods")]
    assert names == ["y", "z", "x", "w"]
    assert [item["metadata"]["name"] for item in api.list(PODS)] == ["w"]


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("spec.nodeName=n1", ["a", "b"]),
        ("spec.nodeName=n1,status.phase=Running", ["a"]),
        ("status.phase!=Running", ["b", "c"]),
        ("spec.nodeName=", ["c"]),
        ("metadata.namespace=default,metadata.name=c", ["c"]),
    ],
)
def test_field_selectors_of_pods(api_server: ApiServer, api: Api, selector: str, chosen: list[str]):
    api_server.store.create(running(pod("a", node="n1")))
    api_server.store.create(pod("b", node="n1"))
    api_server.store.create(pod("c"))
    found = api.list(PODS, fieldSelector=selector)
    assert [item["metadata"]["name"] for item in found] == chosen


@pytest.mark.parametrize(
    ("path", "selector", "result"),
    [
        (PODS, "spec.x=1", "field label not supported: spec.x"),
        (
            MAPS,
            "data.x=1",
            '"data.x" is not a known field selector: only "metadata.name", "metadata.namespace"',
        ),
    ],
)
def test_field_selectors_of_other_fields_are_refused(
    api: Api, path: str, selector: str, result: str
):
    with pytest.raises(ApiError) as refused:
        api.list(path, fieldSelector=selector)
    assert (refused.value.status, refused.value.body["message"]) == (400, result)


def test_events_are_found_by_what_they_are_about(api_server: ApiServer, api: Api):
    involved = {"kind": "Pod", "name": "web", "namespace": "default", "uid": "u1"}
    for number, reason in enumerate(("TopologyLabelMissing", "Pulled")):
        api_server.store.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"e{number}", "namespace": "default"},
                "involvedObject": involved,
                "reason": reason,
                "type": "Warning" if number == 0 else "Normal",
            }
        )
    path = "/api/v1/namespaces/default/events"
    about = ",".join(f"involvedObject.{key}={value}" for key, value in involved.items())
    assert len(api.list(path, fieldSelector=about)) == 2
    (found,) = api.list(path, fieldSelector=f"{about},reason=TopologyLabelMissing,type=Warning")
    assert found["metadata"]["name"] == "e0"


def test_a_list_may_ask_for_the_past_but_not_for_the_future(api_server: ApiServer, api: Api):
    api_server.store.create(config_map("a"))
    then = api_server.store.revision
    api_server.store.create(config_map("b"))
    past = api.list(MAPS, resourceVersion=then, resourceVersionMatch="Exact")
    assert [item["metadata"]["name"] for item in past] == ["a"]
    assert len(api.list(MAPS, resourceVersion="0")) == 2
    with pytest.raises(ApiError, match="Too large resource version") as refused:
        api.list(MAPS, resourceVersion=str(api_server.store.revision + 5))
    assert refused.value.status == 504
    api_server.store.compact()
    with pytest.raises(ApiError) as refused:
        api.list(MAPS, resourceVersion=then, resourceVersionMatch="Exact")
    assert (refused.value.status, refused.value.reason) == (410, "Expired")


def test_an_expired_continue_token_comes_with_one_that_goes_on_inconsistently(
    api_server: ApiServer, api: Api
):
    for name in ("a", "b", "c"):
        api_server.store.create(config_map(name))
    first = api.get(MAPS, limit=1)
    api_server.store.create(config_map("b2"))
    api_server.store.compact()
    with pytest.raises(ApiError) as refused:
        api.get(MAPS, limit=1, **{"continue": first["metadata"]["continue"]})
    assert (refused.value.status, refused.value.reason) == (410, "Expired")
    assert "too old to display a consistent list" in refused.value.body["message"]
    token = refused.value.body["metadata"]["continue"]
    rest = api.get(MAPS, **{"continue": token})
    assert [item["metadata"]["name"] for item in rest["items"]] == ["b", "b2", "c"]


def test_protobuf_alone_is_not_acceptable(api: Api):
    only = {"Accept": "application/vnd.kubernetes.protobuf"}
    response = api.http.get("/api/v1/nodes", headers=only)
    assert (response.status_code, response.json()["reason"]) == (406, "NotAcceptable")
    either = {"Accept": "application/vnd.kubernetes.protobuf, application/json"}
    assert api.http.get("/api/v1/nodes", headers=either).json()["kind"] == "NodeList"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", f"{PODS}/web", 405),
        ("PUT", PODS, 405),
        ("DELETE", PODS, 405),
        ("POST", "/api/v1/pods", 405),
        ("GET", "/api/v1/widgets", 404),
        ("GET", "/api/v1/namespaces/default/nodes", 404),
        ("GET", "/apis/apps/v7/deployments", 404),
        ("GET", "/nothing", 404),
    ],
)
def test_paths_and_methods_that_are_not_there(api: Api, method: str, path: str, status: int):
    assert api.http.request(method, path, json={}).status_code == status


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ({"metadata": {"name": "a", "namespace": "other"}}, "namespace of the provided object"),
        ({"kind": "Pod", "metadata": {"name": "a"}}, "cannot be handled as a ConfigMap"),
        ({"apiVersion": "v2", "metadata": {"name": "a"}}, "does not match the expected API"),
        ([1], "is not a JSON object"),
    ],
)
def test_a_body_that_contradicts_its_url_is_refused(api: Api, body: Any, result: str):
    with pytest.raises(ApiError, match=result) as refused:
        api.create(MAPS, body)
    assert refused.value.status == 400


def test_a_body_that_is_not_json_is_refused_without_a_traceback(api: Api):
    for data in (b"{", b"\xff", b"", b"null"):
        headers = {"Content-Type": "application/json"}
        assert api.http.post(MAPS, content=data, headers=headers).status_code == 400


@pytest.mark.parametrize(
    "query", ["limit=x", "resourceVersion=-1", "watch=1&timeoutSeconds=x", "labelSelector==,("]
)
def test_parameters_that_make_no_sense_are_refused(api: Api, query: str):
    assert api.http.get(f"{MAPS}?{query}").status_code == 400


def test_a_body_of_impossible_shape_is_an_error_and_not_the_end(
    api: Api, caplog: pytest.LogCaptureFixture
):
    response = api.http.post(PODS, json={"metadata": {"name": "a"}, "spec": {"containers": 7}})
    assert (response.status_code, response.json()["reason"]) == (500, "InternalError")
    assert "POST /api/v1/namespaces/default/pods" in caplog.text
    assert api.list(PODS) == []


def test_a_dry_run_answers_and_writes_nothing(api_server: ApiServer, api: Api):
    made = api.create(MAPS, config_map("a"), dryRun="All")
    assert made["metadata"]["uid"]
    assert api.list(MAPS) == []
    api_server.store.create(config_map("a", k="1"))
    assert api.patch(f"{MAPS}/a", {"data": {"k": "2"}}, dryRun="All")["data"] == {"k": "2"}
    assert api.get(f"{MAPS}/a")["data"] == {"k": "1"}


def test_finalizers_hold_an_object_until_they_are_taken_away(api: Api):
    api.create(MAPS, {"metadata": {"name": "a", "finalizers": ["x/y"]}})
    assert "deletionTimestamp" in api.delete(f"{MAPS}/a")["metadata"]
    assert "deletionTimestamp" in api.get(f"{MAPS}/a")["metadata"]
    api.patch(f"{MAPS}/a", {"metadata": {"finalizers": None}})
    with pytest.raises(ApiError, match="not found"):
        api.get(f"{MAPS}/a")


def test_a_namespace_takes_everything_in_it_along(api_server: ApiServer, api: Api):
    api_server.store.create(pod("web", "dyn"))
    api.delete("/api/v1/namespaces/dyn")
    assert api.list("/api/v1/pods") == []


def test_binding_puts_a_pod_on_a_node_once(api: Api):
    api.create(PODS, pod("web"))
    target = {"target": {"kind": "Node", "name": "n1"}}
    assert api.create(f"{PODS}/web/binding", target)["status"] == "Success"
    bound = api.get(f"{PODS}/web")
    assert bound["spec"]["nodeName"] == "n1"
    assert [one["type"] for one in bound["status"]["conditions"]] == ["PodScheduled"]
    with pytest.raises(ApiError, match='pod web is already assigned to node "n1"') as refused:
        api.create(f"{PODS}/web/binding", target)
    assert refused.value.status == 409


def test_a_created_pod_is_pending_whatever_status_it_came_with(api: Api):
    assert api.create(PODS, running(pod("web")))["status"]["phase"] == "Pending"
    after = api.patch(f"{PODS}/web/status", {"status": {"phase": "Running"}}, "strategic")
    assert after["status"]["phase"] == "Running"


def test_the_manager_is_the_named_one_or_the_first_word_of_the_agent(api_server: ApiServer):
    with Api(api_server.url, user_agent="dynamo-operator/1.2 (linux)") as operator:
        operator.create(PODS, pod("web"))
        change = {"metadata": {"labels": {"zone": "a"}}}
        after = operator.patch(f"{PODS}/web", change, fieldManager="by-hand")
    managers = [entry["manager"] for entry in after["metadata"]["managedFields"]]
    assert managers == ["dynamo-operator", "by-hand"]


def test_a_label_taken_over_changes_hands(api: Api):
    api.create(MAPS, {"metadata": {"name": "a", "labels": {"zone": "a"}}}, fieldManager="one")
    change = {"metadata": {"labels": {"zone": "b"}}}
    after = api.patch(f"{MAPS}/a", change, fieldManager="two")
    owners = {
        entry["manager"]
        for entry in after["metadata"]["managedFields"]
        if "f:zone" in entry["fieldsV1"].get("f:metadata", {}).get("f:labels", {})
    }
    assert owners == {"two"}


def test_applying_the_same_again_makes_no_revision(api: Api):
    path = "/api/v1/namespaces/default/configmaps/a"
    body = config_map("a", k="1") | {"metadata": {"name": "a"}}
    first = api.patch(path, body, "apply", fieldManager="one", force="true")
    api.patch(path, {"data": {"l": "2"}}, fieldManager="two")
    second = api.patch(path, body, "apply", fieldManager="one", force="true")
    third = api.patch(path, body, "apply", fieldManager="one", force="true")
    assert int(second["metadata"]["resourceVersion"]) == (
        int(first["metadata"]["resourceVersion"]) + 1
    )
    assert third["metadata"] == second["metadata"]


def test_an_applied_empty_object_may_get_members_and_lose_them_again(
    api_server: ApiServer, api: Api
):
    crds.install(api_server)
    path = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas/w"
    kind = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoWorkerMetadata"}
    card = {"card_json": {"runtime_config": {"topology_domains": {"zone": "a"}}}}
    steps: list[Json] = [
        {"endpoints": {}, "model_cards": {}},
        {"endpoints": {}, "model_cards": {"k": card}},
        {"endpoints": {"k": {"instance_id": 1}}, "model_cards": {"k": card}},
        {"endpoints": {"l": {"instance_id": 2}}, "model_cards": {"k": card}},
        {"endpoints": {}, "model_cards": {}},
    ]
    for data in steps:
        body = kind | {"metadata": {"name": "w"}, "spec": {"data": data}}
        after = api.patch(path, body, "apply", fieldManager="dynamo-worker", force="true")
        assert after["spec"]["data"] == data


def test_apply_owns_list_items_by_their_key(api: Api):
    def config(*names: str) -> Json:
        containers = [{"name": name, "image": "i"} for name in names]
        kind = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}}
        return kind | {"spec": {"containers": containers}}

    after = api.patch(f"{PODS}/web", config("main", "side"), "apply", fieldManager="one")
    (entry,) = after["metadata"]["managedFields"]
    assert entry["fieldsV1"]["f:spec"]["f:containers"]['k:{"name":"side"}'] == {
        "f:image": {},
        "f:name": {},
    }


def test_every_request_is_remembered_as_it_was_answered(api_server: ApiServer, api: Api):
    api.list("/api/v1/nodes", limit=500, labelSelector="a=b")
    api.create(MAPS, config_map("a"))
    api.http.get(f"{MAPS}/none")
    result = [(r.method, r.path, dict(r.query), r.status) for r in api_server.requests]
    assert result == [
        ("GET", "/api/v1/nodes", {"limit": "500", "labelSelector": "a=b"}, 200),
        ("POST", MAPS, {}, 201),
        ("GET", f"{MAPS}/none", {}, 404),
    ]
    assert api_server.requests[1].content_type == "application/json"
    assert api_server.requests[1].user == "kubernetes-admin"


def test_the_store_of_tests_is_the_store_that_is_served(api_server: ApiServer, api: Api):
    store = api_server.store
    made = store.create(running(pod("web", "dyn", zone="a")))
    assert made["status"]["phase"] == "Running"
    shown = api.get("/api/v1/namespaces/dyn/pods/web")
    assert shown == store.get("po", "web", "dyn")
    made["spec"]["nodeName"] = "n1"
    store.update(made)
    store.patch_merge("Pod", "web", {"metadata": {"labels": {"zone": "b"}}}, "dyn")
    assert [p["spec"]["nodeName"] for p in store.list("pods", "dyn", labels="zone=b")] == ["n1"]
    with pytest.raises(StatusError, match='pods "web" already exists'):
        store.create(pod("web", "dyn"))
    with pytest.raises(StatusError, match="the object has been modified"):
        store.update(made)
    store.delete("pods", "web", "dyn")
    assert store.list("pods") == []
    with pytest.raises(KeyError, match="no resource is called 'widgets'"):
        store.list("widgets")


def test_owned_objects_go_with_their_last_owner_only(api_server: ApiServer, api: Api):
    store = api_server.store
    owners = [store.create(config_map(name)) for name in ("one", "two")]
    references = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": o["metadata"]["name"]}
        | {"uid": o["metadata"]["uid"]}
        for o in owners
    ]
    metadata = {"name": "owned", "ownerReferences": references}
    api.create(MAPS, {"metadata": metadata})
    api.delete(f"{MAPS}/one")
    left = api.get(f"{MAPS}/owned")["metadata"]["ownerReferences"]
    assert [one["name"] for one in left] == ["two"]
    api.delete(f"{MAPS}/two", propagationPolicy="Orphan")
    assert api.get(f"{MAPS}/owned")["metadata"]["ownerReferences"] == []

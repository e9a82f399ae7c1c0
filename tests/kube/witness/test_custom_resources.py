"""Definitions and their resources: versions, schemas, defaults, the rules of the policy."""

from typing import Any

import pytest
from kubernetes import client

from tests.kube import crds
from tests.kube.api_server import ApiServer, StatusError
from tests.kube.client import Api, ApiError
from tests.kube.objects.small import graph

BETA = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeployments"
ALPHA = BETA.replace("v1beta1", "v1alpha1")
ZONE = "topology.kubernetes.io/zone"
AT = "spec.experimental.kvTransferPolicy"
Json = dict[str, Any]


@pytest.fixture
def graphs(api_server: ApiServer, api: Api) -> Api:
    crds.install(api_server)
    return api


def complaint(api: Api, policy: Json) -> str:
    """Of the 422 that this policy is answered with, what follows ``is invalid: ``."""
    with pytest.raises(ApiError) as refused:
        api.create(BETA, graph("g", policy=policy))
    assert (refused.value.status, refused.value.reason) == (422, "Invalid")
    start, _, rest = str(refused.value.body["message"]).partition(" is invalid: ")
    assert start == 'DynamoGraphDeployment.nvidia.com "g"'
    return rest


def test_an_undefined_resource_is_not_served(api: Api):
    with pytest.raises(ApiError) as refused:
        api.get(BETA)
    assert (refused.value.status, refused.value.body) == (404, {"message": "404 page not found"})


def test_an_unknown_resource_of_a_served_group_is_a_status(graphs: Api):
    with pytest.raises(ApiError, match="the server could not find the requested resource"):
        graphs.get("/apis/nvidia.com/v1beta1/namespaces/default/dynamoworkermetadatas")


def test_the_official_client_finds_groups_in_the_order_of_their_stability(
    api_server: ApiServer, official: client.ApiClient
):
    crds.install(api_server)
    apis: Any = client.ApisApi(official)
    (nvidia,) = [one for one in apis.get_api_versions().groups if one.name == "nvidia.com"]
    assert [one.version for one in nvidia.versions] == ["v1beta1", "v1alpha1"]
    assert nvidia.preferred_version.version == "v1beta1"


def test_one_object_is_shown_in_both_versions_with_one_identity(graphs: Api):
    made = graphs.create(BETA, graph("g"))
    shown = graphs.get(f"{ALPHA}/g")
    assert shown["apiVersion"] == "nvidia.com/v1alpha1"
    assert shown["spec"]["services"] == {
        "decode": {"componentType": "worker", "subComponentType": "decode", "replicas": 2}
    }
    assert shown["metadata"]["uid"] == made["metadata"]["uid"]
    assert made["spec"]["components"] == graph("g")["spec"]["components"]
    shown["spec"]["services"]["decode"]["replicas"] = 3
    graphs.put(f"{ALPHA}/g", shown)
    assert graphs.get(f"{BETA}/g")["spec"]["components"][0]["replicas"] == 3


def test_without_a_converter_only_the_version_is_rewritten(api_server: ApiServer, api: Api):
    api_server.store.create(crds.graph_crd())
    api.create(BETA, graph("g"))
    shown = api.get(f"{ALPHA}/g")
    assert shown["apiVersion"] == "nvidia.com/v1alpha1"
    assert shown["spec"] == graph("g")["spec"]


def test_the_default_is_filled_in_and_unknown_fields_are_dropped_with_a_warning(graphs: Api):
    policy = {"labelKey": ZONE, "domain": "zone", "noMatchPolicy": "fail"}
    response = graphs.http.post(BETA, json=graph("g", policy=policy))
    assert response.status_code == 201
    kept = response.json()["spec"]["experimental"]["kvTransferPolicy"]
    assert kept == {"labelKey": ZONE, "domain": "zone", "enforcement": "required"}
    assert response.headers["Warning"] == f'299 - "unknown field \\"{AT}.noMatchPolicy\\""'


def test_strict_validation_refuses_unknown_fields(graphs: Api):
    body = graph("g", policy={"labelKey": ZONE, "domain": "zone", "noMatchPolicy": "fail"})
    with pytest.raises(ApiError) as refused:
        graphs.create(BETA, body, fieldValidation="Strict")
    assert (refused.value.status, refused.value.reason) == (400, "BadRequest")
    assert refused.value.body["message"].endswith(
        f'strict decoding error: unknown field "{AT}.noMatchPolicy"'
    )
    assert graphs.list(BETA) == []


def test_a_definition_older_than_the_operator_drops_the_policy_without_a_word(
    api_server: ApiServer, api: Api
):
    api_server.store.create(crds.graph_crd(policy=False))
    body = graph("g", policy={"labelKey": ZONE, "domain": "zone"})
    made = api.create(BETA, body, fieldValidation="Ignore")
    assert made["spec"]["experimental"] == {}


@pytest.mark.parametrize(
    ("policy", "result"),
    [
        ({"labelKey": ZONE}, f"{AT}.domain: Required value"),
        (
            {"labelKey": ZONE, "domain": "Zone"},
            f'{AT}.domain: Invalid value: "Zone": {AT}.domain in body should match '
            "'^[a-z0-9]([a-z0-9-]*[a-z0-9])?$'",
        ),
        (
            {"labelKey": ZONE, "domain": 7},
            f'{AT}.domain: Invalid value: "integer": {AT}.domain in body must be of type string: '
            '"integer"',
        ),
        (
            {"labelKey": "", "domain": "zone"},
            f'[{AT}.labelKey: Invalid value: "": {AT}.labelKey in body should be at least 1 chars '
            f'long, {AT}.labelKey: Invalid value: "": {AT}.labelKey in body should match '
            f"'{crds.LABEL_KEY}']",
        ),
        (
            {"labelKey": ZONE, "domain": "zone", "enforcement": "fail"},
            f'{AT}.enforcement: Unsupported value: "fail": supported values: "required", '
            '"preferred"',
        ),
        (
            {
                "labelKey": ZONE,
                "domain": "zone",
                "enforcement": "preferred",
                "preferredWeight": 1.5,
            },
            f"{AT}.preferredWeight: Invalid value: 1.5: {AT}.preferredWeight in body should be "
            "less than or equal to 1",
        ),
        (
            {
                "labelKey": ZONE,
                "domain": "zone",
                "enforcement": "preferred",
                "preferredWeight": -1,
            },
            f"{AT}.preferredWeight: Invalid value: -1: {AT}.preferredWeight in body should be "
            "greater than or equal to 0",
        ),
        (
            {"domain": "zone"},
            f'{AT}: Invalid value: "object": exactly one of labelKey or clusterTopologyName is '
            "required",
        ),
        (
            {"domain": "zone", "labelKey": ZONE, "clusterTopologyName": "t"},
            f'{AT}: Invalid value: "object": exactly one of labelKey or clusterTopologyName is '
            "required",
        ),
        (
            {"domain": "zone", "labelKey": ZONE, "enforcement": "preferred"},
            f'{AT}: Invalid value: "object": preferredWeight is required when enforcement is '
            "preferred",
        ),
        (
            {"domain": "zone", "labelKey": ZONE, "preferredWeight": 0.5},
            f'{AT}: Invalid value: "object": preferredWeight may only be set when enforcement is '
            "preferred",
        ),
        (
            {"domain": "zone", "labelKey": f"{'.'.join(['a' * 63] * 4)}/zone"},
            f'{AT}.labelKey: Invalid value: "string": labelKey prefix must be 253 characters or '
            "less",
        ),
        (
            {"domain": "zone", "labelKey": "a" * 318},
            f"[{AT}.labelKey: Too long: may not be more than 317 bytes, {AT}.labelKey: Invalid "
            f"value: \"{'a' * 318}\": {AT}.labelKey in body should match '{crds.LABEL_KEY}']",
        ),
    ],
)
def test_what_the_api_server_itself_refuses_in_a_policy(graphs: Api, policy: Json, result: str):
    assert complaint(graphs, policy) == result


def test_a_grove_definition_wants_levels_in_order_of_its_schema(graphs: Api):
    path = "/apis/grove.io/v1alpha1/clustertopologybindings"
    body = {
        "apiVersion": "grove.io/v1alpha1",
        "kind": "ClusterTopologyBinding",
        "metadata": {"name": "t"},
        "spec": {"levels": []},
    }
    with pytest.raises(ApiError, match=r"spec\.levels in body should have at least 1 items"):
        graphs.create(path, body)
    levels = [{"domain": "Zone", "key": ZONE}, {"domain": "host"}]
    with pytest.raises(ApiError) as refused:
        graphs.create(path, body | {"spec": {"levels": levels}})
    fields = [cause["field"] for cause in refused.value.body["details"]["causes"]]
    assert fields == ["spec.levels[0].domain", "spec.levels[1].key"]


def test_worker_metadata_keeps_whatever_a_worker_publishes(graphs: Api):
    path = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas"
    data = {"endpoints": {"a/b/c/1f": {"instance_id": 2**53 - 1}}, "model_cards": {}}
    body = {"spec": {"data": data}}
    made = graphs.create(path, {"metadata": {"name": "w"}} | body)
    assert made["spec"]["data"] == data
    assert graphs.get(f"{path}/w")["kind"] == "DynamoWorkerMetadata"


def test_a_status_has_a_path_of_its_own(graphs: Api):
    made = graphs.create(BETA, graph("g") | {"status": {"state": "pending"}})
    assert "status" not in made
    status = {"status": {"state": "successful"}, "spec": {"backendFramework": "sglang"}}
    after = graphs.patch(f"{BETA}/g/status", status)
    assert after["status"] == {"state": "successful"}
    assert after["spec"]["backendFramework"] == "vllm"
    assert after["metadata"]["generation"] == 1
    again = graphs.patch(f"{BETA}/g", status)
    assert again["metadata"]["generation"] == 2
    assert again["status"] == {"state": "successful"}
    (entry,) = [e for e in again["metadata"]["managedFields"] if "subresource" in e]
    assert entry["fieldsV1"] == {"f:status": {"f:state": {}}}
    with pytest.raises(ApiError) as refused:
        graphs.get("/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas/w/status")
    assert refused.value.status == 404


def test_a_strategic_patch_of_a_custom_resource_is_unsupported(graphs: Api):
    graphs.create(BETA, graph("g"))
    with pytest.raises(ApiError) as refused:
        graphs.patch(f"{BETA}/g", {}, "strategic")
    assert refused.value.status == 415
    assert refused.value.body["message"] == (
        "the body of the request was in an unknown format - accepted media types include: "
        "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
    )


def test_with_its_definition_a_resource_and_its_objects_are_gone(graphs: Api):
    graphs.create(BETA, graph("g"))
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    graphs.delete(f"{definitions}/{crds.GRAPHS}")
    with pytest.raises(ApiError) as refused:
        graphs.list(BETA)
    assert refused.value.status == 404
    graphs.create(definitions, crds.graph_crd())
    assert graphs.list(BETA) == []


def test_a_rule_without_a_predicate_is_refused_where_it_is_defined(api_server: ApiServer):
    definition = crds.worker_metadata_crd()
    (version,) = definition["spec"]["versions"]
    version["schema"]["openAPIV3Schema"]["x-kubernetes-validations"] = [
        {"rule": "self.spec.data != {}", "message": "data must not be empty"}
    ]
    with pytest.raises(StatusError, match=r"no predicate in rules\.py for: data must not be empty"):
        api_server.store.create(definition)


def test_the_official_client_reads_and_writes_custom_objects(
    api_server: ApiServer, official: client.ApiClient
):
    crds.install(api_server)
    objects: Any = client.CustomObjectsApi(official)
    where = ("nvidia.com", "v1beta1", "default", "dynamographdeployments")
    objects.create_namespaced_custom_object(*where, graph("g"))
    change = {"metadata": {"labels": {"a": "b"}}}
    objects.patch_namespaced_custom_object(*where, "g", change)
    found = objects.list_namespaced_custom_object(*where, label_selector="a=b")
    assert [item["metadata"]["name"] for item in found["items"]] == ["g"]
    assert found["kind"] == "DynamoGraphDeploymentList"
    objects.delete_namespaced_custom_object(*where, "g")
    assert objects.list_namespaced_custom_object(*where)["items"] == []

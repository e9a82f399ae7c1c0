"""Authentication, RBAC and access reviews, by both clients and over bare HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kubernetes import client, config

from tests.kube.api_server import ADMIN_TOKEN, ApiServer
from tests.kube.client import Api, ApiError
from tests.kube.objects.small import node, pod, running
from tests.kube.witness.conftest import Kubectl, kubectl_program

RBAC = "rbac.authorization.k8s.io"
Json = dict[str, Any]


def role(name: str, *rules: tuple[str, str, str], namespace: str = "", **more: Any) -> Json:
    """``rules``: (verbs, group, resources), comma-separated. Without namespace a ClusterRole."""
    found = [
        {"verbs": verbs.split(","), "apiGroups": [group], "resources": what.split(",")} | more
        for verbs, group, what in rules
    ]
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    kind = "Role" if namespace else "ClusterRole"
    return {"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": metadata, "rules": found}


def binding(name: str, role_kind: str, role_name: str, subject: Json, namespace: str = "") -> Json:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding" if namespace else "ClusterRoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": RBAC, "kind": role_kind, "name": role_name},
        "subjects": [subject],
    }


ALICE = {"kind": "User", "name": "alice"}
WORKER = {"kind": "ServiceAccount", "name": "worker", "namespace": "dyn"}


@pytest.fixture
def guarded() -> Iterator[ApiServer]:
    with ApiServer(rbac=True, tls=True) as server:
        server.add_user("alice-token", "alice")
        server.add_service_account("worker-token", "dyn", "worker")
        server.store.create(running(pod("web", "dyn", node="n1")))
        server.store.create(pod("web", "other"))
        server.store.create(node("n1", "a"))
        yield server


@pytest.fixture
def alice(guarded: ApiServer) -> Iterator[Api]:
    with Api(guarded.url, "alice-token", guarded.ca) as api:
        yield api


def denied(api: Api, path: str) -> str:
    with pytest.raises(ApiError) as refused:
        api.get(path)
    assert (refused.value.status, refused.value.reason) == (403, "Forbidden")
    return str(refused.value.body["message"])


def test_the_words_of_a_refusal(alice: Api):
    cannot = 'is forbidden: User "alice" cannot'
    assert denied(alice, "/api/v1/namespaces/dyn/pods") == (
        f'pods {cannot} list resource "pods" in API group "" in the namespace "dyn"'
    )
    assert denied(alice, "/api/v1/pods") == (
        f'pods {cannot} list resource "pods" in API group "" at the cluster scope'
    )
    assert denied(alice, "/api/v1/nodes/n1") == (
        f'nodes "n1" {cannot} get resource "nodes" in API group "" at the cluster scope'
    )
    assert denied(alice, f"/apis/{RBAC}/v1/namespaces/dyn/roles") == (
        f'roles.{RBAC} {cannot} list resource "roles" in API group "{RBAC}" in the namespace "dyn"'
    )
    assert denied(alice, "/api/v1/namespaces/dyn/pods/web/log") == (
        f'pods "web" {cannot} get resource "pods/log" in API group "" in the namespace "dyn"'
    )
    assert denied(alice, "/metrics") == 'forbidden: User "alice" cannot get path "/metrics"'


def test_unknown_users_are_unauthorized_and_missing_ones_anonymous(guarded: ApiServer):
    with Api(guarded.url, "wrong", guarded.ca) as stranger, pytest.raises(ApiError) as refused:
        stranger.get("/api/v1/nodes")
    assert refused.value.body == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "Unauthorized",
        "reason": "Unauthorized",
        "code": 401,
    }
    with Api(guarded.url, ca=guarded.ca) as anonymous:
        assert 'User "system:anonymous" cannot list resource' in denied(anonymous, "/api/v1/nodes")


def test_discovery_is_for_all_known_users(alice: Api):
    assert alice.get("/version")["gitVersion"].startswith("v1.")
    assert {group["name"] for group in alice.get("/apis")["groups"]} >= {"apps", RBAC}


def test_a_role_counts_in_its_namespace_and_a_cluster_role_everywhere(
    guarded: ApiServer, alice: Api
):
    guarded.store.create(role("reader", ("get,list", "", "pods"), namespace="dyn"))
    guarded.store.create(binding("alice", "Role", "reader", ALICE, "dyn"))
    assert len(alice.list("/api/v1/namespaces/dyn/pods")) == 1
    denied(alice, "/api/v1/namespaces/other/pods")
    denied(alice, "/api/v1/pods")
    guarded.store.create(role("everywhere", ("*", "*", "*")))
    guarded.store.create(binding("alice", "ClusterRole", "everywhere", ALICE))
    assert len(alice.list("/api/v1/pods")) == 2


def test_a_cluster_role_bound_in_a_namespace_counts_there_only(guarded: ApiServer, alice: Api):
    guarded.store.create(role("reader", ("list", "", "pods,nodes")))
    guarded.store.create(binding("alice", "ClusterRole", "reader", ALICE, "dyn"))
    assert len(alice.list("/api/v1/namespaces/dyn/pods")) == 1
    denied(alice, "/api/v1/nodes")


def test_resource_names_let_one_object_through_and_no_list(guarded: ApiServer, alice: Api):
    rule = ("get,list", "", "pods")
    guarded.store.create(role("one", rule, namespace="dyn", resourceNames=["web"]))
    guarded.store.create(binding("alice", "Role", "one", ALICE, "dyn"))
    assert alice.get("/api/v1/namespaces/dyn/pods/web")["metadata"]["name"] == "web"
    denied(alice, "/api/v1/namespaces/dyn/pods/other")
    denied(alice, "/api/v1/namespaces/dyn/pods")


def test_a_subresource_needs_a_rule_of_its_own(guarded: ApiServer, alice: Api):
    guarded.store.create(role("reader", ("get", "", "pods"), namespace="dyn"))
    guarded.store.create(binding("alice", "Role", "reader", ALICE, "dyn"))
    denied(alice, "/api/v1/namespaces/dyn/pods/web/log")
    guarded.store.create(role("logs", ("get", "", "pods/log"), namespace="dyn"))
    guarded.store.create(binding("logs", "Role", "logs", ALICE, "dyn"))
    assert alice.http.get("/api/v1/namespaces/dyn/pods/web/log").status_code == 200


def test_groups_and_service_accounts_are_subjects(guarded: ApiServer):
    guarded.store.create(role("nodes", ("list", "", "nodes")))
    guarded.store.create(binding("worker", "ClusterRole", "nodes", WORKER))
    with Api(guarded.url, "worker-token", guarded.ca) as worker:
        assert len(worker.list("/api/v1/nodes")) == 1
        result = denied(worker, "/api/v1/pods")
    assert 'User "system:serviceaccount:dyn:worker" cannot list' in result
    group = {"kind": "Group", "name": "system:serviceaccounts:dyn"}
    guarded.store.create(role("pods", ("list", "", "pods")))
    guarded.store.create(binding("pods", "ClusterRole", "pods", group))
    with Api(guarded.url, "worker-token", guarded.ca) as worker:
        assert len(worker.list("/api/v1/pods")) == 2


def test_kubectl_prints_the_refusal(guarded: ApiServer, tmp_path: Path):
    path = guarded.kubeconfig(tmp_path / "kubeconfig", token="alice-token", namespace="dyn")
    kubectl = Kubectl(kubectl_program(), path)
    assert kubectl.refused("get", "pods") == (
        'Error from server (Forbidden): pods is forbidden: User "alice" cannot list resource '
        '"pods" in API group "" in the namespace "dyn"\n'
    )
    admin = Kubectl(kubectl_program(), guarded.kubeconfig(tmp_path / "admin", namespace="dyn"))
    assert admin("get", "pods", "-o", "name") == "pod/web\n"


def test_exec_needs_get_and_create(guarded: ApiServer, tmp_path: Path):
    path = guarded.kubeconfig(tmp_path / "kubeconfig", token="alice-token", namespace="dyn")
    kubectl = Kubectl(kubectl_program(), path)
    guarded.store.create(role("pods", ("get", "", "pods,pods/exec"), namespace="dyn"))
    guarded.store.create(binding("pods", "Role", "pods", ALICE, "dyn"))
    result = kubectl.refused("exec", "web", "--", "cat", "/x")
    assert 'cannot create resource "pods/exec"' in result
    guarded.store.create(role("exec", ("create", "", "pods/exec"), namespace="dyn"))
    guarded.store.create(binding("exec", "Role", "exec", ALICE, "dyn"))
    assert "No such file" in kubectl.refused("exec", "web", "--", "cat", "/x")


def attributes(namespace: str | None, verb: str, resource: str, group: str = "") -> Json:
    plural, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
    return attributes | ({"namespace": namespace} if namespace else {})


def test_a_self_review_of_the_official_client_agrees_with_the_answer(
    guarded: ApiServer, tmp_path: Path
):
    guarded.store.create(role("reader", ("list", "", "pods"), namespace="dyn"))
    guarded.store.create(binding("alice", "Role", "reader", ALICE, "dyn"))
    path = guarded.kubeconfig(tmp_path / "kubeconfig", token="alice-token")
    with config.new_client_from_config(config_file=str(path)) as connection:
        reviews: Any = client.AuthorizationV1Api(connection)

        def may(attributes: Json) -> bool:
            body = {"spec": {"resourceAttributes": attributes}}
            status = reviews.create_self_subject_access_review(body).status
            return bool(status.allowed)

        assert may(attributes("dyn", "list", "pods"))
        assert not may(attributes("other", "list", "pods"))
        assert not may(attributes(None, "list", "pods"))
        assert not may(attributes("dyn", "create", "pods/exec"))


def test_reviews_of_other_users_need_a_permission(guarded: ApiServer, alice: Api):
    guarded.store.create(role("nodes", ("get", "", "nodes")))
    guarded.store.create(binding("worker", "ClusterRole", "nodes", WORKER))
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    user = "system:serviceaccount:dyn:worker"
    body: Json = {"spec": {"user": user, "resourceAttributes": attributes(None, "get", "nodes")}}
    with pytest.raises(ApiError, match="cannot create resource"):
        alice.create(path, body)
    with Api(guarded.url, ADMIN_TOKEN, guarded.ca) as admin:
        status = admin.create(path, body)["status"]
        assert status["allowed"] is True
        assert status["reason"] == (
            'RBAC: allowed by ClusterRoleBinding "worker" of ClusterRole "nodes" to '
            'ServiceAccount "worker"'
        )
        body["spec"]["resourceAttributes"]["verb"] = "patch"
        assert admin.create(path, body)["status"] == {"allowed": False}
        local = "/apis/authorization.k8s.io/v1/namespaces/dyn/localsubjectaccessreviews"
        with pytest.raises(ApiError, match="must match the namespace"):
            admin.create(local, body)
        guarded.store.create(role("reader", ("list", "", "pods"), namespace="dyn"))
        guarded.store.create(binding("worker", "Role", "reader", WORKER, "dyn"))
        body["spec"]["resourceAttributes"] = attributes("dyn", "list", "pods")
        assert admin.create(local, body)["status"]["allowed"] is True


def test_a_review_in_protobuf_is_not_understood(guarded: ApiServer, tmp_path: Path):
    admin = Kubectl(kubectl_program(), guarded.kubeconfig(tmp_path / "kubeconfig"))
    assert "the body of the request was in an unknown format" in admin.refused(
        "auth", "can-i", "list", "pods"
    )


def test_without_rbac_everything_is_allowed(api_server: ApiServer):
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    with Api(api_server.url) as anonymous:
        body = {"spec": {"resourceAttributes": attributes(None, "delete", "nodes")}}
        assert anonymous.create(path, body)["status"]["allowed"] is True


def test_a_certificate_of_another_authority_is_not_trusted(guarded: ApiServer):
    with httpx.Client(trust_env=False) as machine, pytest.raises(httpx.ConnectError, match="CERT"):
        machine.get(guarded.url)

"""kubectl, the real program, at the test API server."""

import json
import subprocess
from pathlib import Path

import yaml

from tests.kube import crds
from tests.kube.api_server import ApiServer
from tests.kube.objects.small import graph, node, pod
from tests.kube.witness.conftest import Kubectl, kubectl_program

ZONE = "topology.kubernetes.io/zone"


def test_it_finds_short_names_and_kinds_by_discovery(api_server: ApiServer, kubectl: Kubectl):
    crds.install(api_server)
    lines = kubectl("api-resources", "--api-group", "nvidia.com", "--no-headers").splitlines()
    assert [line.split() for line in lines] == [
        ["dynamographdeployments", "dgd", "nvidia.com/v1beta1", "true", "DynamoGraphDeployment"],
        ["dynamoworkermetadatas", "dwm", "nvidia.com/v1alpha1", "true", "DynamoWorkerMetadata"],
    ]
    assert "error: the server doesn't have a resource type" in kubectl.refused("get", "nonsense")


def test_it_selects_by_labels_fields_and_jsonpath(api_server: ApiServer, kubectl: Kubectl):
    for name, host in (("a", "n1"), ("b", "n2"), ("c", "n1")):
        api_server.store.create(pod(name, node=host, role="decode" if name != "c" else "prefill"))
    names = ("-o", "jsonpath={.items[*].metadata.name}")
    assert kubectl("get", "pods", "-l", "role in (decode)", *names) == "a b"
    assert kubectl("get", "pods", "-l", "role!=decode", *names) == "c"
    assert kubectl("get", "pods", "--field-selector", "spec.nodeName=n1", *names) == "a c"
    problem = kubectl.refused("get", "pods", "--field-selector", "spec.color=red")
    assert "field label not supported: spec.color" in problem


def test_it_applies_with_its_own_validation_on_and_prints_the_result(kubectl: Kubectl):
    body = pod("web", app="web")
    assert kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body)) == "pod/web created\n"
    assert kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body)) == "pod/web unchanged\n"
    body["spec"]["containers"][0]["image"] = "engine:2"
    assert kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body)) == "pod/web configured\n"
    assert kubectl("get", "pod", "web", "-o", "jsonpath={.spec.containers[*].image}") == "engine:2"


def test_it_refuses_to_apply_a_graph_with_an_unknown_field(api_server: ApiServer, kubectl: Kubectl):
    crds.install(api_server)
    draft = graph("g", policy={"domain": "zone", "labelKey": ZONE, "noMatchPolicy": "fail"})
    problem = kubectl.refused("apply", "-f", "-", stdin=yaml.safe_dump(draft))
    unknown = 'unknown field "spec.experimental.kvTransferPolicy.noMatchPolicy"'
    assert f"strict decoding error: {unknown}" in problem
    done = kubectl.run("apply", "--validate=warn", "-f", "-", stdin=yaml.safe_dump(draft))
    assert done.returncode == 0
    assert f"Warning: {unknown}" in done.stderr
    kept = json.loads(kubectl("get", "dgd", "g", "-o", "json"))["spec"]["experimental"]
    assert kept == {
        "kvTransferPolicy": {"domain": "zone", "labelKey": ZONE, "enforcement": "required"}
    }


def test_it_waits_for_a_definition_to_be_established(kubectl: Kubectl):
    definition = yaml.safe_dump(crds.pod_clique_set_crd())
    kubectl("create", "-f", "-", stdin=definition)
    result = kubectl("wait", "--for=condition=established", "crd/podcliquesets.grove.io")
    assert (
        result
        == "customresourcedefinition.apiextensions.k8s.io/podcliquesets.grove.io condition met\n"
    )
    assert kubectl.run("get", "pcs").stderr == "No resources found in default namespace.\n"


def test_it_labels_annotates_patches_cordons_and_deletes(api_server: ApiServer, kubectl: Kubectl):
    api_server.store.create(node("n1", "a"))
    api_server.store.create(pod("web"))
    kubectl("label", "node", "n1", f"{ZONE}-")
    kubectl("annotate", "pod", "web", "who=me")
    kubectl("patch", "pod", "web", "-p", '{"metadata":{"labels":{"tier":"front"}}}')
    kubectl("cordon", "n1")
    assert ZONE not in api_server.store.get("node", "n1")["metadata"]["labels"]
    assert api_server.store.get("node", "n1")["spec"]["unschedulable"] is True
    metadata = api_server.store.get("pod", "web", "default")["metadata"]
    assert (metadata["labels"], metadata["annotations"]) == ({"tier": "front"}, {"who": "me"})
    kubectl("delete", "pod", "web")
    assert 'pods "web" not found' in kubectl.refused("get", "pod", "web")


def test_it_describes_a_pod_with_its_events(api_server: ApiServer, kubectl: Kubectl):
    created = api_server.store.create(pod("web"))
    api_server.store.create(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "web.1", "namespace": "default"},
            "involvedObject": {
                "kind": "Pod",
                "name": "web",
                "namespace": "default",
                "uid": created["metadata"]["uid"],
            },
            "type": "Warning",
            "reason": "TopologyLabelMissing",
            "message": "Node has no label",
            "lastTimestamp": created["metadata"]["creationTimestamp"],
        }
    )
    assert "TopologyLabelMissing" in kubectl("describe", "pod", "web")
    selector = "involvedObject.name=web,reason=TopologyLabelMissing"
    found = kubectl("get", "events", "--field-selector", selector, "-o", "name")
    assert found == "event/web.1\n"


def test_it_watches_until_it_is_stopped(api_server: ApiServer, kubectl: Kubectl):
    api_server.store.create(pod("first"))
    command = [str(kubectl.program), "--kubeconfig", str(kubectl.kubeconfig)]
    command += ["get", "pods", "-w", "-o", "name"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "pod/first\n"
        api_server.store.create(pod("second"))
        assert watching.stdout.readline() == "pod/second\n"
        watching.terminate()


def test_it_reads_protobuf_nowhere(kubectl: Kubectl):
    # A limit to know about: the real server takes kubectl's protobuf for built-in kinds.
    problem = kubectl.refused("create", "namespace", "foo")
    assert "the body of the request was in an unknown format" in problem


def test_it_finds_the_contexts_of_the_kubeconfig(api_server: ApiServer, tmp_path: Path):
    path = tmp_path / "kubeconfig"
    api_server.kubeconfig(path, namespace="dyn", context="prod", extra_contexts=("staging",))
    kubectl = Kubectl(kubectl_program(), path)
    api_server.store.create(pod("web", "dyn"))
    assert kubectl("config", "get-contexts", "-o", "name") == "prod\nstaging\n"
    assert kubectl("config", "current-context") == "prod\n"
    for context in ("prod", "staging"):
        assert kubectl("get", "pods", "-o", "name", "--context", context) == "pod/web\n"


def test_it_speaks_tls_with_the_authority_of_the_kubeconfig_and_no_other(
    kubectl: Kubectl, tmp_path: Path
):
    with ApiServer(tls=True) as server, ApiServer(tls=True) as other:
        secure = Kubectl(kubectl.program, server.kubeconfig(tmp_path / "secure"))
        assert "Server Version: v1.34.0" in secure("version")
        text = other.kubeconfig(tmp_path / "other").read_text().replace(other.url, server.url)
        (tmp_path / "other").write_text(text)
        foreign = Kubectl(kubectl.program, tmp_path / "other")
        assert "certificate signed by unknown authority" in foreign.refused("get", "pods")

"""Chart, manifests, image, compose file, units, man page: read by their tools."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from kubernetes import client

from dynctl.cli.app import program
from tests.kube.witness.conftest import Kubectl
from tests.shipping.artefacts import (
    CHART,
    COMPONENTS,
    DEPLOY,
    NAMESPACE,
    ROOT,
    controller,
    helm,
    manifest,
    rendered,
    sync_template,
)

FIRST = "docs/deploy: run `make deploy`"


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **more
    )


# -- what is made from other things is current -----------------------------------------------------


def test_the_objects_of_sync_are_those_of_topology_render() -> None:
    assert (CHART / "templates" / "sync.yaml").read_text() == sync_template(), FIRST
    values: dict[str, Any] = {"frontend": {"enabled": False}, "sync": {"enabled": True}}
    assert rendered(values, "system") == controller("system")
    values["sync"] = {"enabled": True, "watchNamespace": "prod"}
    found = rendered(values, "system")
    assert found == controller("system", watched="prod")
    on_pods = [one for one in found if "pods" in str(one.get("rules"))]
    assert [(one["kind"], one["metadata"].get("namespace")) for one in on_pods] == [
        ("Role", "prod")
    ]


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_plain_manifests_are_those_of_the_chart(component: str) -> None:
    path = DEPLOY / "kubernetes" / f"{component}.yaml"
    assert path.read_text() == manifest(component), FIRST


def test_the_versions_are_those_of_the_package() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {version[1]}
    plugin = yaml.safe_load((DEPLOY / "krew" / "dynctl.yaml").read_text())
    assert plugin["spec"]["version"] == f"v{version[1]}"
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose["services"]["frontend"]["image"] == f"dynctl:{version[1]}"


# -- the chart -------------------------------------------------------------------------------------


def test_helm_finds_nothing_wrong() -> None:
    report = helm("lint", str(CHART))
    assert not report["errors"]
    assert [one for one in report["messages"] if one["severity"] > 1] == []


def test_values_change_what_is_rendered() -> None:
    values = {
        "frontend": {
            "replicas": 3,
            "workers": ["http://vllm-0:8000,name=a"],
            "args": ["--router-mode", "kv"],
        },
        "image": {"repository": "other", "tag": "9"},
        "adminToken": {"secret": "s", "key": "k"},
    }
    objects = rendered(values)
    assert {one["kind"] for one in objects} == {"Service", "Deployment"}
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 3
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "other:9"
    assert container["args"][-4:] == [
        "--worker",
        "http://vllm-0:8000,name=a",
        "--router-mode",
        "kv",
    ]
    reference = {"secretKeyRef": {"name": "s", "key": "k"}}
    assert {"name": "DYNCTL_ADMIN_TOKEN", "valueFrom": reference} in container["env"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"router": {"enabled": True}}, "adminToken.secret"),
        ({"epp": {"enabled": True}}, "pool"),
        ({"frontend": {"enabled": False}, "test": {"enabled": True}}, "test.url"),
    ],
)
def test_a_missing_value_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(AssertionError, match=named):
        rendered(values)


def ingress(values: dict[str, Any]) -> dict[str, list[tuple[list[str], Any]]]:
    """Component -> (ports, peers) of each rule of its NetworkPolicy."""
    switched = {"networkPolicy": {"enabled": True, **values.pop("networkPolicy", {})}}
    policies = [one for one in rendered({**switched, **values}) if one["kind"] == "NetworkPolicy"]
    found = {}
    for policy in policies:
        labels = policy["spec"]["podSelector"]["matchLabels"]
        component = labels["app.kubernetes.io/component"]
        deployment = next(
            one
            for one in rendered(values)
            if one["kind"] == "Deployment" and one["spec"]["selector"]["matchLabels"] == labels
        )
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        names = {port["name"] for port in container["ports"]}
        rules = []
        for rule in policy["spec"]["ingress"]:
            ports = [port["port"] for port in rule["ports"]]
            assert set(ports) <= names
            rules.append((ports, rule["from"]))
        found[component] = rules
    return found


def test_network_policies_allow_what_each_component_serves() -> None:
    gateway = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "watch"}}}
    values: dict[str, Any] = {
        "router": {"enabled": True},
        "adminToken": {"secret": "s"},
        "indexer": {"enabled": True},
        "epp": {"enabled": True, "pool": "p"},
        "networkPolicy": {"gateways": [gateway], "monitoring": [prometheus]},
    }
    rules = ingress(values)
    assert set(rules) == {"frontend", "router", "indexer", "epp"}
    assert rules["frontend"] == [(["http"], [{"podSelector": {}}]), (["status"], [prometheus])]
    assert rules["epp"] == [(["grpc"], [gateway])]
    ((ports, [peer]), _) = rules["router"]
    assert ports == ["http"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "frontend"
    assert ingress({"networkPolicy": {"clients": [gateway]}})["frontend"] == [(["http"], [gateway])]
    assert not [one for one in rendered({}) if one["kind"] == "NetworkPolicy"]
    with pytest.raises(AssertionError, match="gateways"):
        ingress({"epp": {"enabled": True, "pool": "p"}})


# -- the manifests ---------------------------------------------------------------------------------


def test_the_cron_job_tests_the_frontend_and_may_connect_to_it() -> None:
    values: dict[str, Any] = {
        "test": {"enabled": True, "schedule": "5 4 * * *", "args": ["--only", "reuse"]},
        "networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}]},
    }
    objects = rendered(values)
    (job,) = (item["spec"] for item in objects if item["kind"] == "CronJob")
    assert job["schedule"] == "5 4 * * *"
    pod = job["jobTemplate"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["test", "http://dynctl-frontend:8000", "--only", "reuse"]
    (policy,) = (item["spec"] for item in objects if item["kind"] == "NetworkPolicy")
    peers = [peer["podSelector"].get("matchLabels") for peer in policy["ingress"][0]["from"]]
    assert pod["metadata"]["labels"] in peers


def objects_of(component: str) -> list[dict[str, Any]]:
    text = (DEPLOY / "kubernetes" / f"{component}.yaml").read_text()
    return [one for one in yaml.safe_load_all(text) if one is not None]


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for component in COMPONENTS:
        for one in objects_of(component):
            spec = one.get("spec", {})
            if one["kind"] == "CronJob":
                spec = spec["jobTemplate"]["spec"]
            if one["kind"] in ("CronJob", "Deployment"):
                pod = spec["template"]["spec"]
                yield component, pod, pod["containers"][0]


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_field_is_one_of_kubernetes(component: str) -> None:
    """The official client keeps the fields that it has types for, and drops the others."""
    api = client.ApiClient()
    kinds = {
        "Deployment": "V1Deployment", "Service": "V1Service", "Role": "V1Role",
        "RoleBinding": "V1RoleBinding", "ServiceAccount": "V1ServiceAccount",
        "CronJob": "V1CronJob", "ClusterRole": "V1ClusterRole",
        "ClusterRoleBinding": "V1ClusterRoleBinding",
    }  # fmt: skip

    for one in objects_of(component):
        typed = api.deserialize(json.dumps(one), kinds[one["kind"]], "application/json")
        assert _normal(api.sanitize_for_serialization(typed)) == _normal(one)


def _normal(value: Any) -> Any:
    """Without nulls and empty objects, which the client drops."""
    if isinstance(value, dict):
        found = {name: _normal(one) for name, one in value.items()}
        return {name: one for name, one in found.items() if one not in (None, {})}
    return [_normal(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("component", COMPONENTS)
def test_kubectl_applies_them(component: str, kubectl: Kubectl) -> None:
    path = str(DEPLOY / "kubernetes" / f"{component}.yaml")
    in_space = ("--namespace", NAMESPACE, "--validate=false", "--filename", path)
    shown = kubectl("apply", "--dry-run=client", *in_space)
    assert len(shown.splitlines()) == len(objects_of(component))
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    kubectl("apply", "--validate=false", "--filename", "-", stdin=json.dumps(namespace))
    kubectl("apply", *in_space)
    shown = kubectl("get", "deployments", "--namespace", NAMESPACE)
    for item in objects_of(component):
        assert item["kind"] != "Deployment" or item["metadata"]["name"] in shown


def test_the_whole_folder_can_be_applied() -> None:
    """No file changes an object of another."""
    owners: dict[tuple[str, str], list[str]] = {}
    for component in COMPONENTS:
        for item in objects_of(component):
            owners.setdefault((item["kind"], item["metadata"]["name"]), []).append(component)
    assert [owner for owner in owners.items() if len(owner[1]) > 1] == []


def test_the_arguments_are_options_of_the_commands() -> None:
    root: Any = program()
    for component, _, container in containers():
        command, words = root, list(container["args"])
        while words and hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {
            name
            for part in (command, root)
            for parameter in part.get_params(typer.Context(part))
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        given = {word for word in words if word.startswith("-")}
        assert given <= known, (component, given - known)


def test_pods_have_no_rights_that_they_do_not_need() -> None:
    for component, pod, container in containers():
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"], component
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert not rights["allowPrivilegeEscalation"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert rights.get("runAsNonRoot") or pod["securityContext"].get("runAsNonRoot")
        assert container["resources"]["limits"]["memory"]
        if component == "test":
            continue  # it ends by itself
        startup, liveness = container["startupProbe"], container["livenessProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 120
        for kind in ("httpGet", "grpc"):
            assert startup.get(kind) == liveness.get(kind)
        if "serviceAccountName" not in pod:
            assert pod["automountServiceAccountToken"] is False


# -- image, compose file, units, man page ----------------------------------------------------------


def test_the_image_builds_from_files_that_exist(tools: Path) -> None:
    """It cannot be built here: a linter reads it, and each path that it copies is in the sdist."""
    path = DEPLOY / "Containerfile"
    done = run(tools / "hadolint", path)
    assert (done.returncode, done.stdout) == (0, "")
    lines = path.read_text().replace("\\\n", " ").splitlines()
    copied = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY ./") or (
        line.startswith("COPY ") and "--from" not in line
    )]  # fmt: skip
    for name in [one for row in copied for one in row]:
        assert (ROOT / name).exists(), name
    assert "USER 65532:65532" in lines
    shared = re.findall(r'^"(\S+)" = "share/', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for needed in shared:
        assert any(needed.startswith(one) for row in copied for one in row), needed


def test_the_compose_file_is_read(tools: Path, tmp_path: Path) -> None:
    """podman-compose reads it; it asks podman only for its version."""
    podman = tmp_path / "podman"
    podman.write_text("#!/bin/sh\necho podman version 5.4.0\n")
    podman.chmod(0o755)
    done = run(
        tools / "podman-compose", "--file", DEPLOY / "compose.yaml", "config",
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "ADMIN_TOKEN": "t0ken"}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)["services"]
    assert set(found) == {"etcd", "nats", "frontend"}
    assert "t0ken" in str(found["frontend"]["environment"])


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").iterdir()), ids=lambda one: one.name)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze")
    ours = tmp_path / unit.name
    program = Path(sys.executable).parent / "dynctl"
    ours.write_text(unit.read_text().replace("/opt/dynctl/bin/dynctl", str(program)))
    done = run("systemd-analyze", "verify", "--man=no", ours)
    assert (done.returncode, done.stderr) == (0, "")
    words = re.search(r"^ExecStart=\S+ (.*)$", unit.read_text(), re.MULTILINE)
    assert words is not None
    command, options = words[1].split(" --")[0], re.findall(r"--[\w-]+", words[1])
    shown = run(program, *command.split(), "--help=all").stdout
    for option in options:
        assert option in shown


def test_man_renders_the_page() -> None:
    if shutil.which("man") is None:
        pytest.skip("this machine has no man")
    page = str(DEPLOY / "dynctl.1")
    done = run("man", "--warnings", "-l", page, env={**os.environ, "MANWIDTH": "80", "LC_ALL": "C"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "dynctl serve frontend" in done.stdout
    assert "GLOBAL OPTIONS" in done.stdout

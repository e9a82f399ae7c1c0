"""A real Kubernetes for the suite: a control plane, and as root two nodes.

With ``KUBECONFIG`` (of ``make test-kube``) the tests that are safe in any cluster use that one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dynamo.fleet import DYNAMO_PYTHON
from tests.dynamo.kube_pods import ZONES
from tests.kube.conftest import dynctl
from tests.kubernetes.control_plane import NODES, ControlPlane
from tests.kubernetes.graph import Graph, copy_zones, install_definitions, install_operator
from tests.kubernetes.image import base_image
from tests.kubernetes.node import IMAGES, Node, container_refusal, missing_programs

__all__ = ["dynctl"]

HERE = Path(__file__).resolve().parent
# Read when imported, since the tests' environment is emptied of them.
FOREIGN = os.environ.get("DYNCTL_TEST_KUBECONFIG", "")
PROGRAMS = os.environ.get("DYNCTL_KUBERNETES_PROGRAMS", "")
ISOLATED = os.environ.get("DYNCTL_TEST_ISOLATED", "")
NOT_ISOLATED = os.environ.get("DYNCTL_TEST_NOT_ISOLATED", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kubernetes)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The suite's own: tests may restart it, install definitions and change its nodes."""
    if FOREIGN:
        pytest.skip("needs a cluster of its own: run make test-kube without KUBECONFIG")
    if not PROGRAMS:
        pytest.exit("DYNCTL_KUBERNETES_PROGRAMS is not set; run `make test-kube`", returncode=2)
    if not Path(PROGRAMS).is_dir():
        pytest.skip("the programs of Kubernetes could not be built: run make test-kube alone")
    folder = Path(ISOLATED) if ISOLATED else tmp_path_factory.mktemp("kubernetes")
    with ControlPlane(folder, Path(PROGRAMS), reachable=bool(ISOLATED)) as plane:
        yield plane


@pytest.fixture(scope="session")
def kubeconfig(request: pytest.FixtureRequest) -> Path:
    """Of an administrator: of the cluster that was named, else of the suite's own."""
    if FOREIGN:
        return Path(FOREIGN)
    plane: ControlPlane = request.getfixturevalue("control_plane")
    return plane.kubeconfig()


@pytest.fixture(scope="session")
def nodes(control_plane: ControlPlane) -> dict[str, Node]:
    """Two Ready nodes, each in a zone of its own; they end with the control plane."""
    if not ISOLATED:
        pytest.skip(NOT_ISOLATED or "nodes need root: run make test-kube as root")
    missing = missing_programs()
    if missing:
        pytest.skip(f"nodes need {missing}")
    refusal = container_refusal(
        control_plane.folder / "probe", f"{control_plane.folder.name}-probe"
    )
    if refusal:
        pytest.skip(f"this machine starts no container: {refusal}")
    archive, pause = control_plane.folder / "image.tar", control_plane.programs / "pause"
    image = base_image(archive, IMAGES, pause, Path(DYNAMO_PYTHON).parents[1])
    found = {}
    for name, zone in zip(NODES, ZONES, strict=True):
        found[name] = Node(control_plane, name, {"topology.kubernetes.io/zone": zone})
        found[name].start(image)
    for node in found.values():
        control_plane.wait(node.is_ready, f"{node.name} to be Ready", 60)
    return found


@pytest.fixture(scope="session")
def graph(control_plane: ControlPlane, nodes: dict[str, Node]) -> Graph:
    """A graph whose frontend serves all its workers; tests leave it as they found it."""
    install_definitions(control_plane)
    install_operator(control_plane)
    found = Graph(control_plane, nodes)
    found.apply()
    copy_zones(control_plane)
    found.wait_ready()
    found.report_ready()
    return found

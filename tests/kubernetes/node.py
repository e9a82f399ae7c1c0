"""A real node: containerd and kubelet, in the namespaces that isolated.sh makes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.kube.objects import graphs
from tests.kube.objects.accounts import OPERATOR_IMAGE
from tests.kubernetes.control_plane import NODES, ControlPlane
from tests.kubernetes.image import FOLDERS, LINKS
from tests.kubernetes.objects import has_condition, path_of
from tests.waiting import patience

IMAGE: Final = "dynctl.test/base:1"
IMAGES: Final = (IMAGE, graphs.IMAGE, f"{OPERATOR_IMAGE}:1.6.1")
"""Names of an almost empty image: the programs of its pods are the machine's, by mounts."""
_PLUGINS: Final = Path("/usr/lib/cni")


def missing_programs() -> str:
    """What a node needs and the machine does not have; empty: nothing."""
    needed = [Path("/usr/bin/containerd"), Path("/usr/sbin/runc"), _PLUGINS / "bridge"]
    return ", ".join(str(path) for path in needed if not path.exists())


def container_refusal(folder: Path, group: str) -> str:
    """Why the machine starts no container in a control group of this name; empty: one ran.

    ``folder``: where the nodes will have their files.
    """
    folder.mkdir()
    for name in ("lower", "upper", "work", "rootfs"):
        (folder / name).mkdir()
    for name in FOLDERS:
        (folder / "lower" / name).mkdir()
    for name in LINKS:
        (folder / "lower" / name).symlink_to(f"usr/{name}")
    layers = f"lowerdir={folder / 'lower'},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    mount = ["mount", "-t", "overlay", "overlay", "-o", layers, str(folder / "rootfs")]
    run = ["runc", "--root", str(folder / "runc"), "run", "--bundle", str(folder), group]
    try:
        subprocess.run(["runc", "spec"], cwd=folder, check=True)
        settings = folder / "config.json"
        spec = json.loads(settings.read_text())
        spec["process"] |= {"terminal": False, "args": ["/bin/true"]}
        usr = {"destination": "/usr", "source": "/usr", "options": ["rbind", "ro"]}
        spec["mounts"].append({**usr, "type": "bind"})
        spec["linux"] |= {"cgroupsPath": f"/{group}/probe", "resources": {"pids": {"limit": 64}}}
        settings.write_text(json.dumps(spec))
        subprocess.run(mount, check=True, capture_output=True, text=True)
        subprocess.run(run, check=True, capture_output=True, text=True, timeout=patience(20))
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]}: {error.stderr.strip()}"
    finally:
        subprocess.run(["umount", str(folder / "rootfs")], check=False, capture_output=True)
    return ""


class Node:
    """``name``: of ``NODES``, whose place gives its addresses. Started by :meth:`start`."""

    def __init__(self, plane: ControlPlane, name: str, labels: dict[str, str]) -> None:
        self.plane, self.name, self.labels = plane, name, labels
        number = NODES.index(name) + 1
        self.address = f"10.88.254.{number}"
        self._pods = f"10.88.{number}"
        self.folder = plane.folder / name
        self.socket = self.folder / "containerd.sock"
        # The name of a control group: isolated.sh removes those with the name of its directory.
        self._group = f"{plane.folder.name}-{name}"

    def start(self, image: Path) -> None:
        """Start containerd, give it the image, start the kubelet; Ready some seconds later."""
        (self.folder / "cni").mkdir(parents=True)
        (self.folder / "cni" / "10-tests.conflist").write_text(json.dumps(self._network()))
        (self.folder / "containerd.toml").write_text(self._containerd())
        (self.folder / "kubelet.json").write_text(json.dumps(self._kubelet()))
        self.plane.start(
            f"containerd-{self.name}",
            ["/usr/bin/containerd", "-c", self.folder / "containerd.toml"],
        )
        self.plane.wait(self.socket.exists, f"containerd of {self.name}")
        self.add_image(image)
        self.start_kubelet()

    def add_image(self, archive: Path) -> None:
        words = ["ctr", "-a", str(self.socket), "-n", "k8s.io", "images", "import", str(archive)]
        subprocess.run(words, check=True, capture_output=True, timeout=patience(60))

    def start_kubelet(self) -> None:
        labels = ",".join(f"{key}={value}" for key, value in self.labels.items())
        self._kubelet_process = self.plane.start(
            f"kubelet-{self.name}",
            [
                *(self.plane.programs / "kubelet", f"--config={self.folder / 'kubelet.json'}"),
                f"--kubeconfig={self.plane.kubeconfig(self.name)}",
                *(f"--hostname-override={self.name}", f"--node-ip={self.address}"),
                *(f"--root-dir={self.folder / 'kubelet'}", f"--cert-dir={self.folder / 'keys'}"),
                *((f"--node-labels={labels}",) if labels else ()),
            ],
        )

    def is_ready(self) -> bool:
        """As the API server has it."""
        with self.plane.api() as api:
            nodes = api.list(path_of("Node"), fieldSelector=f"metadata.name={self.name}")
        return any(has_condition(node, "Ready") for node in nodes)

    @contextmanager
    def cordoned(self) -> Iterator[None]:
        """It gets no new pods."""
        path = path_of("Node", "", self.name)
        with self.plane.api() as api:
            api.patch(path, {"spec": {"unschedulable": True}})
            try:
                yield
            finally:
                api.patch(path, {"spec": {"unschedulable": None}})

    def kill_kubelet(self) -> None:
        """Its pods run on. :meth:`start_kubelet` starts it again."""
        self._kubelet_process.kill()
        self.plane.group.children.remove(self._kubelet_process)

    @contextmanager
    def frozen_kubelet(self) -> Iterator[None]:
        """Its connections stay, and nothing answers on them."""
        self._kubelet_process.kill(signal.SIGSTOP)
        try:
            yield
        finally:
            self._kubelet_process.kill(signal.SIGCONT)

    def _network(self) -> dict[str, object]:
        ipam = {
            "type": "host-local",
            "dataDir": str(self.folder / "ipam"),
            "ranges": [[{"subnet": f"{self._pods}.0/24"}]],
            "routes": [{"dst": "10.88.0.0/16"}, {"dst": "10.250.0.0/24"}],
        }
        bridge = {"type": "bridge", "bridge": self.name, "isGateway": True, "hairpinMode": True}
        return {"cniVersion": "0.4.0", "name": self.name, "plugins": [{**bridge, "ipam": ipam}]}

    def _containerd(self) -> str:
        # restrict_oom_score_adj: without CAP_SYS_RESOURCE no container could start.
        return f"""
version = 2
root = "{self.folder}/containerd"
state = "{self.folder}/run"
[grpc]
  address = "{self.socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{self.folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{_PLUGINS}"
    conf_dir = "{self.folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""

    def _kubelet(self) -> dict[str, object]:
        authority = str(self.plane.authority.certificate)
        keys = self.plane.authority.sign(
            self.name, f"/CN={self.name}", f"DNS:{self.name}", f"IP:{self.address}"
        )
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": authority},
            },
            "authorization": {"mode": "Webhook"},
            "address": self.address,
            "healthzPort": 0,
            "tlsCertFile": str(keys.certificate),
            "tlsPrivateKeyFile": str(keys.key),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._group}",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "clusterDNS": ["10.250.0.10"],
            "syncFrequency": "5s",
            "nodeStatusUpdateFrequency": "5s",
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0.1%"},
            "localStorageCapacityIsolation": False,
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": str(self.folder / "logs"),
        }


def machine_mounts(*folders: Path) -> list[Path]:
    """What containers need of the machine to run its programs: its libraries, ``folders``, and the
    Python of those that are virtual environments."""
    paths = {Path("/usr"), *folders}
    for folder in folders:
        settings = folder / "pyvenv.cfg"
        if settings.exists():
            [home] = re.findall(r"^home = (.+)$", settings.read_text(), re.MULTILINE)
            paths.add(Path(home).parent)
    return sorted(path for path in paths if not paths.intersection(path.parents))

"""A real control plane: etcd, kube-apiserver, kube-controller-manager and kube-scheduler."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from tests.contract.etcd_server import etcd_binary
from tests.dynamo.processes import Process, ProcessGroup
from tests.kube.client import Api
from tests.kubernetes.keys import Authority, write_kubeconfig
from tests.ports import free_port
from tests.waiting import until_now

ADDRESS: Final = "10.88.254.1"
"""Of the API server and of the first node: on ``lo`` inside the namespaces of the suite."""
SERVICE_ADDRESS: Final = "10.250.0.1"
"""Of the Service ``kubernetes``: the API server itself listens there, on the Service's port."""
ADMIN, VIEWER = "admin", "viewer"
NODES: Final = ("node-a", "node-b")
_USERS: Final = (
    f"{ADMIN},administrator,1,system:masters",
    f"{VIEWER},verifier,2",
    "controllers,system:kube-controller-manager,3",
    "scheduler,system:kube-scheduler,4",
    *(f"{node},system:node:{node},{node},system:nodes" for node in NODES),
)
"""Lines of token, user, its id, group."""


class ControlPlane:
    """Ready on enter; its processes are ended on exit, also if this process is killed.

    ``reachable``: pods reach it at the address of the Service ``kubernetes``, which needs the
    namespaces of the suite; otherwise it has a free port of the loopback address.
    """

    def __init__(self, folder: Path, programs: Path, *, reachable: bool) -> None:
        self.folder, self.programs = folder, programs
        self.port = 443 if reachable else free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self._listen = "0.0.0.0" if reachable else "127.0.0.1"
        self.etcd_url = f"http://127.0.0.1:{free_port()}"
        self._etcd_peer = f"http://127.0.0.1:{free_port()}"
        self.authority = Authority(folder / "keys")
        self.group = ProcessGroup(folder)
        self._api_server: Process | None = None

    # -- coming and going --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._start_etcd()
            self._write_keys()
            self.start_api_server()
            self._start_controllers()
        except BaseException:
            self.group.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.group.close()

    def start(self, name: str, command: Sequence[str | Path]) -> Process:
        """A process that ends with the control plane; its log is NAME.log."""
        clean = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        return self.group.start(name, [str(word) for word in command], clean)

    def _start_etcd(self) -> None:
        self.start(
            "etcd",
            [
                *(etcd_binary(), "--data-dir", self.folder / "etcd", "--unsafe-no-fsync"),
                *("--listen-client-urls", self.etcd_url, "--advertise-client-urls", self.etcd_url),
                *("--listen-peer-urls", self._etcd_peer),
                *("--initial-advertise-peer-urls", self._etcd_peer),
                *("--initial-cluster", f"default={self._etcd_peer}", "--log-level", "warn"),
            ],
        )

    def _write_keys(self) -> None:
        alternatives = (
            *("DNS:localhost", "DNS:kubernetes.default.svc", "IP:127.0.0.1"),
            *(f"IP:{ADDRESS}", f"IP:{SERVICE_ADDRESS}"),
        )
        self._server_keys = self.authority.sign("apiserver", "/CN=kube-apiserver", *alternatives)
        self._kubelet_client = self.authority.sign(
            "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client"
        )
        self._account_keys = self.authority.signing_key("accounts")
        self._users = self.folder / "users.csv"
        self._users.write_text("\n".join(_USERS) + "\n")

    def start_api_server(self) -> None:
        """Until it is ready."""
        server, kubelet, accounts = self._server_keys, self._kubelet_client, self._account_keys
        authority = self.authority.certificate
        self._api_server = self.start(
            "kube-apiserver",
            [
                *(self.programs / "kube-apiserver", f"--etcd-servers={self.etcd_url}"),
                *(f"--secure-port={self.port}", f"--bind-address={self._listen}"),
                *(f"--advertise-address={ADDRESS}", "--service-cluster-ip-range=10.250.0.0/24"),
                f"--tls-cert-file={server.certificate}",
                f"--tls-private-key-file={server.key}",
                *(f"--client-ca-file={authority}", f"--token-auth-file={self._users}"),
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={accounts.certificate}",
                f"--service-account-signing-key-file={accounts.key}",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                f"--kubelet-client-certificate={kubelet.certificate}",
                f"--kubelet-client-key={kubelet.key}",
                f"--kubelet-certificate-authority={authority}",
                "--kubelet-preferred-address-types=InternalIP",
            ],
        )
        self.wait(self.is_ready, "the API server to be ready", 60)

    def _start_controllers(self) -> None:
        common = ("--bind-address=127.0.0.1", "--leader-elect=false")
        for token, name in (
            ("controllers", "kube-controller-manager"),
            ("scheduler", "kube-scheduler"),
        ):
            command: list[str | Path] = [
                *(self.programs / name, f"--kubeconfig={self.kubeconfig(token)}"),
                *(f"--secure-port={free_port()}", *common),
            ]
            if token == "controllers":
                command += [
                    f"--service-account-private-key-file={self._account_keys.key}",
                    f"--root-ca-file={self.authority.certificate}",
                    "--use-service-account-credentials",
                    "--controllers=*,-nodeipam,-route,-cloud-node-lifecycle",
                    # A node that does not report is not Ready after 30 s, not 50 s.
                    "--node-monitor-grace-period=30s",
                ]
            self.start(name, command)

    # -- faults ------------------------------------------------------------------------------------

    def kill_api_server(self) -> None:
        """As a crash does; :meth:`start_api_server` starts it again."""
        assert self._api_server is not None
        self._api_server.kill()
        self.group.children.remove(self._api_server)

    @contextmanager
    def frozen_api_server(self) -> Iterator[None]:
        """Its connections stay, and nothing answers on them."""
        assert self._api_server is not None
        self._api_server.kill(signal.SIGSTOP)
        try:
            yield
        finally:
            self._api_server.kill(signal.SIGCONT)

    def compact_etcd(self) -> None:
        """Forget all revisions but the last."""
        with httpx.Client(base_url=self.etcd_url, trust_env=False) as http:
            header = http.post("/v3/kv/range", json={"key": "AA=="}).json()["header"]
            body = {"revision": header["revision"], "physical": True}
            http.post("/v3/kv/compaction", json=body).raise_for_status()

    # -- users -------------------------------------------------------------------------------------

    def kubeconfig(self, token: str = ADMIN, namespace: str = "default") -> Path:
        """The kubeconfig of the user of a token."""
        path = self.folder / "kubeconfigs" / f"{token[-40:]}-{namespace}"
        return write_kubeconfig(path, self.url, self.authority.certificate, token, namespace)

    def api(self, token: str = ADMIN, **options: Any) -> Api:
        """A client that is not dynctl's."""
        return Api(self.url, token, self.authority.certificate, **options)

    # -- waiting -----------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        with self.api() as api, contextlib.suppress(httpx.HTTPError):
            return api.http.get("/readyz").status_code == 200
        return False

    def wait(self, condition: Any, what: str, seconds: float = 30) -> None:
        """Until it holds; on the deadline, or if a process ended, fail with the logs' ends."""

        def holds() -> bool:
            dead = [process for process in self.group.children if not process.alive]
            assert not dead, dead[0].tail(40)
            return bool(condition())

        try:
            until_now(holds, seconds)
        except TimeoutError:
            logs = "\n".join(process.tail(12) for process in self.group.children)
            raise AssertionError(f"waited for {what}\n{logs}") from None

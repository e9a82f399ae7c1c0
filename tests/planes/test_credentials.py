"""etcd and NATS with TLS and credentials that expire, are replaced, or are of another authority.

Three members and three servers, of which one fails with TLS too. Files are replaced, as a secret
that is mounted; no process is started again.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.certificates import Authority
from tests.contract.etcd_server import EtcdServer, etcd_cluster, start_members
from tests.contract.nats_accounts import NatsAccounts
from tests.contract.nats_server import NatsServer, kill_all, nats_cluster, start_all
from tests.dynamo.fleet import DynamoFleet, aggregated
from tests.dynamo.ours import OurFrontend, our_frontend, wait
from tests.planes.traffic import Scores, Traffic


@dataclass
class Secured:
    """``secret``: the certificates and credentials of our frontend, and of no other process."""

    secret: Path
    authority: Authority
    accounts: NatsAccounts
    etcd: list[EtcdServer]
    nats: list[NatsServer]
    fleet: DynamoFleet
    ours: OurFrontend

    def codes(self) -> set[str]:
        return {code for code, _ in self.ours.conditions()}


def mount(secret: Path, authority: Authority) -> None:
    """The certificates of a client of this authority."""
    certificate, key = authority.issue("client")
    for source, name in ((authority.file, "ca"), (certificate, "cert"), (key, "key")):
        shutil.copy(source, secret / f"{name}.new")
        (secret / f"{name}.new").rename(secret / name)


def tls(authority: Authority) -> str:
    certificate, key = authority.issue("nats-server")
    return f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}\n'


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    secret = folder / "secret"
    secret.mkdir()
    authority, accounts = Authority(folder), NatsAccounts()
    mount(secret, authority)
    others = folder / "others.creds"
    accounts.write(others)
    accounts.write(secret / "creds")
    etcd = etcd_cluster(folder, authority.issue("etcd-server"), authority.file)
    nats = nats_cluster(folder, accounts.config + tls(authority), jetstream=False)
    with ExitStack() as stack:
        for member in etcd:
            stack.callback(member.close)
        start_members(etcd)
        stack.callback(lambda: asyncio.run(kill_all(nats)))
        asyncio.run(start_all(nats))
        certificate, key = authority.issue("others")
        fleet = stack.enter_context(
            DynamoFleet(
                aggregated(2),
                frontends=(),
                discovery="etcd",
                etcd_endpoints=",".join(member.url for member in etcd),
                event_plane="nats",
                nats_server=f"tls://{nats[0].address}",
                environment={
                    "DYN_REQUEST_PLANE": "nats",
                    "NATS_AUTH_CREDENTIALS_FILE": str(others),
                    "NATS_TLS_CA_CERT_PATH": str(authority.file),
                    # Dynamo takes the text itself.
                    "ETCD_AUTH_CA": authority.file.read_text(),
                    "ETCD_AUTH_CLIENT_CERT": certificate.read_text(),
                    "ETCD_AUTH_CLIENT_KEY": key.read_text(),
                },
                speedup=0,
            )
        )
        own = {
            "NATS_SERVER": ",".join(f"tls://{server.address}" for server in nats),
            "NATS_AUTH_CREDENTIALS_FILE": str(secret / "creds"),
            "ETCD_AUTH_CA": str(secret / "ca"),
            "ETCD_AUTH_CLIENT_CERT": str(secret / "cert"),
            "ETCD_AUTH_CLIENT_KEY": str(secret / "key"),
        }
        ours = stack.enter_context(our_frontend(fleet, environment=own))
        yield Secured(secret, authority, accounts, etcd, nats, fleet, ours)


def settle(secured: Secured, requests: Traffic, code: str) -> None:
    """Wait until the condition ends, and note how long that took."""
    began = time.monotonic()
    wait(secured.ours, lambda: code not in secured.codes(), f"the end of {code}")
    requests.right_s = time.monotonic() - began


def test_the_leader_of_etcd_dies_and_returns(secured: Secured, scores: Scores) -> None:
    leader = next(member for member in secured.etcd if member.leads())
    with scores.traffic("etcd with TLS: the leader killed", secured.ours) as requests:
        leader.kill()
        time.sleep(2)
        leader.start()
        settle(secured, requests, "DISCOVERY_INTERRUPTED")
    assert not requests.lost, requests.lost[:3]
    assert len(secured.ours.ready()) == 2


def test_the_nats_server_of_all_clients_dies(secured: Secured, scores: Scores) -> None:
    fault = "NATS with TLS and credential files: a server of three killed"
    with scores.traffic(fault, secured.ours) as requests:
        time.sleep(1)
        asyncio.run(secured.nats[0].kill())
        time.sleep(2)
        asyncio.run(secured.nats[0].start())
        settle(secured, requests, "REQUEST_PLANE_LOST")
    assert not requests.lost, requests.lost[:3]
    assert "WORKER_EJECTED" not in secured.codes()


def test_credentials_of_nats_expire_and_the_file_has_new_ones(
    secured: Secured, scores: Scores
) -> None:
    """The server ends the connection when they expire."""
    secured.accounts.write(secured.secret / "creds", seconds=4)
    asyncio.run(kill_all(secured.nats))
    asyncio.run(start_all(secured.nats))
    wait(secured.ours, lambda: "REQUEST_PLANE_LOST" not in secured.codes(), "NATS")
    fault = "credentials of NATS expire, new ones are in the file before"
    with scores.traffic(fault, secured.ours) as requests:
        secured.accounts.write(secured.secret / "creds")
        time.sleep(6)
    assert not requests.lost, requests.lost[:3]
    assert "WORKER_EJECTED" not in secured.codes()


def test_credentials_of_nats_are_refused_until_the_file_has_new_ones(
    secured: Secured, scores: Scores
) -> None:
    fault = "credentials of NATS are refused for 3 s"
    creds = secured.secret / "creds"
    with scores.traffic(fault, secured.ours, clients=100) as requests:
        NatsAccounts().write(creds)  # of another operator
        asyncio.run(kill_all(secured.nats))
        asyncio.run(start_all(secured.nats))
        wait(secured.ours, lambda: "REQUEST_PLANE_LOST" in secured.codes(), "the condition")
        wait(secured.ours, lambda: "uthorization" in message(secured), "the reason")
        time.sleep(2)
        secured.accounts.write(creds)
        settle(secured, requests, "REQUEST_PLANE_LOST")
    assert not requests.lost, requests.lost[:3]
    assert "WORKER_EJECTED" not in secured.codes()


def message(secured: Secured) -> str:
    return secured.ours.conditions().get(("REQUEST_PLANE_LOST", "NATS"), "")


def test_the_certificates_of_etcd_are_of_another_authority(
    secured: Secured, scores: Scores, tmp_path: Path
) -> None:
    """Serving goes on with the last view, and the new files are read without a new start."""
    second = Authority(tmp_path, "second")
    with scores.traffic("etcd with certificates of another authority", secured.ours) as requests:
        for member in secured.etcd:
            member.kill()
            member.use(second.issue("etcd-server"), second.file)
        start_members(secured.etcd)
        wait(secured.ours, lambda: "DISCOVERY_INTERRUPTED" in secured.codes(), "the condition")
        time.sleep(2)
        mount(secured.secret, second)
        settle(secured, requests, "DISCOVERY_INTERRUPTED")
    assert not requests.lost, requests.lost[:3]
    assert len(secured.ours.ready()) == 2

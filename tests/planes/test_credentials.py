"""etcd and NATS with TLS and credentials that expire, are replaced, or are of another authority.

Files are replaced, as a secret that is mounted; no process is started again.
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
from tests.contract.etcd_server import EtcdServer
from tests.contract.nats_accounts import NatsAccounts
from tests.contract.nats_server import NatsServer
from tests.dynamo.fleet import DynamoFleet, aggregated
from tests.dynamo.ours import OurFrontend, our_frontend, wait
from tests.planes.traffic import Scores, Traffic


@dataclass
class Secured:
    """``secret``: the certificates and credentials of our frontend, and of no other process."""

    secret: Path
    authority: Authority
    accounts: NatsAccounts
    etcd: EtcdServer
    nats: NatsServer
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
    etcd = EtcdServer(folder / "etcd", authority.issue("etcd-server"), authority.file)
    nats = NatsServer(folder, accounts.config + tls(authority))
    with ExitStack() as stack:
        stack.callback(etcd.close)
        etcd.start()
        stack.callback(lambda: asyncio.run(nats.kill()))
        asyncio.run(nats.start())
        certificate, key = authority.issue("others")
        fleet = stack.enter_context(
            DynamoFleet(
                aggregated(2),
                frontends=(),
                discovery="etcd",
                etcd_endpoints=etcd.url,
                event_plane="nats",
                nats_server=f"tls://{nats.address}",
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


def test_credentials_of_nats_expire_and_the_file_has_new_ones(
    secured: Secured, scores: Scores
) -> None:
    """The server ends the connection when they expire."""
    secured.accounts.write(secured.secret / "creds", seconds=4)
    asyncio.run(secured.nats.kill())
    asyncio.run(secured.nats.start())
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
        asyncio.run(secured.nats.kill())
        asyncio.run(secured.nats.start())
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
        secured.etcd.kill()
        secured.etcd.use(second.issue("etcd-server"), second.file)
        secured.etcd.start()
        wait(secured.ours, lambda: "DISCOVERY_INTERRUPTED" in secured.codes(), "the condition")
        time.sleep(2)
        mount(secured.secret, second)
        settle(secured, requests, "DISCOVERY_INTERRUPTED")
    assert not requests.lost, requests.lost[:3]
    assert len(secured.ours.ready()) == 2

"""An authority for the certificates of a cluster of the tests, and kubeconfigs for its users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tests.kube.api_server.certificates import openssl

_ELLIPTIC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class KeyPair(NamedTuple):
    """Files in PEM."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates for servers and clients; all files are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.certificate, self._key = folder / "ca.crt", folder / "ca.key"
        openssl(
            *("req", "-x509", *_ELLIPTIC, "-days", "2", "-subj", "/CN=dynctl-tests"),
            *("-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def sign(self, name: str, subject: str, *alternatives: str) -> KeyPair:
        """A key and its certificate. ``subject``: ``/O=GROUP/CN=USER``; ``alternatives``: such as
        ``IP:127.0.0.1``."""
        pair = KeyPair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        names = ",".join(alternatives or (f"DNS:{name}",))
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl(
            *("req", "-new", *_ELLIPTIC, "-subj", subject),
            *("-keyout", str(pair.key), "-out", str(request)),
        )
        openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate)),
            *("-CAkey", str(self._key), "-CAcreateserial", "-days", "2"),
            *("-extfile", str(extensions), "-out", str(pair.certificate)),
        )
        return pair

    def signing_key(self, name: str) -> KeyPair:
        """A private key and its public key (not a certificate), for tokens."""
        pair = KeyPair(self._folder / f"{name}.pub", self._folder / f"{name}.key")
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(pair.key))
        openssl("ec", "-in", str(pair.key), "-pubout", "-out", str(pair.certificate))
        return pair


def write_kubeconfig(
    path: Path, url: str, authority: Path, token: str, namespace: str = "default"
) -> Path:
    """A kubeconfig for the user of a token."""
    cluster = {"server": url, "certificate-authority": str(authority)}
    context = {"cluster": "tests", "user": "tests", "namespace": namespace}
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "tests", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": context}],
        "current-context": "tests",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body))
    return path

"""Certificates for servers and clients on loopback."""

import shutil
import subprocess
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_AT_LOOPBACK = "subjectAltName=IP:127.0.0.1"


class Authority:
    """A certificate authority; ``file`` has its certificate, beside those that it issued."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        subject = ("-subj", f"/CN={name}", "-days", "2")
        _openssl("req", "-x509", *_KEY, *subject, "-out", self.file, "-keyout", self._key)

    def issue(self, name: str, *, expired: bool = False) -> tuple[Path, Path]:
        """A certificate for 127.0.0.1 and its key, in files of this name, which are replaced."""
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(_AT_LOOPBACK)
        new_key, new = key.with_suffix(".new-key"), certificate.with_suffix(".new")
        _openssl("req", *_KEY, "-subj", f"/CN={name}", "-out", request, "-keyout", new_key)
        signed = ("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self._key)
        lifetime = ("-days", "0" if expired else "2", "-set_serial", "1")
        _openssl(*signed, *lifetime, "-extfile", extensions, "-out", new)
        new_key.rename(key)
        new.rename(certificate)
        return certificate, key


def own_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that is its own authority, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subject = ("-subj", "/CN=server-of-a-test", "-days", "2", "-addext", _AT_LOOPBACK)
    _openssl("req", "-x509", *_KEY, *subject, "-out", certificate, "-keyout", key)
    return certificate, key


def _openssl(*arguments: str | Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl program to make a certificate with")
    subprocess.run([program, *map(str, arguments)], check=True, capture_output=True)

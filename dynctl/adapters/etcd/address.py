"""Addresses and credentials of etcd, from Dynamo's variables."""

import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dynctl.base.errors import UsageProblem, file_problem
from dynctl.base.files import read_file

DEFAULT_ENDPOINTS: Final = "http://localhost:2379"
"""Dynamo's default."""

_PORT: Final = 2379
_MOST: Final = 16
_MAX_PEM_BYTES: Final = 1024 * 1024
_HINT: Final = "Set --etcd-endpoints or ETCD_ENDPOINTS, as in http://etcd-0:2379,http://etcd-1:2379"


@dataclass(frozen=True, slots=True)
class EtcdEndpoint:
    """One member."""

    host: str
    port: int
    tls: bool = False

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}"

    def __str__(self) -> str:
        return self.url if self.tls else self.authority


@dataclass(frozen=True, slots=True)
class Certificates:
    """The PEM of our authority, our certificate and its key."""

    ca: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """The members of one etcd, and our credentials. ``ca``, ``cert`` and ``key`` are paths of PEM
    files, or the PEM text itself."""

    endpoints: tuple[EtcdEndpoint, ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = field(default=None, repr=False)
    cert: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return ", ".join(map(str, self.endpoints))

    def certificates(self) -> Certificates:
        """Read the files, which may have changed since the last connection. Raises UsageProblem."""
        read = Certificates(
            _pem(self.ca, "ETCD_AUTH_CA"),
            _pem(self.cert, "ETCD_AUTH_CLIENT_CERT"),
            _pem(self.key, "ETCD_AUTH_CLIENT_KEY"),
        )
        # gRPC does not report an invalid certificate, it fails to connect.
        try:
            context = ssl.create_default_context(cadata=read.ca.decode() if read.ca else None)
            if read.cert and read.key:
                # The ssl module reads certificates only from files.
                with tempfile.NamedTemporaryFile(suffix=".pem") as file:
                    file.write(read.key + b"\n" + read.cert)
                    file.flush()
                    context.load_cert_chain(file.name)
        except (ssl.SSLError, ValueError) as error:
            raise UsageProblem(
                f"invalid certificates for etcd: {error}", f"Check {self.certificate_files()}."
            ) from error
        return read

    def certificate_files(self) -> str:
        """The variables of the certificates, each with its file."""
        given = {
            "ETCD_AUTH_CA": self.ca,
            "ETCD_AUTH_CLIENT_CERT": self.cert,
            "ETCD_AUTH_CLIENT_KEY": self.key,
        }
        return ", ".join(map(_with_file, given, given.values()))


def etcd_access(
    endpoints: Sequence[str],
    *,
    user: str | None = None,
    password: str | None = None,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
) -> EtcdAccess:
    """Read and validate all settings. Raises UsageProblem, which never quotes a credential.

    Each of ``endpoints`` is ``http://HOST:PORT``, ``https://HOST:PORT``, ``HOST:PORT`` or ``HOST``,
    or several with commas between; without a scheme TLS is on if certificates are set. ``ca``,
    ``cert`` and ``key`` are paths, or the PEM text itself: Dynamo's documentation has the one and
    its code the other.
    """
    _both(user, password, "ETCD_AUTH_USERNAME", "ETCD_AUTH_PASSWORD")
    _both(cert, key, "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
    tls = bool(ca or cert)
    texts = [text.strip() for several in endpoints for text in several.split(",")]
    members = tuple(dict.fromkeys(_endpoint(text, tls) for text in texts if text))
    if not 0 < len(members) <= _MOST:
        raise UsageProblem(f"etcd endpoints: expected 1 to {_MOST}, got {len(members)}", _HINT)
    access = EtcdAccess(
        members,
        user or None,
        password or None,
        ca or None,
        cert or None,
        key or None,
    )
    if tls:
        access.certificates()
    return access


def system_roots() -> bytes | None:
    """The PEM of this machine's trusted certificate authorities, if they are in one file."""
    path = ssl.get_default_verify_paths().cafile
    try:
        return Path(path).read_bytes() if path else None
    except OSError:
        return None


def _both(one: str | None, other: str | None, name: str, other_name: str) -> None:
    if bool(one) != bool(other):
        missing = other_name if one else name
        raise UsageProblem(
            f"etcd: {name} and {other_name} must be set together", f"Set {missing}, or neither."
        )


def _endpoint(text: str, tls: bool) -> EtcdEndpoint:
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "https" if tls else "http", text
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("//")
    if "@" in rest:
        # Not quoted: the part before it may be a password.
        raise UsageProblem(
            "an etcd endpoint has a user or a password",
            "Set them as ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD.",
        )
    more = parts.path not in ("", "/") or parts.query or parts.fragment
    visible = text.isprintable() and not any(map(str.isspace, text))
    if scheme.lower() not in ("http", "https") or not host or port == 0 or more or not visible:
        raise UsageProblem(
            f"etcd endpoint {text[:120]!r}: expected http://HOST:PORT, https://HOST:PORT or "
            "HOST:PORT",
            _HINT,
        )
    return EtcdEndpoint(host, port or _PORT, scheme.lower() == "https")


def _with_file(variable: str, value: str | None) -> str:
    if not value:
        return f"{variable} (not set)"
    return variable if _is_pem(value) else f"{variable} ({value})"


def _is_pem(value: str) -> bool:
    return value.lstrip().startswith("-----BEGIN")


def _pem(value: str | None, name: str) -> bytes | None:
    if not value:
        return None
    if _is_pem(value):
        return value.encode()
    try:
        content = read_file(value, _MAX_PEM_BYTES)[:_MAX_PEM_BYTES]
    except OSError as error:
        raise UsageProblem(
            f"{name}: cannot read {value}: {file_problem(error)}", "Set the path of a PEM file."
        ) from error
    if b"-----BEGIN" not in content:
        raise UsageProblem(f"{name}: {value} is not a PEM file", "Set the path of a PEM file.")
    return content

"""A throw-away authority and a certificate for 127.0.0.1, made by the ``openssl`` program."""

import shutil
import ssl
import subprocess
from pathlib import Path

_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc"


def make_certificates(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """(the server's context, the authority's certificate in PEM), all files in ``folder``."""
    authority, certificate, key = (folder / name for name in ("ca.pem", "server.pem", "key.pem"))
    elliptic = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority_key = folder / "ca-key.pem"
    openssl(
        *("req", "-x509", *elliptic, "-days", "2", "-subj", "/CN=test authority"),
        *("-keyout", str(authority_key), "-out", str(authority)),
        *("-addext", "keyUsage=critical,keyCertSign"),
    )
    request, extensions = folder / "request.pem", folder / "extensions"
    extensions.write_text(_NAMES + "\nextendedKeyUsage=serverAuth\n")
    openssl(
        *("req", "-new", *elliptic, "-subj", "/CN=kube-apiserver"),
        *("-keyout", str(key), "-out", str(request)),
    )
    openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey"),
        *(str(authority_key), "-CAcreateserial", "-days", "2"),
        *("-extfile", str(extensions), "-out", str(certificate)),
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context, authority


def openssl(*arguments: str) -> None:
    """Run the program. Raises RuntimeError with what it printed."""
    if shutil.which("openssl") is None:
        raise RuntimeError("certificates of tests need the openssl program, which is not installed")
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {arguments[0]} failed:\n{done.stderr}")

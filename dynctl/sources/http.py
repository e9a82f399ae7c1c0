"""HTTP requests to frontends, bounded in time and size. Used for control calls only.

dynctl's frontend has ``/v1/models`` and ``/busy_threshold`` in Dynamo's format: both are read here.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn
from urllib.parse import urlsplit

import httpx

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import (
    UNTRUSTED,
    TimedOut,
    Unreachable,
    UsageProblem,
    file_problem,
    network_reason,
    single_line,
    without_credentials,
)
from dynctl.base.files import expect_regular
from dynctl.base.json_reader import read_json
from dynctl.documents.codec import Document, decode
from dynctl.documents.models import ModelList, ModelRow
from dynctl.documents.thresholds import BusyThresholdList, ModelThresholds, Thresholds
from router_core import THRESHOLD_SETTINGS

CONNECT_S: Final = 5.0
_LONGEST_REASON: Final = 500
#: Set by --ca-cert for this process and its completions.
CA_CERT_VARIABLE: Final = "DYNCTL_CA_CERT"


def tls_context(ca_cert: Path | None = None) -> ssl.SSLContext:
    """The authorities that https frontends are checked with: those of ``ca_cert`` (default
    ``$DYNCTL_CA_CERT``), else the machine's. Raises UsageProblem."""
    file = ca_cert or os.environ.get(CA_CERT_VARIABLE) or None
    try:
        if file is not None:
            expect_regular(file)
        return ssl.create_default_context(cafile=file)
    except ssl.SSLError:
        problem = "not a PEM file of certificates"
    except OSError as error:
        problem = file_problem(error)
    raise UsageProblem(
        f"--ca-cert {file}: {problem}", "give the certificate that signed the frontend's"
    )


class HttpFrontend:
    """The address of one frontend. ``timeout``: seconds for each whole response.

    ``max_bytes``: limit of a response. ``described``: the frontend in errors. ``unreachable_hint``
    and ``unexpected_hint``: what to do where nothing, or something else answers.
    """

    max_bytes: ClassVar[int]
    described: ClassVar[str]
    unreachable_hint: ClassVar[str]
    unexpected_hint: ClassVar[str]

    def __init__(self, url: str, timeout: float, token: str | None = None) -> None:
        self.url = frontend_url(url)
        self.timeout = timeout
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        #: Why thresholds are set: a dynctl frontend logs and records it, a Dynamo ignores it.
        self.note = ""
        #: The canary that sets them, and for how many seconds it watches them; empty: none. A
        #: dynctl frontend refuses another one meanwhile, a Dynamo does not.
        self.canary = ""

    def exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """The response, whatever its status. Raises Unreachable or TimedOut."""
        limit = self.timeout if timeout is None else timeout
        try:
            return self._request(method, path, body, limit, headers)
        except httpx.ConnectTimeout:
            kind = TimedOut if limit <= CONNECT_S else Unreachable
            raise kind(
                f"{self.url} did not accept a connection within {min(limit, CONNECT_S):g} s",
                "check the address: dynctl version --frontend URL shows what answers there",
            ) from None
        except httpx.TimeoutException:
            raise TimedOut(
                f"{self.url}{path} did not answer within {limit:g} s",
                f"try a longer time: --timeout {limit * 3:g}",
            ) from None
        except httpx.HTTPError as error:
            reason = network_reason(error)
            raise Unreachable(
                f"{self.url} does not answer: {reason}",
                tls_hint(self.url, error) or self.unreachable_hint,
            ) from None

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """The response to a request that succeeded. Raises DynctlError."""
        raise NotImplementedError

    def metrics_body(self) -> bytes:
        """The body of ``GET /metrics``."""
        return self.send("GET", "/metrics").content

    def models(self) -> list[str]:
        return [row.id for row in self.model_rows()]

    def model_rows(self) -> list[ModelRow]:
        return self.document(self.send("GET", "/v1/models"), ModelList).data

    def thresholds(self) -> dict[str, Thresholds]:
        """Model -> its thresholds, for every model that can be served now."""
        read = self.document(self.send("GET", "/busy_threshold"), BusyThresholdList)
        return {row.model: threshold_values(row) for row in read.thresholds}

    def document(self, response: httpx.Response, form: type[Document]) -> Document:
        """The document of a response; raises Unreachable where it is something else."""
        try:
            return decode(response.content, form)
        except WireError as error:
            self.unexpected(str(error))

    def unexpected(self, problem: str, path: str = "") -> NoReturn:
        raise Unreachable(
            f"{self.url}{path} answers, but not as {self.described}: {problem}",
            self.unexpected_hint,
        )

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float,
        headers: Mapping[str, str] | None,
    ) -> httpx.Response:
        if (method, path) == ("POST", "/busy_threshold"):
            text = self.note.encode("ascii", "replace").decode()
            about = {"x-dynctl-note": text[:200], "x-dynctl-canary": self.canary}
            headers = {**(headers or {}), **{name: value for name, value in about.items() if value}}
        limits = httpx.Timeout(timeout, connect=min(timeout, CONNECT_S))
        deadline = time.monotonic() + timeout
        # trust_env: control calls to a local frontend must not go through the machine's proxy.
        with httpx.Client(
            timeout=limits,
            headers=self._headers,
            trust_env=False,
            verify=tls_context() if self.url.startswith("https:") else False,
        ) as client:
            with client.stream(method, self.url + path, json=body, headers=headers) as response:
                content = bytearray()
                for part in response.iter_bytes():
                    content += part
                    _check_size(len(content), self.max_bytes)
                    # httpx limits each read; a server that sends slowly needs this limit.
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("the response did not end in time")
            return httpx.Response(
                response.status_code,
                headers={"content-type": response.headers.get("content-type", "")},
                content=bytes(content),
            )


def async_client(token: str | None = None) -> httpx.AsyncClient:
    """A client for :func:`read_response`; its caller closes it."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(headers=headers, trust_env=False, verify=tls_context(), timeout=None)  # noqa: S113


async def read_response(
    client: httpx.AsyncClient,
    url: str,
    max_bytes: int,
    timeout: float,
    params: Mapping[str, str | int] | None = None,
    wait: float = 0.0,
) -> tuple[int, bytes]:
    """Status and body of a GET. ``wait``: seconds that the server may wait before it answers,
    beyond ``timeout``. Raises Unreachable or TimedOut; the message has the reason only."""
    try:
        async with asyncio.timeout(timeout + wait):
            async with client.stream("GET", url, params=params) as response:
                content = bytearray()
                async for part in response.aiter_bytes():
                    content += part
                    _check_size(len(content), max_bytes)
            return response.status_code, bytes(content)
    except TimeoutError:
        raise TimedOut(f"no response within {timeout:g} s") from None
    except httpx.HTTPError as error:
        raise Unreachable(network_reason(error)) from None


def tls_hint(url: str, error: httpx.HTTPError) -> str:
    """What to do where http, https or a certificate is the cause; empty otherwise."""
    reason = network_reason(error)
    if reason.startswith(UNTRUSTED):
        return "set the certificate that signed it: --ca-cert FILE, or DYNCTL_CA_CERT"
    scheme = url.partition("://")[0]
    if scheme == "http" and isinstance(error, httpx.RemoteProtocolError):
        return "if it serves https, give its URL with https://"
    if scheme == "https" and reason.startswith("TLS: "):
        return "if it serves http, give its URL with http://"
    return ""


#: Why there is no response, in place of the page itself.
WEB_PAGE: Final = "a web page"


def error_message(response: httpx.Response) -> str:
    """The reason in an error response: OpenAI's shape, Dynamo's, or plain text."""
    document = json_object(response)
    if not document:
        plain = response.text.strip()
        return WEB_PAGE if plain.startswith("<") else single_line(plain, _LONGEST_REASON)
    error = document.get("error", document.get("message", document.get("detail", "")))
    if isinstance(error, dict):
        error = error.get("message", "")
    return single_line(str(error), _LONGEST_REASON)


def error_code(response: httpx.Response) -> str:
    """The code of an error in OpenAI's shape; empty where there is none."""
    error = json_object(response).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else ""


def threshold_values(row: ModelThresholds) -> Thresholds:
    return {name: getattr(row, name) for name in THRESHOLD_SETTINGS}


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of a response; empty where it is something else."""
    try:
        document = read_json(response.content, "answer")
    except WireError:
        return {}
    return document if isinstance(document, dict) else {}


def frontend_url(url: str, option: str = "--frontend ") -> str:
    """``url`` with a scheme, without a slash at its end, and without the ``/v1`` that base URLs of
    OpenAI's clients have; raises UsageProblem, which has the ``option`` before the URL."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid, parts = False, urlsplit("")
    if not valid or "@" in parts.netloc or parts.query or parts.fragment:
        without = ", without user and password" if "@" in parts.netloc else ""
        raise UsageProblem(
            f"{option}{without_credentials(full)}: expected http://HOST:PORT{without}",
            f"for example: {option}http://127.0.0.1:8000",
        )
    return parts.geturl().rstrip("/").removesuffix("/v1").rstrip("/")


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise httpx.TransportError(f"the response is over {limit:,} bytes")

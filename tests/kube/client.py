"""Small synchronous clients of the Kubernetes API, for actors and tests. Nothing of dynctl's."""

import ssl
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from tests.kube.api_server import ApiServer

Json = dict[str, Any]

_PATCHES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


class ApiError(Exception):
    """An answer other than success; ``body`` is the Status, or {"message": text}."""

    def __init__(self, status: int, body: Json) -> None:
        super().__init__(f"{status}: {body.get('message', '')}")
        self.status = status
        self.body = body

    @property
    def reason(self) -> str:
        return str(self.body.get("reason", ""))


class Requests(ABC):
    """One server as one user. Everything raises ApiError."""

    def get(self, path: str, **query: Any) -> Json:
        return self._ask("GET", path, query)

    def list(self, path: str, **query: Any) -> "list[Json]":
        """All items, page after page where ``limit`` is given."""
        items: list[Json] = []
        while True:
            answer = self._ask("GET", path, query)
            items += answer["items"]
            token = answer["metadata"].get("continue")
            if not token:
                return items
            query["continue"] = token

    def create(self, path: str, body: Any, **query: Any) -> Json:
        return self._ask("POST", path, query, body)

    def put(self, path: str, body: Any, **query: Any) -> Json:
        return self._ask("PUT", path, query, body)

    def patch(self, path: str, body: Any, kind: str = "merge", **query: Any) -> Json:
        """``kind``: merge, strategic, json or apply; apply wants ``fieldManager``."""
        return self._ask("PATCH", path, query, body, _PATCHES[kind])

    def delete(self, path: str, **query: Any) -> Json:
        return self._ask("DELETE", path, query)

    @abstractmethod
    def _ask(
        self, method: str, path: str, query: Json, body: Any = None, kind: str = "application/json"
    ) -> Json: ...


class LocalApi(Requests):
    """A server in this process, without sockets: the same handlers answer the same requests."""

    def __init__(self, server: ApiServer, token: str) -> None:
        self._server, self._token = server, token

    def _ask(
        self, method: str, path: str, query: Json, body: Any = None, kind: str = "application/json"
    ) -> Json:
        headers = {"Authorization": f"Bearer {self._token}", "User-Agent": self._token}
        data = b"" if body is None else msgspec.json.encode(body)
        if data:
            headers["Content-Type"] = kind
        texts = {name: str(value) for name, value in query.items()}
        status, text = self._server.answer(method, path, texts, headers, data)
        answer: Json = msgspec.json.decode(text)
        if status >= 400:
            raise ApiError(status, answer)
        return answer


class Api(Requests):
    """Over HTTP. ``ca``: the authority's certificate in PEM; ``keys``: files of a client's own
    certificate and its key. Close it, or use with."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        ca: Path | None = None,
        *,
        keys: tuple[str, str] | None = None,
        user_agent: str = "test-client",
        timeout: float = 10.0,
    ) -> None:
        headers = {"User-Agent": user_agent}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        verify: ssl.SSLContext | bool = not url.startswith("http:")  # False: quicker to make.
        if ca is not None:
            verify = ssl.create_default_context(cafile=str(ca))
            if keys is not None:
                verify.load_cert_chain(*keys)
        self.http = httpx.Client(
            base_url=url, headers=headers, verify=verify, timeout=timeout, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    def _ask(
        self, method: str, path: str, query: Json, body: Any = None, kind: str = "application/json"
    ) -> Json:
        headers = {} if body is None else {"Content-Type": kind}
        response = self.http.request(method, path, params=query, json=body, headers=headers)
        if response.is_success:
            answer: Json = response.json()
            return answer
        try:
            body = response.json()
        except ValueError:
            body = {"message": response.text.strip()}
        raise ApiError(response.status_code, body)

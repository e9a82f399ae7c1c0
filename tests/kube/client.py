"""A small synchronous client of the Kubernetes API, for actors and tests. Nothing of dynctl's."""

import ssl
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

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


class Api:
    """One server as one user. ``ca``: the authority's certificate in PEM. Close it, or use with."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        ca: Path | None = None,
        *,
        user_agent: str = "test-client",
        timeout: float = 10.0,
    ) -> None:
        headers = {"User-Agent": user_agent}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        verify: ssl.SSLContext | bool = not url.startswith("http:")  # False: quicker to make.
        if ca is not None:
            verify = ssl.create_default_context(cafile=str(ca))
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
        return self._ask("POST", path, query, json=body)

    def put(self, path: str, body: Any, **query: Any) -> Json:
        return self._ask("PUT", path, query, json=body)

    def patch(self, path: str, body: Any, kind: str = "merge", **query: Any) -> Json:
        """``kind``: merge, strategic, json or apply; apply wants ``fieldManager``."""
        headers = {"Content-Type": _PATCHES[kind]}
        return self._ask("PATCH", path, query, json=body, headers=headers)

    def delete(self, path: str, **query: Any) -> Json:
        return self._ask("DELETE", path, query)

    def _ask(self, method: str, path: str, query: Json, **more: Any) -> Json:
        response = self.http.request(method, path, params=query, **more)
        if response.is_success:
            answer: Json = response.json()
            return answer
        try:
            body = response.json()
        except ValueError:
            body = {"message": response.text.strip()}
        raise ApiError(response.status_code, body)

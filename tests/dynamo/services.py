"""Dynamo's HTTP services beside ours: the same requests to both, and their answers."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.dynamo.fleet import DYNAMO_PYTHON
from tests.dynamo.processes import ProcessGroup
from tests.ports import free_port
from tests.waiting import patience, until_now


@dataclass(frozen=True)
class Reply:
    """Status, content type and body; JSON is decoded."""

    status: int
    kind: str
    body: Any


def send(port: int, method: str, path: str, body: Any = None, *, raw: bytes | None = None) -> Reply:
    """One request; ``raw``: the body as it is."""
    data = raw if raw is not None or body is None else json.dumps(body).encode()
    headers = {} if data is None else {"content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience(20))
    try:
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        text = response.read()
        kind = (response.getheader("content-type") or "").partition(";")[0]
        read = json.loads(text) if kind == "application/json" else text.decode()
        return Reply(response.status, kind if text else "", read)
    finally:
        connection.close()


class Services:
    """Dynamo's service ``theirs`` and ours, both running until the end of the block."""

    def __init__(
        self,
        theirs: Sequence[str],
        ours: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._commands = theirs, ours
        self._environment = {**os.environ, "DYN_LOG": "error", **(environment or {})}
        self._group = ProcessGroup(directory)
        self.theirs = self.ours = 0

    def __enter__(self) -> Self:
        self.theirs, self.ours = free_port(), free_port()
        theirs, ours = self._commands
        python = [DYNAMO_PYTHON, "-m", *theirs, "--port", str(self.theirs)]
        self._group.start("theirs", python, self._environment)
        dynctl = [sys.executable, "-m", "dynctl", *(one.format(port=self.ours) for one in ours)]
        self._group.start("ours", dynctl, self._environment)
        try:
            for port in (self.theirs, self.ours):
                until_now(lambda port=port: self._answers(port), 30)  # type: ignore[misc]
        except TimeoutError:
            raise AssertionError("\n".join(one.tail() for one in self._group.children)) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close()

    @staticmethod
    def _answers(port: int) -> bool:
        try:
            return send(port, "GET", "/health").status == 200
        except OSError:
            time.sleep(0.05)
            return False

    def both(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None
    ) -> tuple[Reply, Reply]:
        """The answers of Dynamo and of ours."""
        return (
            send(self.theirs, method, path, body, raw=raw),
            send(self.ours, method, path, body, raw=raw),
        )

    def same(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None) -> Reply:
        """The answer of both; raises AssertionError if they differ."""
        theirs, ours = self.both(method, path, body, raw=raw)
        assert ours == theirs, (method, path, body if raw is None else raw)
        return theirs

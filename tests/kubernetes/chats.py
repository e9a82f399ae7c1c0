"""Requests to a frontend, one after another, while something happens to its cluster."""

from __future__ import annotations

import threading
from typing import Protocol

from tests.dynamo.client import Answer


class Chat(Protocol):
    """A frontend, or what sends to one."""

    def chat(self, text: str, /) -> Answer: ...


class Chats:
    """Sends them from a thread until the block ends. ``statuses``: of each."""

    def __init__(self, frontend: Chat) -> None:
        self.statuses: list[int] = []
        self._frontend = frontend
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def _send(self) -> None:
        while not self._ended.wait(0.05):
            self.statuses.append(self._frontend.chat(f"question {len(self.statuses)}").status)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

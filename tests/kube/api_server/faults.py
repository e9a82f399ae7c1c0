"""Misbehaviour on demand: refusals, silence, slowness, cut watches, forgotten revisions."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.kube.api_server.status import REASONS, StatusError

HANG = "hang"
DELAY = "delay"
STOPPED_KUBELET = "stopped kubelet"
ANSWER = "answer"
EXPIRE_WATCH = "expire watch"
EXPIRE_CONTINUE = "expire continue"


@dataclass(slots=True)
class Fault:
    """One rule. ``left`` counts down the requests it still meets, None is for ever; ``met`` counts
    up."""

    kind: str
    prefix: str
    method: str | None = None
    left: int | None = None
    status: int = 0
    message: str = ""
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    met: int = 0

    def refusal(self) -> StatusError:
        reason = REASONS.get(self.status, "Unknown")
        text = self.message or f"the test injected {self.status}"
        return StatusError(self.status, reason, text, {}, headers=self.headers)


class Faults:
    """Rules by prefix of the path (``/api/v1/nodes``; "" is everything), the oldest first.

    ``times`` None means for ever, until ``clear``. Every method may be called from any thread, at
    any time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Fault] = []
        self.watches_cut = 0
        """Raised by ``cut_watches``: running watches end when they see it change."""
        self.on_cut: Callable[[], None] = lambda: None
        """The server's: wakes the watches, so that they see."""

    def answer(
        self,
        prefix: str,
        status: int,
        *,
        times: int | None = None,
        method: str | None = None,
        message: str = "",
        retry_after: int | None = None,
    ) -> Fault:
        """Answer with ``status`` (403, 429, 500, 503...) and a Status body, do nothing else."""
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return self._add(
            Fault(ANSWER, prefix, method, times, status=status, message=message, headers=headers)
        )

    def hang(
        self, prefix: str, seconds: float, *, times: int | None = None, method: str | None = None
    ) -> Fault:
        """Say nothing for ``seconds``, then drop the connection."""
        return self._add(Fault(HANG, prefix, method, times, seconds=seconds))

    def stop_kubelet(self, node: str, seconds: float) -> Fault:
        """exec, log and port-forward of the node's pods: silence, then the API server's refusal."""
        return self._add(Fault(STOPPED_KUBELET, node, seconds=seconds))

    def delay(
        self, prefix: str, seconds: float, *, times: int | None = None, method: str | None = None
    ) -> Fault:
        """Answer as always, ``seconds`` later."""
        return self._add(Fault(DELAY, prefix, method, times, seconds=seconds))

    def expire_watch(self, prefix: str = "", *, times: int | None = 1) -> Fault:
        """Answer a watch with the 410 ERROR event, whatever revision it starts from."""
        return self._add(Fault(EXPIRE_WATCH, prefix, None, times))

    def expire_continue(self, prefix: str = "", *, times: int | None = 1) -> Fault:
        """Answer a list's continue token with 410."""
        return self._add(Fault(EXPIRE_CONTINUE, prefix, None, times))

    def cut_watches(self) -> None:
        """Break the connection of every running watch, without a last chunk."""
        self.watches_cut += 1
        self.on_cut()

    def remove(self, fault: Fault) -> None:
        with self._lock:
            if fault in self._rules:
                self._rules.remove(fault)

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._rules.append(fault)
        return fault

    def take(self, path: str, method: str, *kinds: str) -> Fault | None:
        """The first rule of these kinds that meets the request; it is counted down."""
        with self._lock:
            for fault in self._rules:
                if (
                    fault.kind in kinds
                    and path.startswith(fault.prefix)
                    and fault.method in (None, method)
                ):
                    fault.met += 1
                    if fault.left is not None:
                        fault.left -= 1
                        if fault.left <= 0:
                            self._rules.remove(fault)
                    return fault
        return None

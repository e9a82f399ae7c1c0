"""What the operator of a dynctl frontend reads and changes of its fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from dynctl.base.errors import DynctlError
from dynctl.documents.fleet_load import LastTest
from dynctl.documents.workers import WorkerRow
from dynctl.findings.report import Summary
from dynctl.findings.runner import Skipped
from dynctl.planning.domain_capacity import router_policy
from dynctl.sources.client import FrontendClient, TokenRefused
from router_core import Role, RouterPolicy

T = TypeVar("T")
_UNREADABLE: Final = (
    "a dynctl frontend shows its workers to its operator (--token-file), a Dynamo by --discovery"
)
_REFUSED: Final = (
    "the server refuses the token of --token-file, --token or DYNCTL_TOKEN; use the one of its "
    "--admin-token-file"
)


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """``workers``: those of the tested model. ``policy``: the router's own for KV transfers."""

    workers: Sequence[WorkerRow]
    policy: RouterPolicy | None = None

    def worker(self, worker_id: int | None) -> WorkerRow | None:
        """The worker with an id that a reply names."""
        return next((row for row in self.workers if row.worker_id == worker_id), None)

    def ranks(self) -> int:
        """The number of ranks that may generate answers."""
        return sum(max(1, len(row.ranks)) for row in self.answering())

    @property
    def active_requests(self) -> int:
        """The requests that the router counts on all workers."""
        return sum(rank.active_requests for row in self.workers for rank in row.ranks)

    def answering(self) -> list[WorkerRow]:
        """The workers that may generate answers: all but those of prefill alone."""
        return [row for row in self.workers if row.role != Role.PREFILL and row.gets_requests]


def served_workers(
    rows: Sequence[WorkerRow], model: str, policy: RouterPolicy | None = None
) -> FleetFacts:
    """The workers of ``rows`` that serve a model."""
    return FleetFacts([row for row in rows if model in row.served_names], policy)


class Operator:
    """The operator's calls of one frontend, beside the canaries of the event loop."""

    def __init__(self, client: FrontendClient) -> None:
        self.client = client
        self._token_refused = False

    async def call(self, method: Callable[[], T]) -> T:
        """Run a call in a thread. Raises DynctlError.

        Where it is cancelled it first waits for the call's end, so that its effect is known.
        """
        call = asyncio.ensure_future(asyncio.to_thread(method))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise

    async def fleet(self, model: str) -> FleetFacts | None:
        """The workers of a model; None where the server does not show them."""
        try:
            rows = await self.call(self.client.workers)
            config = await self.call(self.client.config)
        except TokenRefused:
            self._token_refused = self.client.has_token
            return None
        except DynctlError:
            return None
        return served_workers(rows, model, router_policy(config.values))

    def unreadable(self, unknown: str, *, unread: bool = False) -> Skipped:
        """A check that needs ``unknown``, which the server does not show. A token that the server
        refused is a fact that could not be read; a server without such facts is none."""
        if self._token_refused:
            return Skipped(f"{unknown}: {_REFUSED}", unread=True)
        return Skipped(f"{unknown}: {_UNREADABLE}", unread)

    async def report(self, summary: Summary, model: str) -> None:
        """Let the frontend keep the result, which `top` shows. A server that keeps none is left
        alone."""
        result = LastTest(
            summary.passed, summary.warnings, summary.failed, summary.skipped, model[:256]
        )
        with contextlib.suppress(DynctlError):
            await self.call(lambda: self.client.report_test(result))

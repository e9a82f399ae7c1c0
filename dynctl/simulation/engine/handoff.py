"""The hand-off from prefill to decode: held blocks, and the engine that pulls them.

vLLM: prefill returns `kv_transfer_params`, decode pulls by request id. SGLang: both engines get the
request at the same time with a bootstrap room, and decode waits at prefill's bootstrap address for
that room. Both use one call here, `POST /engine/kv/pull` on the prefill engine.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from dynctl.base.errors import network_reason
from dynctl.simulation.engine.prefix_cache import BlockTable
from dynctl.simulation.engine.scheduler import KvLost

PULL_PATH = "/engine/kv/pull"
_MAX_ANSWER_BYTES = 64 * 1024

HandoffKey = str | int
"""A request id (vLLM) or a bootstrap room (SGLang)."""


@dataclass(eq=False)
class HeldKv:
    """The blocks of a finished prefill; a decode engine can pull them once."""

    key: HandoffKey
    table: BlockTable
    dp_rank: int
    release_blocks: Callable[[BlockTable], None]
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the blocks were pulled, timed out or were lost."""
    pulled: bool = False
    pulling: bool = False
    timer: asyncio.TimerHandle | None = None


class HeldKvTable:
    """All hand-offs of a prefill engine that were not pulled yet.

    `timeout_s` bounds how long blocks are held and how long a puller waits for them.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[HandoffKey, HeldKv] = {}
        self._expected: dict[HandoffKey, asyncio.Future[HeldKv | None]] = {}
        self._reserved: set[HandoffKey] = set()
        self.expired = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self,
        key: HandoffKey,
        table: BlockTable,
        dp_rank: int,
        release_blocks: Callable[[BlockTable], None],
    ) -> HeldKv:
        """Keep `table` until it is pulled or the timeout frees it."""
        held = HeldKv(key, table, dp_rank, release_blocks)
        held.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire, held)
        self._held[key] = held
        waiter = self._expected.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(held)
        return held

    def reserve(self, key: HandoffKey) -> bool:
        """Reserve a key of the client; False while another prefill uses it."""
        if key in self._reserved:
            return False
        self._reserved.add(key)
        return True

    def find_by_blocks(self, blocks: list[int]) -> HandoffKey | None:
        """The hand-off with exactly `blocks`: older vLLM sends no request id."""
        for key, held in self._held.items():
            if held.table.blocks == blocks:
                return key
        return None

    async def expect(self, key: HandoffKey, wait: bool) -> HeldKv | None:
        """The hand-off `key`, None if there is none; with `wait`, also one that is held later."""
        held = self._held.get(key)
        if held is not None or not wait:
            return held
        waiter = self._expected.get(key)
        if waiter is None:
            waiter = self._expected[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(waiter)
        except TimeoutError:
            return None
        finally:
            if self._expected.get(key) is waiter and not waiter.done():
                self._expected.pop(key, None)
                waiter.cancel()

    def fail(self, key: HandoffKey) -> None:
        """Report to waiting pullers that the prefill for `key` failed."""
        self._reserved.discard(key)
        waiter = self._expected.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def release(self, held: HeldKv, *, pulled: bool) -> None:
        """Free the blocks. The second call has no effect."""
        if held.gone.is_set():
            return
        if held.timer is not None:
            held.timer.cancel()
        self._held.pop(held.key, None)
        self._reserved.discard(held.key)
        held.pulled = pulled
        held.release_blocks(held.table)
        held.gone.set()

    def forget_all(self) -> None:
        """Forget all hand-offs at a restart: their blocks are lost with the cache."""
        for held in list(self._held.values()):
            held.release_blocks = _nothing_to_release
            self.release(held, pulled=False)
        for key in list(self._expected):
            self.fail(key)

    def _expire(self, held: HeldKv) -> None:
        if held.pulling:  # a running transfer keeps its blocks
            held.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire, held)
            return
        self.expired += 1
        self.release(held, pulled=False)


def _nothing_to_release(_table: BlockTable) -> None:
    return None


@dataclass(frozen=True)
class RemoteKv:
    """The source of a prompt's KV blocks: a request of a prefill engine, or a bootstrap room."""

    host: str
    port: int
    engine_id: str | None = None
    request_id: str | None = None
    block_ids: tuple[int, ...] = ()
    room: int | None = None


class KvPuller:
    """The decode side. `domains`: the topology domains of this engine (domain -> value)."""

    def __init__(self, domains: Mapping[str, str], timeout_s: float) -> None:
        self._domains = dict(domains)
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def pull(self, remote: RemoteKv, blocks: int) -> None:
        """Pull `blocks` blocks; with 0 the other engine only frees them. Raises KvLost."""
        body: dict[str, Any] = {"num_blocks": blocks, "topology_domains": self._domains}
        if remote.room is not None:
            body["bootstrap_room"] = remote.room
        else:
            body |= {
                "remote_engine_id": remote.engine_id,
                "remote_request_id": remote.request_id,
                "remote_block_ids": remote.block_ids,
            }
        where = f"{remote.host}:{remote.port}"
        url = f"http://{_url_host(remote.host)}:{remote.port}{PULL_PATH}"
        try:
            async with self._open().post(url, data=msgspec.json.encode(body)) as answer:
                text = await answer.content.read(_MAX_ANSWER_BYTES)
                if answer.status != 200:
                    raise KvLost(f"KV transfer from {where} failed: {_reason(text)}")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            cause = network_reason(error)
            raise KvLost(f"KV transfer from {where} failed: {cause}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Longer than the time-out of the other side, so that its answer has the reason.
            timeout = aiohttp.ClientTimeout(total=self._timeout_s * 2 + 5, sock_connect=5)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                headers={"content-type": "application/json"},
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._session


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _reason(answer: bytes) -> str:
    try:
        return str(msgspec.json.decode(answer)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "invalid answer"

"""Convert an engine's events to events of the prefix index, and report what is dropped.

The rules are those of Dynamo 1.6's converter: an event that the index cannot use is dropped with a
code, and the stream continues. Dynamo only logs the drop, so that a different block size shows as
missing overlap; here every drop is a value with both numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from dynctl.wire.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    PairsStored,
    decode_batch,
)
from router_core import (
    DEVICE,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    Cleared,
    KvEvent,
    WindowStored,
    local_block_hashes,
)

TIERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "GPU": DEVICE,
        "CPU": "host_pinned",
        "CPU_PINNED": "host_pinned",
        "DISK": "disk",
        "STORAGE": "disk",
        "EXTERNAL": "external",
    }
)
"""The engine's storage medium to the tier of the router, with Dynamo's names. Blocks of any medium
elsewhere (locality REMOTE) are external."""

#: Kinds of cache groups that hold whole prefixes (None: an engine without groups), and those that
#: hold the end of one.
_FULL: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_WINDOWS: Final = frozenset({"sliding_window", "sliding_window_mla"})
_MODELLED: Final = _FULL | _WINDOWS
_EXPECTED: Final = "full attention and sliding windows"
#: Cache groups of one engine; models have fewer than ten.
MAX_GROUPS: Final = 64

_LOCALITIES: Final = frozenset({"LOCAL", "REMOTE"})

NO_ADAPTERS: Final[Mapping[int, str]] = MappingProxyType({})


class DropCode(StrEnum):
    """Why an event, or the end of one, was dropped. Codes are stable."""

    BLOCK_SIZE_MISMATCH = "BLOCK_SIZE_MISMATCH"
    TOKEN_IDS_TOO_SHORT = "TOKEN_IDS_TOO_SHORT"  # noqa: S105 - a code, not a secret
    GROUP_IGNORED = "GROUP_IGNORED"
    BLOCKS_NOT_LISTED = "BLOCKS_NOT_LISTED"
    UNKNOWN_MEDIUM = "UNKNOWN_MEDIUM"
    UNKNOWN_ADAPTER = "UNKNOWN_ADAPTER"
    EXTRA_KEYS_NOT_MODELLED = "EXTRA_KEYS_NOT_MODELLED"
    TIER_NOT_DESCRIBED = "TIER_NOT_DESCRIBED"


#: Blocks of salted prompts that are remembered: as many as the largest engine holds.
_MAX_SALTED: Final = 4_000_000

_MESSAGES: Final = {
    DropCode.BLOCK_SIZE_MISMATCH: (
        "the engine publishes blocks of {value} tokens, the router hashes blocks of {expected}; "
        "no overlap is possible until both use one block size"
    ),
    DropCode.TOKEN_IDS_TOO_SHORT: "token_ids too short: need {expected}, got {value}",
    DropCode.GROUP_IGNORED: (
        "the cache group of kind {value} is not modelled (only {expected}): less may be reusable "
        "than predicted"
    ),
    DropCode.BLOCKS_NOT_LISTED: (
        "the event has the tokens of {value} blocks and the hashes of {expected}, so the place of "
        "each block is unknown"
    ),
    DropCode.UNKNOWN_MEDIUM: "storage medium {value!r} is unknown, expected one of {expected}",
    DropCode.TIER_NOT_DESCRIBED: (
        "blocks in {value} memory are announced without {expected}, so they are not counted"
    ),
    DropCode.UNKNOWN_ADAPTER: (
        "LoRA adapter id {value} has no known name, so its blocks look like those of the base model"
    ),
    DropCode.EXTRA_KEYS_NOT_MODELLED: (
        "block {value} of the run is keyed by more than its tokens, its adapter and a cache salt "
        "(multimodal content or prompt embeddings), which the index does not model"
    ),
}


@dataclass(frozen=True, slots=True)
class Drop:
    """``blocks`` blocks of an event were dropped, because of ``value`` instead of ``expected``."""

    code: DropCode
    blocks: int
    value: int | str
    expected: int | str

    @property
    def message(self) -> str:
        return _MESSAGES[self.code].format(value=self.value, expected=self.expected)


@dataclass(frozen=True, slots=True)
class Converted:
    """The events of a batch for the index, in order, and the drops.

    ``pairs``: whether the engine publishes pairs of tokens, by the last stored blocks that the
    index takes; None: there are none. Prompts match blocks of pairs by hashes with ``is_eagle``.
    """

    events: tuple[CacheEvent, ...]
    drops: tuple[Drop, ...]
    pairs: bool | None = None


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """The changes of a router that a batch of an engine means, in order, and the drops.

    ``pairs``: as of :class:`Converted`.
    """

    changes: tuple[KvEvent, ...]
    drops: tuple[Drop, ...]
    pairs: bool | None


def read_batch(
    payload: bytes,
    worker_id: int,
    block_size: int,
    *,
    dp_rank: int = 0,
    adapter_names: Mapping[int, str] = NO_ADAPTERS,
) -> ReadBatch:
    """The changes of ``router_core`` in one batch of KV events as vLLM or SGLang publishes it.

    ``payload``: the last frame of a published message, msgpack. ``block_size``: of the worker, in
    tokens. ``dp_rank``: of a batch that names none. ``adapter_names``: names of LoRA ids, for
    engines that publish only the number. Apply the changes in order of the batches' numbers; a
    number that is missing is `router_core.IndexMarked`. Raises WireError, with the path, for what
    is not a batch.
    """
    batch = decode_batch(payload)
    converted = to_index_events(batch, block_size, adapter_names=adapter_names)
    rank = dp_rank if batch.data_parallel_rank is None else batch.data_parallel_rank
    changes = tuple(KvEvent(worker_id, rank, event) for event in converted.events)
    return ReadBatch(changes, converted.drops, converted.pairs)


def to_index_events(
    batch: EventBatch,
    block_size: int,
    *,
    adapter_names: Mapping[int, str] = NO_ADAPTERS,
    cache_namespace: str | None = None,
    is_eagle: bool = False,
    salted: dict[int, str] | None = None,
) -> Converted:
    """Convert a batch to events of the prefix index.

    ``block_size`` is the router's, in tokens. ``adapter_names`` names LoRA ids for engines that
    publish only the number. ``cache_namespace`` and ``is_eagle`` are those of the worker; see
    `router_core.hashing.local_block_hashes`. Blocks published with pairs of tokens are hashed with
    ``is_eagle`` in any case. ``salted``: for an index that mixes a salt into every
    block, as Dynamo's; the salts of the engine's blocks by their hashes, empty at first, which this
    function keeps up to date, since only the event of a prompt's first block has the salt.
    """
    alone = _group_in_place_of_full_attention(batch)
    converter = _Converter(block_size, adapter_names, cache_namespace, is_eagle, salted, alone)
    for event in batch.events:
        converter.take(event)
    converter.end_removal()
    return Converted(tuple(converter.events), tuple(converter.drops), converter.pairs)


@dataclass(slots=True)
class _Converter:
    """Converts the events of one batch; the first fields are the parameters of `to_index_events`.

    ``alone``: the group with a window that takes the place of full attention. ``removed``: names
    in one event, of ``removed_from``, its tier and group: engines evict block by block.
    """

    block_size: int
    adapter_names: Mapping[int, str]
    cache_namespace: str | None
    is_eagle: bool
    salted: dict[int, str] | None
    alone: int | None
    events: list[CacheEvent] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    pairs: bool | None = None
    removed: list[int] = field(default_factory=list)
    removed_from: tuple[str, int] = (DEVICE, 0)

    def take(self, event: Event) -> None:
        if not isinstance(event, BlockRemoved):
            self.end_removal()
        if isinstance(event, AllBlocksCleared):
            self.events.append(Cleared())
            if self.salted:
                self.salted.clear()
            return
        refused = _refusal(event)
        if refused is not None:
            self.drops.append(refused)
        elif isinstance(event, BlockRemoved):
            self._remove(event)
        elif event.kv_cache_spec_kind in _WINDOWS and event.group_idx != self.alone:
            self._store_window(event)
        else:
            self._store(event)

    def _drop(self, code: DropCode, blocks: int, value: int | str, expected: int | str) -> None:
        self.drops.append(Drop(code, blocks, value, expected))

    def _remove(self, event: BlockRemoved) -> None:
        tier, group = _tier(event), event.group_idx or 0
        if self.removed_from != (tier, group):
            self.end_removal()
            self.removed_from = tier, group
        self.removed += event.block_hashes
        if self.salted and tier == DEVICE:
            _remember(self.salted, event.block_hashes, None)

    def end_removal(self) -> None:
        """Add the event of the blocks that were removed one after the other."""
        if self.removed:
            self.events.append(BlocksRemoved(tuple(self.removed), *self.removed_from))
            self.removed = []

    def _store(self, event: BlockStored) -> None:
        """Add the usable start of a run of blocks; the rest is dropped."""
        size, blocks = self.block_size, len(event.block_hashes)
        if event.block_size != size:
            self._drop(DropCode.BLOCK_SIZE_MISMATCH, blocks, event.block_size, size)
            return
        adapter = event.lora_name or None
        if adapter is None and event.lora_id is not None:
            adapter = self.adapter_names.get(event.lora_id)
            if adapter is None:
                self._drop(DropCode.UNKNOWN_ADAPTER, blocks, event.lora_id, "a name")
                return
        eagle = self.is_eagle or isinstance(event, PairsStored)
        salt, keyed = _extra_keys(event, adapter) if event.extra_keys else (None, blocks)
        usable = self._usable_blocks(event, min(keyed, blocks), eagle)
        if usable == 0:
            return
        namespace = self.cache_namespace
        if self.salted is not None:
            if event.parent_block_hash is not None:
                salt = self.salted.get(event.parent_block_hash)
            _remember(self.salted, event.block_hashes, salt)
            namespace, salt = salt or namespace, None
        tokens, needed = event.token_ids, usable * size + eagle
        local = local_block_hashes(
            tokens if len(tokens) == needed else tokens[:needed],
            size,
            lora_name=adapter,
            cache_namespace=namespace,
            cache_salt=salt,
            is_eagle=eagle,
        )
        hashes = event.block_hashes if usable == blocks else event.block_hashes[:usable]
        tier, group = _tier(event), event.group_idx or 0
        stored = BlocksStored(event.parent_block_hash, hashes, local, tier, group, tier == DEVICE)
        self.events.append(stored)
        self.pairs = isinstance(event, PairsStored)

    def _usable_blocks(self, event: BlockStored, keyed: int, eagle: bool) -> int:
        """How many blocks of a run the index can use: at most the first ``keyed``, and those of
        which the event has all tokens."""
        blocks, tokens = len(event.block_hashes), len(event.token_ids)
        if keyed < blocks:
            # The blocks after it are its descendants, so they could not be matched either.
            self._drop(DropCode.EXTRA_KEYS_NOT_MODELLED, blocks - keyed, keyed, "none")
        complete = max(0, tokens - eagle) // self.block_size
        if event.kv_cache_spec_kind is not None and complete > blocks:
            self._drop(DropCode.BLOCKS_NOT_LISTED, blocks, complete, blocks)
            return 0
        if complete < keyed:
            needed = keyed * self.block_size + eagle
            self._drop(DropCode.TOKEN_IDS_TOO_SHORT, keyed - complete, tokens, needed)
        return min(complete, keyed)

    def _store_window(self, event: BlockStored) -> None:
        """Add the blocks of a group with a sliding window, by name: an engine lists only those that
        a later prompt can reuse, which may be none."""
        blocks, window = event.block_hashes, event.kv_cache_spec_sliding_window
        if not window or window < 0 or not event.block_size or event.block_size % self.block_size:
            # Blocks smaller than the router's have names that it does not know.
            self._drop(DropCode.GROUP_IGNORED, len(blocks), "sliding_window", _EXPECTED)
        elif blocks:
            needed = -(-(window - 1) // event.block_size)
            span = event.block_size // self.block_size
            group = event.group_idx or 0
            self.events.append(WindowStored(group, blocks, needed, span, _tier(event)))


def _refusal(event: BlockStored | BlockRemoved) -> Drop | None:
    """Why the index cannot use an event, whatever its tokens are."""
    blocks, described = len(event.block_hashes), True
    if isinstance(event, BlockStored):
        described = bool(event.block_size)
        if described and not _is_modelled(event):
            kind = event.kv_cache_spec_kind or "unknown"
            return Drop(DropCode.GROUP_IGNORED, blocks, kind[:64], _EXPECTED)
    if event.medium is not None and event.medium.upper() not in TIERS:
        return Drop(DropCode.UNKNOWN_MEDIUM, blocks, event.medium[:64], ", ".join(TIERS))
    if event.locality is not None and event.locality.upper() not in _LOCALITIES:
        where = f"{event.medium or 'GPU'} at {event.locality}"[:64]
        return Drop(DropCode.UNKNOWN_MEDIUM, blocks, where, "LOCAL or REMOTE")
    if not described and _tier(event) != DEVICE:
        return Drop(DropCode.TIER_NOT_DESCRIBED, blocks, event.medium or "remote", "tokens")
    return None


def _is_modelled(event: BlockStored) -> bool:
    """Whether the index knows the event's cache group."""
    group, kind = event.group_idx or 0, event.kv_cache_spec_kind
    return group < MAX_GROUPS and kind in _MODELLED and not (kind is None and group)


def _tier(event: BlockStored | BlockRemoved) -> str:
    if event.locality is not None and event.locality.upper() == "REMOTE":
        return "external"
    return DEVICE if event.medium is None else TIERS[event.medium.upper()]


def _remember(salted: dict[int, str], names: Sequence[int], salt: str | None) -> None:
    if salt is not None:
        if len(salted) > _MAX_SALTED:
            salted.clear()  # blocks that follow are not found under their salt until stored again
        salted.update(dict.fromkeys(names, salt))
    elif salted:
        for name in names:
            salted.pop(name, None)


def _group_in_place_of_full_attention(batch: EventBatch) -> int | None:
    """The first group with a window, where no group of the batch has full attention.

    Such a model's cache is indexed as if its first window reached back to the prompt's start: a
    lower bound of what can be reused.
    """
    first = None
    for event in batch.events:
        if isinstance(event, BlockStored):
            if event.kv_cache_spec_kind not in _WINDOWS:
                return None
            group = event.group_idx or 0
            first = group if first is None else min(first, group)
    return first


def _extra_keys(event: BlockStored, adapter: str | None) -> tuple[str | None, int]:
    """(cache salt of the prompt, how many blocks of the run come before one with other keys).

    vLLM puts the adapter's name (older releases: its id) into every block's keys and the salt into
    those of a prompt's first block, as plain text; images and embeddings are pairs or bytes.
    """
    salt = None
    for i, keys in enumerate(event.extra_keys or ()):
        left = _keys_beside_adapter(keys, event, adapter)
        starts = i == 0 and event.parent_block_hash is None
        if starts and len(left) == 1 and isinstance(left[0], str):
            salt = left[0]
        elif left:
            return salt, i
    return salt, len(event.block_hashes)


def _keys_beside_adapter(keys: Any, event: BlockStored, adapter: str | None) -> list[Any]:
    listed = keys if isinstance(keys, list) else [keys]
    left = [key for key in listed if key is not None]
    if adapter is not None:
        known = next((key for key in (adapter, event.lora_id) if key in left), None)
        if known is not None:
            left.remove(known)
    return left

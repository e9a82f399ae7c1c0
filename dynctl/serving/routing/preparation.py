"""The routing request of a prompt: its tokens, their hashes, and the facts of its model."""

import hashlib
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from dynctl.base.turns import Apart
from dynctl.serving.routing.prompts import (
    NOT_MODELLED,
    Prompt,
    PromptTokenizers,
    PromptTokens,
    estimate_tokens,
)
from dynctl.serving.routing.served_models import ServedModels
from dynctl.tokenization.errors import OverLimit, TokenizationError
from dynctl.wire.openai import ChatRequest, CompletionRequest
from router_core import (
    NO_CONSTRAINTS,
    BlockHashes,
    Pin,
    PromptHasher,
    Router,
    RoutingConstraints,
    RoutingRequest,
    Session,
    quick_init,
)

#: Prompts of a batch, and their blocks together, up to which the caches of all of them count. A
#: decision about more would hold up other requests.
_HASHED_PROMPTS: Final = 256
_HASHED_BLOCKS: Final = 65_536
_LONG_BATCH: Final = (
    f"cache overlap not modelled: a batch of more than {_HASHED_PROMPTS} prompts or "
    f"{_HASHED_BLOCKS} blocks"
)


@quick_init
@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be routed, and the tokens it came from (``ids`` None: not tokenized).

    In a batch ``tokens`` are the first prompt's; ``prompts`` counts them, and ``longest`` is the
    length of the longest one in tokens.
    """

    request: RoutingRequest
    tokens: PromptTokens
    tokenize_s: float = 0.0
    prompts: int = 1
    longest: int = 0


class Preparation:
    """Makes routing requests.

    ``id_prefix`` starts every decision id; None: a random one. ``salts_each_block``: whether a
    cache salt is mixed into each block of a prompt, as by the workers of a Dynamo deployment, and
    not into the first one alone, as by engines. ``session_secret`` hashes session names, so that a
    key does not reveal its name; None: a random one. ``over_limit(model, error)`` reports a model
    file that is too large.
    """

    def __init__(
        self,
        router: Router,
        tokenizers: PromptTokenizers,
        served: ServedModels,
        clock: Callable[[], float],
        *,
        id_prefix: str | None,
        salts_each_block: bool,
        session_secret: bytes | None,
        over_limit: Callable[[str, OverLimit], None],
    ) -> None:
        self._router = router
        #: Make the token ids of prompts.
        self.tokenizers = tokenizers
        self._served = served
        self._clock = clock
        self._prefix = id_prefix if id_prefix is not None else f"{random.getrandbits(40):010x}"
        self._salts_each_block = salts_each_block
        self.session_secret = secrets.token_bytes(32) if session_secret is None else session_secret
        self._over_limit = over_limit
        self._count = 0
        #: Block size -> hasher that caches the beginnings of prompts.
        self._hashers: dict[int, PromptHasher] = {}

    def new_id(self) -> str:
        """A decision id: unique in this process, and almost surely across processes."""
        self._count += 1
        return f"{self._prefix}{self._count:08x}"

    async def prepare(  # noqa: PLR0913  the keyword arguments are fields of the request
        self,
        model: str,
        prompts: Prompt | Sequence[Prompt],
        *,
        decision_id: str | None = None,
        constraints: RoutingConstraints = NO_CONSTRAINTS,
        pin_prefill: Pin | None = None,
        pin_decode: Pin | None = None,
        allowed_worker_ids: frozenset[int] | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        not_modelled: str | None = None,
        session: Session | None = None,
        policy_class: str | None = None,
        priority: int = 0,
        strict_priority: int = 0,
        worker_set: str | None = None,
        served_name: str | None = None,
        streams: bool = True,
        apart: Apart | None = None,
    ) -> Prepared:
        """Tokenize and hash one prompt or a batch. Raises PromptError, TemplateError or
        HashingError (a client's 4xx).

        ``not_modelled`` is why the prompt cannot be tokenized here (images, a template in the
        request): it is routed by load, and its decisions have this note. ``lora_name`` is the
        adapter, which is part of the hashes. ``served_name``: see :meth:`ServedModels.served_name`.
        ``session``: made by :meth:`session`. ``policy_class``, ``priority`` and
        ``strict_priority`` are for the router queue. ``worker_set``: see
        :meth:`ServedModels.draw_worker_set`. ``apart``: runs what takes long, for a large
        request; None: it runs here.
        """
        started = self._clock()
        batch = [prompts] if isinstance(prompts, Prompt) else prompts
        one_prompt = len(batch) == 1
        if not_modelled is not None:
            tokenized = [PromptTokens(None, estimate_tokens(p), "estimate") for p in batch]
        else:
            tokenized = await self._tokenize(model, batch, worker_set, apart)
        tokens = tokenized[0]
        count = longest = tokens.count
        lengths: list[int] = []
        if not one_prompt:
            lengths = [prompt_tokens.count for prompt_tokens in tokenized]
            count, longest = sum(lengths), max(lengths)
        tokenize_s = self._clock() - started
        size, eagle = self._served.blocks(model, worker_set)
        hashes: Sequence[BlockHashes] = ()
        modelled, note = tokens.ids is not None, not_modelled or tokens.note or NOT_MODELLED
        if modelled and not one_prompt and _is_long(tokenized, size):
            modelled, note = False, _LONG_BATCH
        if modelled:
            hash_all = partial(
                self._hash_all, tokenized, size, lora_name, cache_salt, is_eagle=eagle
            )
            hashes = hash_all() if apart is None else await apart(hash_all)
        request = RoutingRequest(
            id=decision_id or self.new_id(),
            model=model,
            isl_tokens=count,
            block_size=size,
            sequence_hashes=hashes[0].sequence if hashes else (),
            local_hashes=hashes[0].local if hashes else (),
            constraints=constraints,
            pin_prefill=pin_prefill,
            pin_decode=pin_decode,
            allowed_worker_ids=allowed_worker_ids,
            worker_set=worker_set,
            is_eagle=eagle,
            overlap_modelled=modelled,
            notes=() if modelled else (note,),
            lora_name=lora_name,
            salted=bool(cache_salt),
            more_hashes=() if one_prompt else tuple(more.sequence for more in hashes[1:]),
            lengths=tuple(lengths),
            session=session,
            policy_class=policy_class,
            priority=priority,
            strict_priority=strict_priority,
            arrived_at=started,
            chained=True,
            served_name=served_name,
            streams=streams,
        )
        return Prepared(request, tokens, tokenize_s, len(tokenized), longest)

    def salt_of(self, parsed: ChatRequest | CompletionRequest) -> str | None:
        """The cache salt of a request. Dynamo prefers that of ``nvext``, engines the body's own."""
        if self._salts_each_block:
            return parsed.nvext.cache_salt or parsed.cache_salt
        return parsed.cache_salt

    async def _tokenize(
        self, model: str, batch: Sequence[Prompt], worker_set: str | None, apart: Apart | None
    ) -> list[PromptTokens]:
        tokenizers = self.tokenizers
        try:
            if len(batch) == 1:
                return [await tokenizers.tokenize(model, batch[0], worker_set, apart)]
            return await tokenizers.tokenize_batch(model, batch, worker_set, apart)
        except TokenizationError as error:
            if error.over_limit is not None:
                self._over_limit(model, error.over_limit)
            raise

    def _hash_all(
        self,
        tokenized: Sequence[PromptTokens],
        block_size: int,
        lora_name: str | None,
        cache_salt: str | None,
        *,
        is_eagle: bool,
    ) -> list[BlockHashes]:
        hash_prompt = self._hash
        return [
            hash_prompt(tokens.ids or (), block_size, lora_name, cache_salt, is_eagle=is_eagle)
            for tokens in tokenized
        ]

    def _hash(
        self,
        ids: Sequence[int],
        block_size: int,
        lora_name: str | None,
        cache_salt: str | None,
        *,
        is_eagle: bool,
    ) -> BlockHashes:
        hasher = self._hashers.get(block_size)
        if hasher is None:
            hasher = self._hashers[block_size] = PromptHasher(block_size)
        each = self._salts_each_block
        return hasher.hash_prompt(
            ids,
            lora_name=lora_name,
            cache_namespace=cache_salt if each else None,
            cache_salt=None if each else cache_salt,
            is_eagle=is_eagle,
        )

    def rehashed(
        self, request: RoutingRequest, ids: Sequence[int], cache_salt: str | None
    ) -> RoutingRequest:
        """The request with a longer prompt: what was generated is part of it now."""
        size, lora, eagle = request.block_size, request.lora_name, request.is_eagle
        hashes = self._hash(ids, size, lora, cache_salt, is_eagle=eagle)
        return replace(
            request,
            isl_tokens=len(ids),
            sequence_hashes=hashes.sequence,
            local_hashes=hashes.local,
        )

    def session(self, name: str | None, client: bytes = b"") -> Session | None:
        """The session that a client names; None without one, and while affinity is off.

        The key says nothing about the name, and equal names of two clients have different keys.
        """
        if not name or self._router.config.router_session_affinity_ttl_secs is None:
            return None
        whole = len(client).to_bytes(4) + client + name.encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(whole, key=self.session_secret, digest_size=16)
        return Session(digest.hexdigest(), self._clock())


def _is_long(batch: Sequence[PromptTokens], block_size: int) -> bool:
    """Whether a batch has more prompts or blocks than are hashed."""
    blocks = sum(prompt_tokens.count for prompt_tokens in batch) // block_size
    return len(batch) > _HASHED_PROMPTS or blocks > _HASHED_BLOCKS

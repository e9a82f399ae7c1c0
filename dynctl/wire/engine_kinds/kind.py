"""EngineKind: everything that is particular to one kind of engine, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dynctl.wire.engine_kinds.handoff import HandoffRules
from dynctl.wire.engine_metrics import MetricNames

if TYPE_CHECKING:
    from dynctl.wire.engine_kinds.facts import EngineFacts
    from dynctl.wire.engine_kinds.load import LoadReading
    from dynctl.wire.engine_kinds.tokens import TokenApi
    from dynctl.wire.openai import ChatRequest

#: How vLLM reads a chat, and the tokenizers of dynctl with it.
AS_TOKENIZERS: Final = "as the tokenizers here"


@dataclass(frozen=True, slots=True)
class Description:
    """An engine's description of itself.

    ``paths``: the present one, then those of older releases. ``read`` takes the JSON object and the
    host of the worker; its facts name the kind only where the description is of that kind.
    ``first``: it is read before the OpenAI API and the metrics, and replaces both.
    """

    paths: Sequence[str]
    read: Callable[[Mapping[str, Any], str], EngineFacts]
    first: bool = False


@dataclass(frozen=True, slots=True)
class LoadPath:
    """Where an engine reports its load in JSON. ``read`` takes the object and the worker's id."""

    path: str
    read: Callable[[Mapping[str, Any], int], LoadReading]


@dataclass(frozen=True, slots=True, eq=False)
class EngineKind:
    """A kind of engine. The defaults are the rules of vLLM, which hold for unknown servers too.

    ``name`` is that of options and documents, ``label`` that of sentences. ``as_vllm``: no rule for
    requests differs from vLLM's. ``load`` None: the load comes from the metrics, ``metrics`` has
    their names.

    Prompts: kinds with the same ``chat_reading`` make the same tokens of a chat. ``own_tools``: the
    tools as they are given to the template for a request of the Messages or Responses API, None
    where they are those of all engines.

    Isolation: ``cache_keys`` are fields of a body that are part of the keys of cached blocks,
    ``without_salt`` the paths that ignore a cache salt. ``directions``: field of a body -> how it
    directs the engine past the router, as the second half of a sentence; ``carriers``: paths of
    objects in a body that may have such fields too; ``direction_headers``: header -> the field
    that it sets.

    Adapters: ``without_adapters`` are paths that ignore one; ``adapter_body`` makes the request for
    an adapter of a body, path, model and adapter, None: the adapter's name is the model.

    ``token_api`` imports how `serve attach` requests tokens; None: not supported.
    """

    name: str
    label: str
    as_vllm: bool = False
    description: Description | None = None
    load: LoadPath | None = None
    metrics: MetricNames = field(default_factory=MetricNames)
    chat_reading: str = AS_TOKENIZERS
    own_tools: Callable[[ChatRequest], Sequence[Mapping[str, Any]] | None] = lambda request: None
    cache_keys: Sequence[str] = ()
    without_salt: frozenset[str] = frozenset()
    directions: Mapping[str, str] = field(default_factory=dict)
    carriers: Sequence[tuple[str, ...]] = ()
    direction_headers: Mapping[str, str] = field(default_factory=dict)
    without_adapters: frozenset[str] = frozenset()
    adapter_body: Callable[[bytes, str, str, str], bytes] | None = None
    handoff: HandoffRules = field(default_factory=HandoffRules)
    token_api: Callable[[], TokenApi] | None = None

"""The kinds of engines. A new kind is one row here, and a folder or file beside."""

from __future__ import annotations

from typing import Final

from dynctl.wire.engine_kinds.kind import EngineKind
from dynctl.wire.engine_kinds.sglang.kind import SGLANG
from dynctl.wire.engine_kinds.simulated import SIMULATED
from dynctl.wire.engine_kinds.vllm.kind import VLLM
from dynctl.wire.engine_metrics import MetricNames

KINDS: Final = (SIMULATED, VLLM, SGLANG)
#: The kind of a server that does not describe itself as another one.
OTHER: Final = VLLM
#: The names of all kinds: it is unknown whose metrics are read.
METRIC_NAMES: Final = MetricNames(
    waiting=tuple(name for kind in KINDS for name in kind.metrics.waiting),
    usage=tuple(name for kind in KINDS for name in kind.metrics.usage),
    cache_config=tuple(name for kind in KINDS for name in kind.metrics.cache_config),
)
_BY_NAME: Final = {kind.name: kind for kind in KINDS}
#: Names of the kinds that `serve attach` can attach and that users can name.
ATTACHED: Final = tuple(kind.name for kind in KINDS if kind.token_api and kind is not SIMULATED)


def kind_named(name: str | None) -> EngineKind:
    """The kind with this name; `OTHER` for None and for one that this version does not have."""
    return OTHER if name is None else _BY_NAME.get(name, OTHER)

"""``--set key=value``: other settings, or other load, for one dry run.

Settings go by their names (``prefill_load_scale=1.5``); load by worker:
``load.prefill-a0.prefill_tokens=+500``, ``load.decode-b0.decode_blocks=-10``, or without a sign
to set it (``load.prefill-a0.prefill_tokens=0``).
"""

from collections.abc import Iterable
from typing import Any

from dynctl.base.errors import UsageProblem
from dynctl.base.naming import resolve_worker
from router_core.config import RouterConfig, parse_assignments
from router_core.router import Router
from router_core.selection import WhatIf

LOADS = ("prefill_tokens", "decode_blocks")
_PREFIX = "load."
_MOST = 1 << 40


def what_if(
    router: Router, assignments: Iterable[str]
) -> tuple[RouterConfig | None, WhatIf | None, dict[str, Any]]:
    """The settings and the load that ``assignments`` describe; None where nothing changes.

    The third value is what was set, for people. Raises UsageProblem or ConfigError.
    """
    texts = list(assignments)
    settings = [text for text in texts if not text.strip().startswith(_PREFIX)]
    config, shown = parse_assignments(router.config, settings)
    shifts: dict[str, dict[int, int]] = {name: {} for name in LOADS}
    for text in texts:
        if text.strip().startswith(_PREFIX):
            _shift(router, text.strip(), shifts)
            key, _, value = text.strip().partition("=")
            shown[key] = value
    changed = any(shifts.values())
    load = WhatIf(shifts["prefill_tokens"], shifts["decode_blocks"]) if changed else None
    return config if settings else None, load, shown


def _shift(router: Router, text: str, shifts: dict[str, dict[int, int]]) -> None:
    key, separator, raw = text.partition("=")
    # Worker names may hold dots: the load's name is what stands behind the last one.
    worker_text, _, load = key.removeprefix(_PREFIX).rpartition(".")
    if not separator or not worker_text or load not in LOADS:
        raise UsageProblem(
            f"--set {text}: expected load.WORKER.prefill_tokens=+N or load.WORKER.decode_blocks=+N",
            "for example: --set load.prefill-a0.prefill_tokens=+500",
        )
    try:
        number = int(raw.replace("_", ""))
    except ValueError:
        raise UsageProblem(
            f"--set {text}: expected a whole number, +N or -N, got {raw!r}"
        ) from None
    if abs(number) > _MOST:
        raise UsageProblem(f"--set {text}: expected at most {_MOST:,}, got {raw}")
    workers = [(worker.worker_id, worker.name) for worker in router.registry]
    for slot in router.registry.slots(resolve_worker(worker_text, workers)):
        column = router.load.prefill_tokens if load == LOADS[0] else router.load.decode_blocks
        relative = raw.strip()[0] in "+-"
        shifts[load][slot] = number if relative else number - column[slot]

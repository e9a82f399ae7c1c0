"""Find a worker by its name, its id in decimal or hex, or the unique end of either.

Real ids have 19 or 20 digits, too many to type; pod names differ in their last characters.
"""

import re
from collections.abc import Iterable

from dynctl.base.errors import UsageProblem
from dynctl.base.terminal import printable

#: Ends shorter than this match too much by accident.
MIN_SUFFIX = 2
_MOST_LISTED = 8


def resolve_worker(text: str, workers: Iterable[tuple[int, str]]) -> int:
    """The id of the worker that ``text`` identifies, among ``(id, name)`` pairs.

    A whole name or id has priority over the end of another. Raises UsageProblem that lists the
    matching workers, or all.
    """
    known = list(workers)
    wanted = text.strip()
    exact = [worker_id for worker_id, name in known if name == wanted]
    exact = exact or [worker_id for worker_id, _ in known if worker_id in _as_ids(wanted)]
    if exact:
        return exact[0]
    matching = []
    if len(wanted) >= MIN_SUFFIX:
        for worker_id, name in known:
            if name.endswith(wanted) or f"{worker_id:016x}".endswith(wanted.lower()):
                matching.append((worker_id, name))
    if len(matching) == 1:
        return matching[0][0]
    if matching:
        text = f"worker {text!r} is ambiguous: {len(matching)} workers end in it"
        raise UsageProblem(text, _listed(matching))
    if not known:
        raise UsageProblem(f"worker {text!r}: no worker is registered")
    raise UsageProblem(
        f"unknown worker {text!r}: expected a name, an id (decimal or hex), or the unique end of "
        "one",
        _listed(known),
    )


def _as_ids(text: str) -> set[int]:
    ids = set()
    for base in (10, 16):
        try:
            ids.add(int(text, base))
        except ValueError:
            continue
    return ids


def _listed(workers: list[tuple[int, str]]) -> str:
    lines = [f"{printable(name)}  ({worker_id:016x})" for worker_id, name in workers[:_MOST_LISTED]]
    if len(workers) > _MOST_LISTED:
        lines.append(f"and {len(workers) - _MOST_LISTED} more: dynctl workers list")
    return "\n".join(lines)


def in_numeric_order(name: str) -> list[tuple[bool, int, str]]:
    """The key by which names sort with their numbers as numbers: ``a-9`` before ``a-10``."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(True, int(part), "") if number % 2 else (False, 0, part)
            for number, part in enumerate(parts)]  # fmt: skip

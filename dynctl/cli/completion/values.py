"""The possible values of options and arguments: words, paths, or live names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

from dynctl.base.options import formats_of


class Kind(StrEnum):
    """``LIVE``: names from `dynctl __complete`; ``FREE``: any text, without proposals."""

    WORDS = "words"
    FILE = "file"
    FOLDER = "folder"
    LIVE = "live"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Meaning:
    """``words``: of WORDS; ``live``: the kind of name for LIVE, see `completion.live`."""

    kind: Kind
    words: tuple[str, ...] = ()
    live: str = ""

    @property
    def text(self) -> str:
        """The form in the scripts: ``words:a b``, ``live:model``, ``file``."""
        rest = self.live if self.kind is Kind.LIVE else " ".join(self.words)
        return f"{self.kind}:{rest}" if rest else str(self.kind)


FREE: Final = Meaning(Kind.FREE)

_LIVE: Final[Mapping[str, str]] = {
    "--model": "model",
    "--context": "context",
    "--kube-context": "kube-context",
    "--against": "kube-context",
    "--pin-prefill": "worker",
    "--pin-decode": "worker",
    "--domain": "domain",
    "--over": "domain-value",
    "--selector": "selector",
    "--require-taint": "taint",
}
#: By path, and flag or (of an argument) metavar.
_LIVE_AT: Final[Mapping[tuple[str, str], str]] = {
    ("decisions list", "--worker"): "worker",
    ("decisions tail", "--worker"): "worker",
    ("events tail", "--worker"): "worker",
    ("workers cordon", "ID"): "worker",
    ("workers drain", "ID"): "worker",
    ("workers remove", "ID"): "worker",
    ("workers show", "ID"): "worker",
    ("workers uncordon", "ID"): "worker",
    ("thresholds get", "MODEL"): "model",
    ("thresholds set", "MODEL"): "model",
    ("context use", "NAME"): "context",
    ("context show", "NAME"): "context",
    ("context remove", "NAME"): "context",
}
#: These take new names, so live names do not help.
_NEW: Final = frozenset({("serve engine", "--model"), ("topology render", "--domain")})
_LITERAL: Final = re.compile(r"[a-z][a-z0-9.-]*")


def meaning(path: str, names: Iterable[str], metavar: str | None) -> Meaning:
    """The possible values of an option (``names``: its flags) or of an argument (no names)."""
    shown = (metavar or "").strip("[]")
    if "--output" in (names := tuple(names)):
        return Meaning(Kind.WORDS, formats_of(path))
    for name in names or (shown,):
        live = _LIVE_AT.get((path, name)) or _LIVE.get(name)
        if live is not None and (path, name) not in _NEW:
            return Meaning(Kind.LIVE, live=live)
        words = known_words().get((path, name)) or known_words().get(("", name))
        if words:
            return Meaning(Kind.WORDS, words)
    parts = shown.split("|")
    literals = tuple(part for part in parts if _LITERAL.fullmatch(part))
    if len(parts) > 1 and literals:
        return Meaning(Kind.WORDS, literals)
    if parts[0].startswith("FILE") or shown == "TRACE":
        return Meaning(Kind.FILE)
    if parts[0] == "DIR":
        return Meaning(Kind.FOLDER)
    return FREE


@cache
def known_words() -> Mapping[tuple[str, str], tuple[str, ...]]:
    """(path or nothing, flag or metavar) -> the words that it accepts."""
    from dynctl.cli.app import COMMANDS
    from dynctl.documents.events import TailKind
    from dynctl.documents.hits import BY
    from dynctl.findings.catalogue import all_codes
    from dynctl.planning.capacity import ENFORCEMENTS
    from dynctl.settings.contexts.keys import KEYS
    from dynctl.simulation.replay.workloads import KINDS
    from router_core import PRESETS, Role

    codes = tuple(entry.code for entry in all_codes().values() if not entry.retired)
    return {
        **{("", key.flag): key.choices for key in KEYS.values() if key.choices},
        ("", "--preset"): tuple(PRESETS),
        ("", "--fail-on"): ("fail", "warn"),
        ("", "--suppress"): codes,
        ("help", "COMMAND"): tuple(dict.fromkeys(path.split()[0] for path, _, _ in COMMANDS)),
        ("", "CODE"): codes,
        ("workers list", "--role"): tuple(one.value for one in Role),
        ("events tail", "--kind"): tuple(TailKind),
        ("hits", "--by"): tuple(BY),
        ("", "--generate"): tuple(KINDS),
        ("replay", "--enforcement"): ("none", "preferred", "required", "fallback"),
        ("topology plan", "--enforcement"): tuple(ENFORCEMENTS),
        ("topology render", "--enforcement"): ("required", "preferred"),
        ("topology render", "--kind"): ("ClusterTopologyBinding", "ClusterTopology"),
    }

"""What a component's workers do: prefill, decode, or both; and from what that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from router_core import Role

RoleSource = Literal["type", "sub-type", "arguments", "name", "nothing"]

DISAGGREGATED: Final = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_MODES: Final = {
    **DISAGGREGATED,
    "agg": Role.AGGREGATED,
    "aggregated": Role.AGGREGATED,
    "prefill_and_decode": Role.AGGREGATED,
    "null": Role.AGGREGATED,
    "none": Role.AGGREGATED,
}


def role_of(
    name: str, kind: str, sub_type: str, words: Sequence[str]
) -> tuple[Role | None, RoleSource]:
    """The role of a worker component, and what told it; ``kind`` and ``sub_type`` in lower case.

    A name is the weakest witness: it is what people call a component, not what it does.
    """
    if kind in DISAGGREGATED:
        return DISAGGREGATED[kind], "type"
    if kind != "worker":
        return None, "nothing"
    if sub_type in DISAGGREGATED:
        return DISAGGREGATED[sub_type], "sub-type"
    said = _from_words(words)
    if said is not None:
        return said, "arguments"
    lower = name.lower()
    if ("prefill" in lower) != ("decode" in lower):
        return (Role.PREFILL if "prefill" in lower else Role.DECODE), "name"
    return None, "nothing"


def option(words: Sequence[str], name: str) -> str | None:
    """The value of ``--name VALUE`` or ``--name=VALUE``; the last one counts."""
    found = None
    for place, word in enumerate(words):
        bare = word.strip("\"'\\;&")
        if bare == name and place + 1 < len(words):
            found = words[place + 1].strip("\"'\\;&")
        elif bare.startswith(name + "="):
            found = bare[len(name) + 1 :].strip("\"'")
    return found


def _from_words(words: Sequence[str]) -> Role | None:
    bare = {word.strip("\"'\\;&") for word in words}
    if "--is-prefill-worker" in bare:
        return Role.PREFILL
    if "--is-decode-worker" in bare:
        return Role.DECODE
    return _MODES.get((option(words, "--disaggregation-mode") or "").lower())

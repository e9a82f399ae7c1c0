"""Lay a context under what was said nearer to the command: flags > environment > context > default.

A source named by flag or environment replaces the context's source with all that belongs to it, so
that nothing of two deployments is mixed (and no token goes to another server); what is no source,
as a timeout or a namespace, still comes from the context. ``--context NAME`` is a flag itself: what
that context says counts more than the environment. ``$DYNCTL_CONTEXT`` only chooses one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.settings.contexts.file import Contexts, read_contexts
from dynctl.settings.contexts.keys import KEYS, Key, Part, Value, near, option_value

VARIABLE: Final = "DYNCTL_CONTEXT"
FLAG: Final = "--context"

_MOST_NAMED: Final = 12
_DEFAULTS: Final[Mapping[str, Any]] = {
    one.name: one.default for one in fields(GlobalOptions) if one.default is not MISSING
}
#: Sources that a context cannot hold.
_OTHER_SOURCES: Final = ("demo", "view")
#: What a flag takes from the context besides its own key: they only mean something together.
_TOGETHER: Final[Mapping[str, tuple[str, ...]]] = {
    "namespace": ("all-namespaces",),
    "all-namespaces": ("namespace",),
    "kubeconfig": ("kube-context",),
    "token-env": ("token-file",),
    "token-file": ("token-env",),
}
_TOKENS: Final = ("token-env", "token-file")
_TOKEN_VARIABLE: Final = "DYNCTL_TOKEN"  # noqa: S105  the name of a variable


@dataclass(frozen=True, slots=True)
class Settled:
    """``options`` with the context in them. By key: ``origins`` says where each value came from,
    ``overruled`` which values of the context do not count, and why."""

    options: GlobalOptions
    context: str | None = None
    chosen_by: str = ""
    path: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    overruled: Mapping[str, str] = field(default_factory=dict)


def in_context(options: GlobalOptions) -> GlobalOptions:
    """``options`` with what the context says; the same again where that was done.

    Raises UsageProblem: a broken file, or a context that is not there.
    """
    return options if options.settled else settled(options).options


def settled(options: GlobalOptions) -> Settled:
    """As :func:`in_context`, with the reasons. Raises UsageProblem."""
    contexts = read_contexts()
    name, chosen_by = chosen(options, contexts)
    values: Mapping[str, Value] = {}
    if name is not None:
        values = _values(name, chosen_by, contexts, options)
    environ: Mapping[str, str] = os.environ
    by_flag = options.context is not None
    replaced = _replaced_by(options, {} if by_flag else environ)
    # A source that was named by flag leaves no room for another one in the environment.
    closed = by_flag and replaced is None and any(KEYS[one].part is Part.SOURCE for one in values)
    taken: dict[str, Any] = {}
    origins: dict[str, str] = {}
    overruled: dict[str, str] = {}
    for key in KEYS.values():
        mine = key.name in values
        silent = (by_flag and mine) or (closed and key.part is Part.SOURCE)
        said = _said(key, options, {} if silent else environ)
        reason = said or _no_longer(key, options, replaced, {} if by_flag else environ)
        if mine and reason is None:
            taken[key.field] = option_value(key, values[key.name])
            origins[key.name] = f"context {name}"
            continue
        origins[key.name] = said or "default"
        if mine and reason is not None:
            overruled[key.name] = reason
    merged = replace(options, **taken, settled=True, environment_sources=not closed)
    return Settled(merged, name, chosen_by, contexts.path, origins, overruled)


def value_of(key: Key, found: Settled) -> Any:
    """What holds for a key, environment included; None where nobody says anything."""
    origin = found.origins[key.name]
    if origin == "default":
        return None
    if origin.startswith("env ") and key.variable is not None:
        return os.environ[key.variable]
    return getattr(found.options, key.field)


def _given(name: str, options: GlobalOptions) -> bool:
    """Whether a field of the options was said on the command line (or by who built them)."""
    return name in options.given or getattr(options, name) != _DEFAULTS[name]


def chosen(options: GlobalOptions, contexts: Contexts) -> tuple[str | None, str]:
    """The context that counts, and who says so; it need not be there."""
    if options.context is not None:
        return options.context, FLAG
    told = os.environ.get(VARIABLE)
    if told:
        return told, f"${VARIABLE}"
    if contexts.current is not None:
        return contexts.current, "current"
    return None, ""


def _values(
    name: str, chosen_by: str, contexts: Contexts, options: GlobalOptions
) -> Mapping[str, Value]:
    if name in contexts.contexts:
        return contexts.contexts[name]
    said = (
        f"{contexts.path}: current = {name!r}" if chosen_by == "current" else f"{chosen_by} {name}"
    )
    raise unknown_context(name, said, contexts, options.kubeconfig)


def unknown_context(
    name: str, said: str, contexts: Contexts, kubeconfig: Path | None = None
) -> UsageProblem:
    """The error for a context that is not there. It looks whether a kubeconfig has one of that
    name: kubectl calls those so."""
    from dynctl.settings.contexts.kubeconfig_names import kube_context_names

    known = sorted(contexts.contexts)
    problem = f"{said}: there is no such context{near(name, known)}"
    if name in kube_context_names(kubeconfig):
        return UsageProblem(
            problem,
            f"{FLAG} names a dynctl context; did you mean --kube-context {name}?\n"
            f"dynctl context add NAME --discovery kubernetes --kube-context {name}",
        )
    if not known:
        return UsageProblem(
            problem, f"{contexts.path} has none; dynctl context add NAME --frontend URL"
        )
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return UsageProblem(problem, f"known: {', '.join(known[:_MOST_NAMED])}{more}")


def _said(key: Key, options: GlobalOptions, environ: Mapping[str, str]) -> str | None:
    """Who says a value of this key before the context does."""
    if _given(key.field, options):
        return f"flag {key.flag}"
    if key.variable and environ.get(key.variable):
        return f"env {key.variable}"
    return None


def _replaced_by(options: GlobalOptions, environ: Mapping[str, str]) -> str | None:
    """The flag or variable that names another source than the context's."""
    sources = [key for key in KEYS.values() if key.part is Part.SOURCE]
    for name in (*_OTHER_SOURCES, *(key.field for key in sources)):
        if _given(name, options):
            return f"flag --{name.replace('_', '-')}"
    for key in sources:
        if key.variable and environ.get(key.variable):
            return f"env {key.variable}"
    return None


def _no_longer(
    key: Key, options: GlobalOptions, replaced: str | None, environ: Mapping[str, str]
) -> str | None:
    """Why a value of the context does not count although nobody else says one for its key."""
    if key.part is not Part.REST and replaced is not None:
        return f"{replaced} names another source"
    if key.name in _TOKENS:
        if _given("token", options):
            return "flag --token"
        if environ.get(_TOKEN_VARIABLE):
            return f"env {_TOKEN_VARIABLE}"
    for flag, others in _TOGETHER.items():
        if key.name in others and _given(KEYS[flag].field, options):
            return f"flag {KEYS[flag].flag}"
    return None

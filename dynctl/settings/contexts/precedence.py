"""Apply a context to the options of a command: flags > environment > context > default.

A source named by flag or environment replaces the context's source and the values that belong to
it, so that two deployments are never mixed (and no token goes to another server). Other values, as
a timeout or a namespace, still come from the context. ``--context NAME`` is a flag: the values of
that context have precedence over the environment. ``$DYNCTL_CONTEXT`` only selects a context.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from dynctl.base.errors import UsageProblem
from dynctl.base.options import PLACES, GlobalOptions
from dynctl.settings.contexts.file import Contexts, read_contexts
from dynctl.settings.contexts.keys import KEYS, Key, Part, Value, did_you_mean, option_value

VARIABLE: Final = "DYNCTL_CONTEXT"
FLAG: Final = "--context"

_MOST_NAMED: Final = 12
_DEFAULTS: Final[Mapping[str, Any]] = {
    option.name: option.default for option in fields(GlobalOptions) if option.default is not MISSING
}
#: Sources that a context cannot hold.
_OTHER_SOURCES: Final = ("demo", "view", "recording")
#: Flag -> keys of the context that the flag disables, because they belong to the flag's own key.
_DISABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "namespace": ("all-namespaces",),
    "all-namespaces": ("namespace",),
    "kubeconfig": ("kube-context",),
    "token-env": ("token-file",),
    "token-file": ("token-env",),
}
_TOKENS: Final = ("token-env", "token-file")
_TOKEN_VARIABLE: Final = "DYNCTL_TOKEN"  # noqa: S105  the name of a variable
_CA_CERT: Final = "ca-cert"
_CA_CERT_VARIABLE: Final = "DYNCTL_CA_CERT"


@dataclass(frozen=True, slots=True)
class AppliedContext:
    """``options`` with the values of the context.

    By key: ``origins`` has the origin of each value, ``overridden`` the reason why a value of the
    context is not used.
    """

    options: GlobalOptions
    context: str | None = None
    chosen_by: str = ""
    path: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    overridden: Mapping[str, str] = field(default_factory=dict)


def in_context(options: GlobalOptions) -> GlobalOptions:
    """``options`` with the values of the context; applying it twice changes nothing.

    Raises UsageProblem: an invalid contexts file, or an unknown context.
    """
    if options.context_applied:
        return options
    applied = apply_context(options)
    if applied.origins[_CA_CERT].startswith("context "):
        # As with --ca-cert: every request of the command trusts the same authorities.
        os.environ[_CA_CERT_VARIABLE] = str(applied.options.ca_cert)
    return applied.options


def apply_context(options: GlobalOptions) -> AppliedContext:
    """As :func:`in_context`, with the reasons. Raises UsageProblem."""
    contexts = read_contexts()
    name, chosen_by = chosen_context(options, contexts)
    values: Mapping[str, Value] = {}
    if name is not None:
        values = _values(name, chosen_by, contexts, options)
    environ: Mapping[str, str] = os.environ
    by_flag = options.context is not None
    replaced = _replaced_by(options, {} if by_flag else environ)
    # With a source named by flag, sources in the environment are ignored.
    closed = by_flag and replaced is None and any(KEYS[name].part is Part.SOURCE for name in values)
    taken: dict[str, Any] = {}
    origins: dict[str, str] = {}
    overridden: dict[str, str] = {}
    for key in KEYS.values():
        in_values = key.name in values
        ignores_environ = (by_flag and in_values) or (closed and key.part is Part.SOURCE)
        origin = _earlier_origin(key, options, {} if ignores_environ else environ)
        reason = origin or _disabled_by(key, options, replaced, {} if by_flag else environ)
        if in_values and reason is None:
            taken[key.field] = option_value(key, values[key.name])
            origins[key.name] = f"context {name}"
            continue
        origins[key.name] = origin or "default"
        if in_values and reason is not None:
            overridden[key.name] = reason
    merged = replace(options, **taken, context_applied=True, environment_sources=not closed)
    return AppliedContext(merged, name, chosen_by, contexts.path, origins, overridden)


def places_without_source(options: GlobalOptions) -> tuple[str, list[str]] | None:
    """(context, its keys that name a place) of a selected context that names no source; None for
    any other. Raises UsageProblem."""
    contexts = read_contexts()
    name, chosen_by = chosen_context(options, contexts)
    if name is None:
        return None
    values = _values(name, chosen_by, contexts, options)
    places = [key for key in values if KEYS[key].field in PLACES]
    if not places or any(KEYS[key].part is Part.SOURCE for key in values):
        return None
    return name, places


def effective_value(key: Key, applied: AppliedContext) -> Any:
    """The value of a key, from the environment too; None if only the default applies."""
    origin = applied.origins[key.name]
    if origin == "default":
        return None
    if origin.startswith("env ") and key.variable is not None:
        return os.environ[key.variable]
    return getattr(applied.options, key.field)


def _is_given(name: str, options: GlobalOptions) -> bool:
    """Whether a field of the options was set, on the command line or by a caller."""
    return name in options.given or getattr(options, name) != _DEFAULTS[name]


def chosen_context(options: GlobalOptions, contexts: Contexts) -> tuple[str | None, str]:
    """The name of the selected context, which may not exist, and what selected it."""
    if options.context is not None:
        return options.context, FLAG
    variable = os.environ.get(VARIABLE)
    if variable:
        return variable, f"${VARIABLE}"
    if contexts.current is not None:
        return contexts.current, "current"
    return None, ""


def _values(
    name: str, chosen_by: str, contexts: Contexts, options: GlobalOptions
) -> Mapping[str, Value]:
    if name in contexts.contexts:
        return contexts.contexts[name]
    selected_by = (
        f"{contexts.path}: current = {name!r}" if chosen_by == "current" else f"{chosen_by} {name}"
    )
    raise unknown_context(name, selected_by, contexts, options.kubeconfig)


def unknown_context(
    name: str, selected_by: str, contexts: Contexts, kubeconfig: Path | None = None
) -> UsageProblem:
    """The error for an unknown context; its hint mentions a kubeconfig context of that name."""
    from dynctl.settings.contexts.kubeconfig_names import kube_context_names

    known = sorted(contexts.contexts)
    problem = f"{selected_by}: unknown context{did_you_mean(name, known)}"
    if name in kube_context_names(kubeconfig):
        return UsageProblem(
            problem,
            f"{FLAG} names a dynctl context; did you mean --kube-context {name}?\n"
            f"dynctl context add NAME --discovery kubernetes --kube-context {name}",
        )
    if not known:
        return UsageProblem(
            problem, f"{contexts.path} has no contexts; dynctl context add NAME --frontend URL"
        )
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return UsageProblem(problem, f"known: {', '.join(known[:_MOST_NAMED])}{more}")


def _earlier_origin(key: Key, options: GlobalOptions, environ: Mapping[str, str]) -> str | None:
    """The flag or variable that has precedence over the context for this key."""
    if _is_given(key.field, options):
        return f"flag {key.flag}"
    if key.variable and environ.get(key.variable):
        return f"env {key.variable}"
    return None


def _replaced_by(options: GlobalOptions, environ: Mapping[str, str]) -> str | None:
    """The flag or variable that names another source than the context."""
    sources = [key for key in KEYS.values() if key.part is Part.SOURCE]
    for name in (*_OTHER_SOURCES, *(key.field for key in sources)):
        if _is_given(name, options):
            return f"flag --{name.replace('_', '-')}"
    for key in sources:
        if key.variable and environ.get(key.variable):
            return f"env {key.variable}"
    return None


def _disabled_by(
    key: Key, options: GlobalOptions, replaced: str | None, environ: Mapping[str, str]
) -> str | None:
    """Why a value of the context is ignored although its key has no other value."""
    if key.part is not Part.REST and replaced is not None:
        return f"{replaced} names another source"
    if key.name in _TOKENS:
        if _is_given("token", options):
            return "flag --token"
        if environ.get(_TOKEN_VARIABLE):
            return f"env {_TOKEN_VARIABLE}"
    for flag, others in _DISABLES.items():
        if key.name in others and _is_given(KEYS[flag].field, options):
            return f"flag {KEYS[flag].flag}"
    return None

"""`dynctl context list`, `use`, `add`, `show` and `remove`."""

from typing import Annotated, Any

import typer

from dynctl.base.options import GlobalOptions

#: Global options that say how to answer; they may stand beside what a context keeps.
_HOW = frozenset({"output", "no_color", "debug"})
#: Global options that no context can keep, and what to do instead.
_NEVER = {
    "token": "a context holds no secrets: name it with --token-env NAME or --token-file FILE",
    "view": "a view is one moment, not a place to look; give it when it is needed",
    "demo": "the demo fleet is always there",
    "wait": "it is about one command",
    "context": "a context names places, not another context",
}


def list_contexts(options: GlobalOptions) -> int:
    """List the contexts; * marks the current one."""
    from dynctl.documents.contexts import ContextList, ContextRow
    from dynctl.screens.render import emit, talk
    from dynctl.settings.contexts.file import read_contexts
    from dynctl.settings.contexts.precedence import VARIABLE, chosen_context

    found = read_contexts()
    name, chosen_by = chosen_context(options, found)
    rows = [ContextRow(one, one == name, dict(found.contexts[one])) for one in found.contexts]
    emit(ContextList(str(found.path), name, sorted(rows, key=lambda row: row.name)), options)
    if name is not None and name not in found.contexts:
        talk(f"warning: {chosen_by} is {name!r}, and there is no such context")
    elif chosen_by == f"${VARIABLE}":
        talk(f"note: {chosen_by} makes {name} the current one")
    return 0


def use_context(
    options: GlobalOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A context.", show_default=False)
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Leave it: no context is current.")] = False,
) -> int:
    """Make a context the current one: commands look there from now on."""
    from dataclasses import replace

    from dynctl.base.errors import UsageProblem
    from dynctl.documents.contexts import ContextChange
    from dynctl.screens.render import emit
    from dynctl.settings.contexts.edit import change
    from dynctl.settings.contexts.file import Contexts
    from dynctl.settings.contexts.precedence import unknown_context

    if (name is None) is not none:
        raise UsageProblem("expected the name of a context, or --none", "dynctl context list")

    def edit(found: Contexts) -> Contexts:
        if name is not None and name not in found.contexts:
            raise unknown_context(name, f"context use {name}", found)
        return replace(found, current=name)

    found = change(edit)
    emit(ContextChange(name, "used" if name else "left", str(found.path), name), options)
    _overruled(name)
    return 0


def add_context(
    options: GlobalOptions,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace the context of that name.")
    ] = False,
) -> int:
    """Keep the global options of this line (--frontend, --discovery, -n, ..) as a context.

    Only what the line says is kept, nothing of the environment, and never a token: that is named
    with --token-env or --token-file.
    """
    from dataclasses import replace

    from dynctl.base.errors import UsageProblem
    from dynctl.documents.contexts import ContextChange
    from dynctl.screens.render import emit
    from dynctl.settings.contexts.edit import change
    from dynctl.settings.contexts.file import Contexts
    from dynctl.settings.contexts.keys import KEYS, checked_name, checked_values, given_value

    checked_name(name)
    for field in sorted(options.given - _HOW):
        if field in _NEVER:
            flag = f"--{field.replace('_', '-')}"
            raise UsageProblem(f"{flag}: cannot be kept in a context", _NEVER[field])
    values = checked_values(
        {
            key.name: given_value(getattr(options, key.field))
            for key in KEYS.values()
            if key.field in options.given
        },
        "--",
    )
    if not values:
        raise UsageProblem(
            f"context add {name}: nothing to keep, expected at least one option",
            f"for example: dynctl context add {name} --frontend http://HOST:8000",
        )
    existed = False

    def edit(found: Contexts) -> Contexts:
        nonlocal existed
        existed = name in found.contexts
        if existed and not force:
            raise UsageProblem(
                f"context add {name}: there is one of that name", "--force replaces it"
            )
        return replace(found, contexts={**found.contexts, name: values})

    found = change(edit)
    done = "replaced" if existed else "added"
    emit(ContextChange(name, done, str(found.path), found.current), options)
    return 0


def show_context(
    options: GlobalOptions,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="[default: the current one]", show_default=False),
    ] = None,
) -> int:
    """Show every option that says where to look: what holds here, and where that came from.

    Flags and environment count, as they would for any command; with NAME it is what
    --context NAME would mean.
    """
    from dataclasses import replace

    from dynctl.documents.contexts import ContextDetail, ContextValue
    from dynctl.screens.render import emit
    from dynctl.settings.contexts.file import config_path, read_contexts
    from dynctl.settings.contexts.keys import KEYS
    from dynctl.settings.contexts.precedence import apply_context, effective_value

    if name is not None:
        options = replace(options, context=name)
    found = apply_context(options)
    kept = read_contexts().contexts.get(found.context or "", {})
    rows = [
        ContextValue(
            name=key.name,
            value=_plain(effective_value(key, found)),
            source=found.origins[key.name],
            default=key.default,
            unused=kept.get(key.name) if key.name in found.overridden else None,
            unused_because=found.overridden.get(key.name),
        )
        for key in KEYS.values()
    ]
    chosen_by = found.chosen_by if name is None else "argument"
    emit(ContextDetail(found.context, chosen_by, str(config_path()), rows), options)
    return 0


def remove_context(
    options: GlobalOptions,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A context.")],
) -> int:
    """Remove a context from the file."""
    from dynctl.documents.contexts import ContextChange
    from dynctl.screens.render import emit
    from dynctl.settings.contexts.edit import change
    from dynctl.settings.contexts.file import Contexts
    from dynctl.settings.contexts.precedence import unknown_context

    def edit(found: Contexts) -> Contexts:
        if name not in found.contexts:
            raise unknown_context(name, f"context remove {name}", found)
        rest = {one: values for one, values in found.contexts.items() if one != name}
        return Contexts(found.path, None if found.current == name else found.current, rest)

    found = change(edit)
    emit(ContextChange(name, "removed", str(found.path), found.current), options)
    return 0


def _overruled(name: str | None) -> None:
    """Say so where the environment chooses another context than the one just made current."""
    import os

    from dynctl.screens.render import talk
    from dynctl.settings.contexts.precedence import VARIABLE

    told = os.environ.get(VARIABLE)
    if told and told != name:
        talk(f"note: ${VARIABLE}={told} counts more here")


def _plain(value: Any) -> Any:
    from pathlib import Path

    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value

"""`dynctl context list`, `use`, `add`, `show` and `remove`."""

from typing import Annotated, Any

import typer

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.cli.completion import names_of

#: Global options about the output; allowed beside the options that a context keeps.
_HOW = frozenset({"output", "no_color", "debug"})
#: Global options that a context cannot keep, with the reason.
_NEVER = {
    "token": "a context contains no secrets; use --token-env NAME or --token-file FILE",
    "view": "a view is a saved moment; specify it with each command",
    "recording": "a recording is in the past; specify it with each command",
    "at": "a moment is for single commands",
    "demo": "the demo fleet is always available",
    "wait": "it is for single commands",
    "context": "a context cannot refer to another context",
}


def list_contexts(options: GlobalOptions) -> int:
    """List the contexts; * marks the current one."""
    from dynctl.documents.contexts import ContextList, ContextRow
    from dynctl.screens.render import emit, talk
    from dynctl.settings.contexts.file import read_contexts
    from dynctl.settings.contexts.precedence import VARIABLE, chosen_context

    contexts = read_contexts()
    name, chosen_by = chosen_context(options, contexts)
    rows = [
        ContextRow(saved, saved == name, dict(contexts.contexts[saved]))
        for saved in contexts.contexts
    ]
    emit(ContextList(str(contexts.path), name, sorted(rows, key=lambda row: row.name)), options)
    if name is not None and name not in contexts.contexts:
        talk(f"warning: {chosen_by} is {name!r}, but this context does not exist")
    elif chosen_by == f"${VARIABLE}":
        talk(f"note: {name} is current because of {chosen_by}")
    return 0


def use_context(
    options: GlobalOptions,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=names_of("context"),
            help="A context.",
            show_default=False,
        ),
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Make no context current.")] = False,
) -> int:
    """Make a context current: commands use its options."""
    from dataclasses import replace

    from dynctl.base.errors import UsageProblem
    from dynctl.documents.contexts import ContextChange
    from dynctl.screens.render import emit
    from dynctl.settings.contexts.edit import change
    from dynctl.settings.contexts.file import Contexts
    from dynctl.settings.contexts.precedence import unknown_context

    if (name is None) is not none:
        raise UsageProblem("expected the name of a context, or --none", "dynctl context list")

    def edit(contexts: Contexts) -> Contexts:
        if name is not None and name not in contexts.contexts:
            raise unknown_context(name, f"context use {name}", contexts)
        return replace(contexts, current=name)

    contexts = change(edit)
    emit(ContextChange(name, "used" if name else "left", str(contexts.path), name), options)
    _note_overruling_variable(name)
    return 0


def add_context(
    options: GlobalOptions,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing context.")] = False,
) -> int:
    """Save the global options of this command (--frontend, --discovery, -n, ..) as a context.

    Saves options of the command line only, not of the environment. Tokens are not saved: use
    --token-env or --token-file.
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
            f"context add {name}: no option to save, expected at least one",
            f"for example: dynctl context add {name} --frontend http://HOST:8000",
        )
    existed = False

    def edit(contexts: Contexts) -> Contexts:
        nonlocal existed
        existed = name in contexts.contexts
        if existed and not force:
            raise UsageProblem(
                f"context add {name}: the context exists already", "replace it: --force"
            )
        return replace(contexts, contexts={**contexts.contexts, name: values})

    contexts = change(edit)
    done = "replaced" if existed else "added"
    emit(ContextChange(name, done, str(contexts.path), contexts.current), options)
    return 0


def show_context(
    options: GlobalOptions,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=names_of("context"),
            help="A context. [default: current]",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Show the source options in effect, and where each comes from.

    Flags and environment count as for any command. NAME acts as --context NAME.
    """
    from dataclasses import replace

    from dynctl.documents.contexts import ContextDetail, ContextValue
    from dynctl.screens.render import emit, talk
    from dynctl.settings.contexts.file import config_path, read_contexts
    from dynctl.settings.contexts.keys import KEYS
    from dynctl.settings.contexts.precedence import apply_context, effective_value

    if name is not None:
        options = replace(options, context=name)
    applied = apply_context(options)
    kept = read_contexts().contexts.get(applied.context or "", {})
    rows = [
        ContextValue(
            name=key.name,
            value=_plain(effective_value(key, applied)),
            source=applied.origins[key.name],
            default=key.default,
            unused=kept.get(key.name) if key.name in applied.overridden else None,
            unused_because=applied.overridden.get(key.name),
        )
        for key in KEYS.values()
    ]
    chosen_by = applied.chosen_by if name is None else "argument"
    emit(ContextDetail(applied.context, chosen_by, str(config_path()), rows), options)
    if options.output is OutputFormat.NAME and applied.context is None:
        talk("note: no context is current")
    return 0


def remove_context(
    options: GlobalOptions,
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=names_of("context"), help="A context.")
    ],
) -> int:
    """Remove a context from the file."""
    from dynctl.documents.contexts import ContextChange
    from dynctl.screens.render import emit
    from dynctl.settings.contexts.edit import change
    from dynctl.settings.contexts.file import Contexts
    from dynctl.settings.contexts.precedence import unknown_context

    was_current = False

    def edit(contexts: Contexts) -> Contexts:
        nonlocal was_current
        if name not in contexts.contexts:
            raise unknown_context(name, f"context remove {name}", contexts)
        was_current = contexts.current == name
        rest = {other: values for other, values in contexts.contexts.items() if other != name}
        return Contexts(contexts.path, None if contexts.current == name else contexts.current, rest)

    contexts = change(edit)
    removed = ContextChange(name, "removed", str(contexts.path), contexts.current, was_current)
    emit(removed, options)
    return 0


def _note_overruling_variable(name: str | None) -> None:
    """Note an environment variable that overrides the context just made current."""
    import os

    from dynctl.screens.render import talk
    from dynctl.settings.contexts.precedence import VARIABLE

    other = os.environ.get(VARIABLE)
    if other and other != name:
        talk(f"note: ${VARIABLE}={other} overrides it in this shell")


def _plain(value: Any) -> Any:
    from pathlib import Path

    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value

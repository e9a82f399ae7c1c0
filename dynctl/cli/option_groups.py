"""Groups of options: a command receives many options as one parameter."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_type_hints

from dynctl.cli.shared_options import in_panel


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options of the command line that belong together.

    ``options``: parameter -> its annotation for Typer and its default.
    ``collect``: what the command receives, from the value of each of these parameters.
    """

    options: Mapping[str, tuple[Any, Any]]
    collect: Callable[[dict[str, Any]], Any]


def fields_of(
    kind: type,
    without: Collection[str] = (),
    only: Collection[str] | None = None,
    panel: str | None = None,
) -> OptionGroup:
    """The fields of a dataclass as options; those in ``without``, or not in ``only``, keep their
    defaults. ``panel``: of the help page, for those that name none."""
    hints = in_panel(panel, get_type_hints(kind, include_extras=True))
    return OptionGroup(
        {
            field.name: (hints[field.name], _default(field))
            for field in fields(kind)
            if field.name not in without and (only is None or field.name in only)
        },
        lambda values: kind(**values),
    )


def only_given(
    annotations: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> OptionGroup:
    """Options that are None unless given; the command receives a mapping of the given ones.

    ``names``: parameter -> key in that mapping, where they differ.
    """
    keys = names or {}
    return OptionGroup(
        {parameter: (annotation, None) for parameter, annotation in annotations.items()},
        lambda values: {
            keys.get(parameter, parameter): value
            for parameter, value in values.items()
            if value is not None
        },
    )


def with_options(
    **groups: OptionGroup,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the options of each group where the command has the parameter of this name.

    Another command may call it without some of them, which have their defaults then.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters: list[inspect.Parameter] = []
        for name, own in inspect.signature(function, eval_str=True).parameters.items():
            if name not in groups:
                parameters.append(own.replace(kind=keyword))
                continue
            parameters += [
                inspect.Parameter(option, keyword, default=default, annotation=annotation)
                for option, (annotation, default) in groups[name].options.items()
            ]

        @functools.wraps(function)
        def command(*positional: Any, **arguments: Any) -> Any:
            for name, group in groups.items():
                values = {
                    option: arguments.pop(option, default)
                    for option, (_, default) in group.options.items()
                }
                arguments[name] = group.collect(values)
            return function(*positional, **arguments)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default

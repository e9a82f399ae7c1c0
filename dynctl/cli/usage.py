"""Errors of a command line that is not understood, in the words of all other errors.

The parser's own texts differ with its version and name neither the value nor what was expected.
"""

import os
import re
from collections.abc import Sequence
from typing import Any, Final

from dynctl.base.errors import single_line
from dynctl.cli.help import chosen
from dynctl.cli.table import MOVED, formats_of

#: The parser's texts for refused values -> what was expected.
_EXPECTED: Final = (
    (r"Input should be a valid number.*", "expected a number"),
    (r"Input should be a valid integer.*", "expected a whole number"),
    (r"Input should be greater than or equal to ([\d.]+)", r"expected at least \1"),
    (r"Input should be less than or equal to ([\d.]+)", r"expected at most \1"),
    (r"'.*' is not a valid float\.?", "expected a number"),
    (r"'.*' is not a valid integer\.?", "expected a whole number"),
    (r"'.*' is not one of (.*?)\.?", r"expected one of \1"),
)
_MORE: Final = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", re.S)
_NO_COMMAND: Final = re.compile(r"No such command '(.*?)'\.(?: Did you mean (.*?)\?)?", re.S)
_VALUE_OF: Final = re.compile(
    r"Invalid value for '([^']*)'(?: / '[^']*')*(?: \(env var: '([^']*)'\))?: (.*)", re.S
)
#: Commands of a group that an error lists.
_LISTED: Final = 8


def usage_problem(error: Any, arguments: Sequence[str], root: Any) -> tuple[str, str]:
    """The message and the hint for an exception of the parser about ``arguments``.

    ``root``: the whole program as a command.
    """
    context = getattr(error, "ctx", None)
    path, command = chosen(arguments, root)
    if context is not None:
        path, command = context.command_path, context.command
    page = f"try: {path} --help"
    kind = type(error).__name__
    text = error.format_message() if hasattr(error, "format_message") else "aborted"
    text = text.replace("Value error, ", "")
    if kind == "MissingParameter":
        missing = _spelling_of(error.param)
        return f"{path}: expected {missing}, got none", f"{_usage(context)}\n{page}"
    if kind == "NoSuchOption":
        near = _closest(error.option_name, error.possibilities or ())
        return f"{error.option_name}: {path} has no such option{_or(near)}", page
    if kind == "BadOptionUsage":
        return _value_or_none(command, error.option_name, arguments), page
    if text == "Missing command.":
        return f"{path}: expected a command, got none", page
    if (extra := _MORE.fullmatch(text)) is not None:
        return (
            f"{path}: {_quote(extra[1])}: {_expected_arguments(context)}",
            f"{_usage(context)}\n{page}",
        )
    if (unknown := _NO_COMMAND.fullmatch(text)) is not None:
        if path == "dynctl" and unknown[1] in MOVED:
            return f"'{unknown[1]}': dynctl has this command no longer", MOVED[unknown[1]]
        near = re.findall(r"'(.*?)'", unknown[2] or "")
        known = command.list_commands(context)
        some = f"; expected one of {', '.join(known)}" if len(known) <= _LISTED else ""
        return f"{_quote(unknown[1])}: {path} has no such command{_or(near) or some}", page
    parameter = getattr(error, "param", None)
    if getattr(parameter, "opts", None) == ["--output", "-o"]:
        named = chosen(arguments, root)[0].removeprefix("dynctl").strip()
        text = _with_formats(text, named)
    return _value(parameter, text, arguments), page


def _with_formats(text: str, command: str) -> str:
    """The parser's text about a format, with the formats that the command has."""
    return re.sub(r"is not one of .*", f"is not one of {', '.join(formats_of(command))}", text)


def _spelling_of(parameter: Any) -> str:
    """How a parameter is named on a command line: ``ID``, or ``--endpoint NAME``."""
    metavar = parameter.metavar or ""
    if parameter.param_type_name == "argument":
        return metavar or parameter.name.upper()
    option = max(parameter.opts, key=len)
    return f"{option} {metavar}".strip()


def _usage(context: Any) -> str:
    words = context.command.collect_usage_pieces(context)
    return " ".join(("usage:", context.command_path, *words))


def _closest(typed: str, names: Sequence[str]) -> list[str]:
    """The parser's proposals, the most similar first, without those that are much less similar."""
    from difflib import SequenceMatcher

    like = {name: SequenceMatcher(None, typed, name).ratio() for name in names}
    best = max(like.values(), default=0.0)
    near = [name for name in names if like[name] > best - 0.15]
    return sorted(near, key=lambda name: (-like[name], name))


def _or(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _quote(text: str) -> str:
    return f"'{single_line(text, 80)}'"


def _expected_arguments(context: Any) -> str:
    """What arguments a command has."""
    parameters = context.command.params
    names = [
        _spelling_of(parameter)
        for parameter in parameters
        if parameter.param_type_name == "argument"
    ]
    if not names:
        return "expected no arguments"
    return f"expected {' and '.join(names)} only; put an argument with spaces in quotes"


def _value_or_none(command: Any, option: str, arguments: Sequence[str]) -> str:
    """An option without the value that it needs, or with one that it does not have."""
    parameters = [parameter for parameter in command.params if option in parameter.opts]
    if any(parameter.is_flag for parameter in parameters):
        typed = next(
            (argument for argument in arguments if argument.startswith(f"{option}=")), option
        )
        return f"{single_line(typed, 80)}: expected {option} without a value"
    metavar = next((named.metavar for named in parameters if named.metavar), "a value")
    return f"{option}: expected {metavar} after it, got nothing"


def _value(parameter: Any, text: str, arguments: Sequence[str]) -> str:
    """A refused value: ``--timeout 'soon': expected a number``."""
    named = _VALUE_OF.fullmatch(text)
    problem = text if named is None else named[3]
    for pattern, expected in _EXPECTED:
        matched = re.fullmatch(pattern, problem)
        if matched is not None:
            problem = matched.expand(expected).replace("'", "")
            break
    given = _typed_values(parameter, arguments)
    if not given and named is not None:
        variable = named[2] or ""
        if variable not in os.environ:
            return f"{named[1]}: {problem}"
        given = [(variable, os.environ[variable])]
    if len(set(given)) == 1:
        return f"{given[0][0]} {_quote(given[0][1])}: {problem}"
    return f"{given[0][0]}: {problem}" if given else problem


def _typed_values(parameter: Any, arguments: Sequence[str]) -> list[tuple[str, str]]:
    """How an option was spelled, and its value, each time that it was given."""
    spellings = []
    for place, argument in enumerate(arguments):
        name, separator, value = argument.partition("=")
        if parameter is not None and name.startswith("-") and name in parameter.opts:
            spellings.append(
                (name, value if separator else "".join(arguments[place + 1 : place + 2]))
            )
    return spellings

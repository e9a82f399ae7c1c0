"""Fast conversion of simple option values.

Typer 0.29 builds a pydantic converter for every option, given or not, which doubles the start-up
time. Missing values, texts, numbers, paths and choices are converted here; everything else,
including errors, is left to Typer. With other versions of Typer nothing here applies.
"""

import re
from enum import Enum
from pathlib import Path
from typing import Any, Final

_NOT_QUICK: Final = object()
_NUMBERS: Final = {int: re.compile(r"-?\d{1,15}"), float: re.compile(r"-?\d{1,15}(\.\d{1,15})?")}


class QuickValues:
    """A command or group whose options are converted fast where possible."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, the help option among them."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if hasattr(parameter, "type_descriptor") and "process_value" not in vars(parameter):
                _quicken(parameter)
        return found


def _quicken(parameter: Any) -> None:
    slowly = parameter.process_value

    def process_value(context: Any, value: Any) -> Any:
        found = _quickly(parameter, value)
        if found is _NOT_QUICK:
            return slowly(context, value)
        if parameter.callback is not None:
            return parameter.callback(context, parameter, found)
        return found

    parameter.process_value = process_value


def _quickly(parameter: Any, value: Any) -> Any:
    several = parameter.multiple or parameter.nargs != 1
    if value is None or value == ():
        # Typer reports missing values.
        nothing = () if several else None
        return _NOT_QUICK if parameter.required else nothing
    kind = parameter.type_descriptor.annotation
    if several:
        texts = kind == list[str] and all(type(one) is str for one in value)
        return tuple(value) if texts else _NOT_QUICK
    if kind in _NUMBERS and type(value) is kind:
        return value  # a default, which is in its range
    if type(value) is not str or not isinstance(kind, type):
        return _NOT_QUICK
    about = parameter.type_descriptor.parameter_info
    if about.parser is not None:
        try:
            return about.parser(value)
        except Exception:  # Typer calls it again, and reports what it raises
            return _NOT_QUICK
    if kind is str:
        return value
    if issubclass(kind, Enum):
        return next((one for one in kind if one.value == value), _NOT_QUICK)
    if kind in _NUMBERS:
        return _number(parameter, kind, value)
    if kind is Path and not (about.exists or about.resolve_path or about.path_type):
        return Path(value)
    return _NOT_QUICK


def _number(parameter: Any, kind: Any, text: str) -> Any:
    if not _NUMBERS[kind].fullmatch(text):
        return _NOT_QUICK
    number = kind(text)
    low, high = parameter.min, parameter.max
    within = (low is None or low <= number) and (high is None or number <= high)
    return number if within else _NOT_QUICK

"""Read JSON that people or other programs wrote: bounded depth, and one error.

The counterpart of :mod:`dynctl.base.yaml_reader`. Values of foreign systems are read with it, so
that a malformed, a nested or a mistyped answer is a WireError everywhere.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar, overload

import msgspec

from dynctl.base.decode_errors import WireError

T = TypeVar("T")

#: No document is nested this deeply; code that walks one may recurse.
MOST_DEPTH: Final = 200


@overload
def read_json(data: bytes | str, where: str) -> Any: ...


@overload
def read_json(data: bytes | str, where: str, form: type[T]) -> T: ...


def read_json(data: bytes | str, where: str, form: Any = Any) -> Any:
    """The value of a text, as a ``form``. Raises WireError; ``where`` starts its message."""
    try:
        found = msgspec.json.decode(data, type=form)
    except msgspec.ValidationError as error:
        raise WireError(where, str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise WireError(where, f"not JSON: {error}") from None
    except RecursionError:
        raise too_deep(where) from None
    if form is Any:
        check_depth(found, where)
    return found


def check_depth(value: Any, where: str) -> None:
    """Raise WireError for a value of dicts and lists that is nested too deeply."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise too_deep(where)
        level = [inner for one in level for inner in _inner(one)]


def too_deep(where: str) -> WireError:
    return WireError(where, f"nested too deeply; expected at most {MOST_DEPTH} levels")


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return []
    return [one for one in value if isinstance(one, (dict, list))]

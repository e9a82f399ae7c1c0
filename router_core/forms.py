"""Forms of plain data: the types and ranges that a reader of a snapshot accepts.

A form stands beside the code that writes the data, and names the first leaf that does not fit by
its path: ``registry.workers[3].block_size: 1e-320, an integer from 1 to 1048576 expected``. Nothing
is converted: ``true`` is not an integer and 3.0 is not one either. Fields that a form does not name
are ignored, as a later version may write them.

A list of a million numbers is compared as a column, in C; only a list that does not fit is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from router_core.errors import SnapshotError

#: The largest count that a number of JSON keeps exactly; a thousand of them stay below 2^64.
COUNT_MAX: Final = 2**53
U64_MAX: Final = 2**64 - 1
#: Slots of a registry that a snapshot may declare: more is not a fleet.
MAX_SLOTS: Final = 1 << 20
#: Seconds of any clock: 30 million years, and far below the numbers whose sums are not finite.
TIME_MAX: Final = 1e15
#: Bits of the integers, and characters of the other values, that a message repeats.
_SHOWN_BITS: Final = 80
_SHOWN: Final = 40


def brief(value: object) -> str:
    """A value as a message repeats it: at most 42 characters, and never the content of a list."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        bits = value.bit_length()
        return str(value) if bits <= _SHOWN_BITS else f"an integer of {bits:,} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:_SHOWN])
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value):,}"
    return "a mapping" if isinstance(value, Mapping) else type(value).__name__


class Form:
    """What one value of plain data has to be. ``expected`` names it in messages."""

    expected = "a value"

    def holds(self, value: object) -> bool:
        """Whether a value fits, as far as one look at it decides."""
        raise NotImplementedError

    def holds_all(self, values: Sequence[Any]) -> bool:
        """Whether each value of a column fits, with all that it contains."""
        return False

    def check(self, value: Any, at: str) -> None:
        """Raise SnapshotError for a value that does not fit. ``at``: its path."""
        if not self.holds(value):
            refuse(at, value, self.expected)


def refuse(at: str, value: object, expected: str) -> NoReturn:
    """Raise the error of a leaf that does not fit."""
    raise SnapshotError(f"{at}: {brief(value)}, {expected} expected")


class Whole(Form):
    """An integer from ``low`` to ``high``."""

    def __init__(self, low: int, high: int, expected: str = "") -> None:
        self.low, self.high = low, high
        self.expected = expected or f"an integer from {low} to {high}"

    def holds(self, value: object) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def holds_all(self, values: Sequence[Any]) -> bool:
        if not {*map(type, values)} <= {int}:
            return False
        return not values or (self.low <= min(values) and max(values) <= self.high)


class Real(Form):
    """A finite number from ``low`` to ``high``, with or without a fraction."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.expected = f"a number from {low:g} to {high:g}"

    def holds(self, value: object) -> bool:
        return type(value) in (int, float) and self.low <= value <= self.high  # type: ignore[operator]

    def holds_all(self, values: Sequence[Any]) -> bool:
        if not {*map(type, values)} <= {int, float}:
            return False
        # NaN is not equal to itself, and neither the lowest nor the highest for certain.
        return not values or all(self.low <= value <= self.high for value in values)


class Text(Form):
    """A string that can be written as UTF-8, of at most ``most`` characters."""

    def __init__(self, most: int = 1 << 24, least: int = 0) -> None:
        self.least, self.most = least, most
        self.expected = f"a text of {least} to {most} characters"

    def holds(self, value: object) -> bool:
        if type(value) is not str or not self.least <= len(value) <= self.most:
            return False
        if value.isascii():
            return True
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True


class OneOf(Form):
    """One of some texts."""

    def __init__(self, choices: Iterable[str]) -> None:
        self.choices = frozenset(choices)
        self.expected = "one of " + ", ".join(sorted(self.choices))

    def holds(self, value: object) -> bool:
        return type(value) is str and value in self.choices


class Anything(Form):
    """Any value: another reader judges it."""

    def holds(self, value: object) -> bool:
        return True


class Flag(Form):
    """true or false."""

    expected = "true or false"

    def holds(self, value: object) -> bool:
        return type(value) is bool


class Maybe(Form):
    """A value of another form, or null."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.expected = f"{form.expected}, or null"

    def check(self, value: Any, at: str) -> None:
        if value is not None:
            if isinstance(self.form, (Each, Row, Fields, Table)):
                self.form.check(value, at)
            elif not self.form.holds(value):
                refuse(at, value, self.expected)

    def holds_all(self, values: Sequence[Any]) -> bool:
        return self.form.holds_all([value for value in values if value is not None])


class Either(Form):
    """A value of the first form that has its type."""

    def __init__(self, choose: Callable[[object], Form]) -> None:
        self.choose = choose

    def check(self, value: Any, at: str) -> None:
        self.choose(value).check(value, at)


class Each(Form):
    """A list of at most ``most`` values of one form."""

    def __init__(self, form: Form, most: int = 1 << 32) -> None:
        self.form, self.most = form, most
        self.expected = "a list"

    def check(self, value: Any, at: str) -> None:
        if not isinstance(value, (list, tuple)):
            refuse(at, value, self.expected)
        if len(value) > self.most:
            refuse(at, value, f"a list of at most {self.most:,}")
        if not self.form.holds_all(value):
            for place, item in enumerate(value):
                self.form.check(item, f"{at}[{place}]")


class Row(Form):
    """A list with a value of each form, in their order."""

    def __init__(self, *forms: Form) -> None:
        self.forms = forms
        self.expected = f"a list of {len(forms)}"

    def check(self, value: Any, at: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) != len(self.forms):
            refuse(at, value, self.expected)
        for place, (form, item) in enumerate(zip(self.forms, value, strict=True)):
            form.check(item, f"{at}[{place}]")

    def holds_all(self, values: Sequence[Any]) -> bool:
        if not {*map(type, values)} <= {list, tuple} or not {*map(len, values)} <= {
            len(self.forms)
        }:
            return False
        columns = zip(self.forms, zip(*values, strict=True), strict=False)
        return all(form.holds_all(column) for form, column in columns)


class Table(Form):
    """A mapping from names to values of one form.

    ``number``: the highest one, where each name is a number in decimal digits, written once.
    """

    expected = "a mapping"

    def __init__(self, form: Form, number: int | None = None) -> None:
        self.form, self.number = form, number

    def check(self, value: Any, at: str) -> None:
        if not isinstance(value, Mapping):
            refuse(at, value, self.expected)
        for name, item in value.items():
            if not _NAME.holds(name):
                refuse(f"a name in {at}", name, _NAME.expected)
            if self.number is not None and not _is_number(name, self.number):
                expected = f"a number from 0 to {self.number} in decimal digits"
                refuse(f"a name in {at}", name, expected)
            self.form.check(item, f"{at}.{name[:_SHOWN]}")


class Fields(Form):
    """A mapping with a value of its own form for each name. ``more``: those that may be absent."""

    expected = "a mapping"

    def __init__(self, forms: Mapping[str, Form], more: Mapping[str, Form] | None = None) -> None:
        self.forms, self.more = forms, more or {}

    def check(self, value: Any, at: str) -> None:
        if not isinstance(value, Mapping):
            refuse(at, value, self.expected)
        for name, form in self.forms.items():
            if name not in value:
                raise SnapshotError(f"{_below(at, name)}: missing, {form.expected} expected")
            form.check(value[name], _below(at, name))
        for name, form in self.more.items():
            if name in value:
                form.check(value[name], _below(at, name))


def check_once(keys: Iterable[Hashable], at: str, what: str) -> None:
    """Raise SnapshotError for a key that occurs twice. ``at``: the path of the list."""
    seen: set[Hashable] = set()
    for place, key in enumerate(keys):
        if key in seen:
            raise SnapshotError(f"{at}[{place}]: {what} occurs twice")
        seen.add(key)


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _is_number(name: str, most: int) -> bool:
    digits = name.isascii() and name.isdigit() and len(name) <= 20
    return digits and str(int(name)) == name and int(name) <= most


_NAME: Final = Text()

#: A count of tokens, blocks, requests.
COUNT: Final = Whole(0, COUNT_MAX)
#: A hash, or an id.
U64: Final = Whole(0, U64_MAX, "an integer from 0 to 2^64-1")
#: The engine's name of a block; most engines have u64, no engine has more than 256 bits.
BLOCK_NAME: Final = Whole(-(2**256), 2**256, "an integer from -2^256 to 2^256")
#: The place of a rank in a router: a fleet has fewer than a million.
SLOT: Final = Whole(0, MAX_SLOTS - 1)
#: Seconds of the clock of all changes, and a duration.
TIME: Final = Real(-TIME_MAX, TIME_MAX)
SECONDS: Final = Real(0, TIME_MAX)
NUMBER: Final = Real(-1e308, 1e308)
FLAG: Final = Flag()
TEXT: Final = Text()
#: A part that its own reader checks.
ANYTHING: Final = Anything()

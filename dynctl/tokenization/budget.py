"""Limits of the work of one render: the counters of the template sandbox.

The sandbox of jinja2 stops a template from reaching Python's internals. It does not stop a template
that loops a billion times or doubles a string forty times. These counters do: operations are
counted (the same template and messages always stop at the same place), characters are counted
before a render creates them, and a deadline stops slow work.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jinja2.exceptions import SecurityError


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one chat template.

    ``template_chars``: length of the source. ``output_chars``: length of the rendered prompt.
    ``operations``: loop rounds, calls, filters, comparisons and outputs, plus one per sixteen
    nodes of each list or mapping that the template builds or prints. ``created_chars``: total
    length of the strings that one render creates. ``string_chars``: length of one string.
    ``nodes``: nodes inside one list or mapping. ``width``: a number that widens text (padding,
    indentation, repetition of digits). ``seconds``: wall time.
    """

    template_chars: int = 256 * 1024
    output_chars: int = 8 * 1024 * 1024
    operations: int = 300_000
    created_chars: int = 64 * 1024 * 1024
    string_chars: int = 8 * 1024 * 1024
    nodes: int = 500_000
    width: int = 10_000
    seconds: float = 2.0


class WorkLimitError(SecurityError):
    """A template exceeded one of its limits."""


@dataclass(slots=True)
class Budget:
    """The work of one render, checked against its limits. For one render only."""

    limits: RenderLimits
    clock: Callable[[], float]
    operations: int = 0
    created: int = 0
    deadline: float = field(init=False)
    _operations: int = field(init=False)
    _created: int = field(init=False)
    _short: int = field(init=False)

    def __post_init__(self) -> None:
        self._operations = self.limits.operations
        self._created = self.limits.created_chars
        self._short = min(4096, self.limits.string_chars)
        self.deadline = self.clock() + self.limits.seconds

    def spend(self, operations: int = 1, chars: int = 0) -> None:
        """Count work before it is done. Raises :class:`WorkLimitError`."""
        self.operations += operations
        if self.operations > self.limits.operations:
            raise WorkLimitError(f"more than {self.limits.operations} operations")
        if chars:
            self.created += chars
            if self.created > self.limits.created_chars:
                raise WorkLimitError(f"more than {self.limits.created_chars} characters created")
        # Not at every step: reading the clock costs as much as the rest of this method.
        if (self.operations & 15 < operations or chars > 4096) and self.clock() > self.deadline:
            raise WorkLimitError(f"more than {self.limits.seconds} s")

    def string(self, chars: int) -> None:
        """Count one operation before it creates a string of this length."""
        if chars > self._short:
            if chars > self.limits.string_chars:
                raise WorkLimitError(f"a string longer than {self.limits.string_chars} characters")
            self.spend(1, chars)
            return
        # As `spend`, for the short strings that most operations create.
        self.operations += 1
        self.created += chars
        if (
            not self.operations & 15
            or self.operations > self._operations
            or self.created > self._created
        ):
            self.operations -= 1
            self.created -= chars
            self.spend(1, chars)

    def width(self, value: object) -> None:
        """Check a number that widens its result; only a large ``int`` is refused."""
        if isinstance(value, int) and abs(value) > self.limits.width:
            raise WorkLimitError(f"a width or count above {self.limits.width}")

    def weigh(self, value: object) -> int:
        """The number of characters and nodes inside ``value``; shared parts count at each place.

        Forty lists that each contain the previous one twice are forty objects in memory and 2**40
        when printed or compared, so containers are counted when built and before they are printed.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict | set | frozenset):
            return 1
        nodes = 0
        chars = 0
        stack: list[object] = [value]
        while stack:
            item = stack.pop()
            nodes += 1
            if isinstance(item, str):
                chars += len(item)
                continue
            if isinstance(item, dict):
                if len(item) > self.limits.nodes:
                    nodes += len(item)
                else:
                    stack.extend(item.keys())
                    stack.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                if len(item) > self.limits.nodes:
                    nodes += len(item)
                else:
                    stack.extend(item)
            if nodes + len(stack) > self.limits.nodes:
                raise WorkLimitError(f"a list or mapping of more than {self.limits.nodes} nodes")
        self.spend(1 + nodes // 16)
        return chars + nodes


class BudgetHolder(threading.local):
    """The budget of this thread's current render; threads share templates."""

    current: Budget | None = None

    def get(self) -> Budget:
        if self.current is None:
            raise WorkLimitError("template code outside a render")
        return self.current

    @contextmanager
    def use(self, budget: Budget) -> Iterator[Budget]:
        previous, self.current = self.current, budget
        try:
            yield budget
        finally:
            self.current = previous

"""FaultState: the current faults of a running engine."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from dynctl.simulation.engine.config import EngineConfigError, Faults


class FaultState:
    """The current `Faults`, shared by the HTTP handlers, the schedulers and the publishers."""

    def __init__(self, faults: Faults) -> None:
        self.current = faults

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change faults by name. Raises EngineConfigError with the unknown or invalid one.

        `refuse: true` means status 503, `refuse: false` off.
        """
        known = {f.name: type(f.default) for f in fields(Faults)}
        checked: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in known:
                raise EngineConfigError(
                    f"unknown fault {name!r}; expected one of {', '.join(sorted(known))}, "
                    "restart_silently"
                )
            if name == "refuse" and isinstance(value, bool):
                value = 503 if value else 0
            checked[name] = _check_type(name, value, known[name])
        self.current = replace(self.current, **checked)

    def as_dict(self) -> dict[str, Any]:
        """Name -> value, the body of GET /engine/faults."""
        return asdict(self.current)

    def take_dropped_batch(self) -> bool:
        """Whether `drop_events` applies to the next batch; counts it down."""
        left = self.current.drop_events
        if left:
            self.current = replace(self.current, drop_events=left - 1)
        return bool(left)


def _check_type(name: str, value: object, kind: type) -> object:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    expected = {bool: "true or false", int: "an integer", float: "a number"}[kind]
    raise EngineConfigError(f"fault {name!r} is {value!r}; expected {expected}")

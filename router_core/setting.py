"""What is known of one router setting: its bounds, spellings and help, and how it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from router_core.errors import ConfigError

#: Modes that other routers know and this one does not have yet: named, so that asking for one is
#: answered with "not built yet" and not with "unknown".
PLANNED_MODES = ("power-of-two", "device-aware-weighted", "direct")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one field of :class:`RouterConfig` beside its value.

    ``flags`` and ``env`` list the current name first; the rest are deprecated spellings that still
    work and warn. ``needs`` names the feature that the setting belongs to where that is not built
    yet (for ``unbuilt_values`` only, where there are some): such a setting is read, validated and
    answered with a warning. ``without`` says what happens instead.
    """

    name: str
    type: type
    default: Any
    help: str
    flags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    needs: str = ""
    unbuilt_values: tuple[Any, ...] = ()
    without: str = "ignored"

    @property
    def built(self) -> bool:
        """Whether the setting has an effect at all."""
        return not self.needs or bool(self.unbuilt_values)

    def is_built(self, value: Any) -> bool:
        """Whether setting it to ``value`` has the effect that it should have."""
        if self.unbuilt_values:
            return value not in self.unbuilt_values
        return not self.needs

    def parse(self, text: str) -> Any:
        """The value that a flag or an environment variable spells.

        ``none``, ``null`` and the empty string unset an optional setting. Raises ConfigError.
        """
        raw = text.strip()
        if self.optional and raw.lower() in ("", "none", "null"):
            return None
        if self.type is bool:
            truth = {"1": True, "true": True, "yes": True, "on": True}
            truth |= {"0": False, "false": False, "no": False, "off": False}
            if raw.lower() not in truth:
                raise ConfigError(
                    f"{self.name}: expected true or false (1/0, yes/no, on/off), got {text!r}"
                )
            return truth[raw.lower()]
        if self.type is int or self.type is float:
            try:
                value = self.type(raw)
            except ValueError:
                kind = "a whole number" if self.type is int else "a number"
                raise ConfigError(f"{self.name}: expected {kind}, got {text!r}") from None
            return self.check(value)
        return self.check(raw.replace("_", "-") if self.choices else raw)

    def check(self, value: Any) -> Any:
        """``value`` if it is inside the bounds; raises ConfigError naming bounds and value."""
        if value is None:
            if self.optional:
                return None
            raise ConfigError(f"{self.name}: a value is required, got none")
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.type) or (self.type is int and isinstance(value, bool)):
            raise ConfigError(f"{self.name}: expected {self.type.__name__}, got {value!r}")
        if self.choices and value not in self.choices:
            planned = " (not built yet)" if value in PLANNED_MODES else ""
            raise ConfigError(
                f"{self.name}: expected one of {', '.join(self.choices)}, got {value!r}{planned}"
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{self.name}: expected a finite number, got {value}")
            if self.low is not None and value < self.low:
                raise ConfigError(f"{self.name}: expected at least {self.low:g}, got {value}")
            if self.high is not None and value > self.high:
                raise ConfigError(f"{self.name}: expected at most {self.high:g}, got {value}")
        return value

"""Busy thresholds of one or many frontends: read, compared, set, tried and watched."""

from collections.abc import Mapping

Thresholds = dict[str, float | int | None]
"""Threshold -> value; None: off."""
Values = Mapping[str, float | int | None]
"""Thresholds to set, by name; None switches one off."""

"""``--router-kv-transfer-qos``: latency and bandwidth of each topology level, as YAML.

::

    levels:              # from narrow to wide
      - level: rack      # a topology domain of the workers
        latency: 20us
        bandwidth: 400Gbit/s
      - level: zone
        latency: 500us
        bandwidth: 25Gbit/s
    beyond:              # all else
      latency: 30ms
      bandwidth: 5Gbit/s
    bytes_per_token: 131072   # optional; {MODEL: BYTES} where models differ
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from dynctl.base.errors import UsageProblem, file_problem, single_line
from dynctl.base.files import read_file
from dynctl.base.yaml_reader import YamlError, read_yaml, yaml_lines
from dynctl.tokenization import TokenizerError, read_model_config
from dynctl.wire.model_config import UnknownSize, kv_bytes_per_token
from router_core import BEYOND, ConfigError, Link, RouterConfig, TransferTable, parse_domains

FLAG: Final = "--router-kv-transfer-qos"
_MOST_BYTES: Final = 1 << 20
_MOST_MODELS: Final = 1_000
_SECONDS: Final = {"us": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": Fraction(1)}
_PREFIX: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_RATES: Final = {
    f"{prefix}{unit}/s": factor * size
    for unit, size in (("bit", Fraction(1, 8)), ("B", Fraction(1)))
    for prefix, factor in _PREFIX.items()
}
_AMOUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+(?:/s)?)")
_EXAMPLE: Final = "docs/routing/distance.md#what-distance-costs has an example"


class TransferFileError(UsageProblem):
    """An invalid file; the message has the file, the line and what was expected."""


def configured_table(
    config: RouterConfig, model_path: Path | str | None = None
) -> tuple[TransferTable | None, str | None]:
    """The table that the settings name, and why the size of the KV cache is unknown if it is.

    (None, None) where the settings name no file. ``model_path``: a directory whose ``config.json``
    has the size of models that the file has none for. Raises TransferFileError.
    """
    if config.router_kv_transfer_qos is None:
        return None, None
    table = read_transfer_file(Path(config.router_kv_transfer_qos))
    _check_levels(table, config)
    if table.bytes_per_token is not None:
        return table, None
    if model_path is None:
        return table, None if table.by_model else "no --model-path"
    try:
        size = kv_bytes_per_token(read_model_config(Path(model_path)))
    except (TokenizerError, UnknownSize) as error:
        return table, f"config.json of {model_path}: {single_line(str(error))}"
    return replace(table, bytes_per_token=size), None


def _check_levels(table: TransferTable, config: RouterConfig) -> None:
    """Every domain that the settings name is a level of the file."""
    wanted = {} if config.router_own_domains is None else parse_domains(config.router_own_domains)
    named = dict.fromkeys(wanted, "--router-own-domains")
    if config.kv_transfer_domain is not None:
        named[config.kv_transfer_domain] = "--router-kv-transfer-topology-level"
    for domain, flag in named.items():
        if domain not in table.names:
            raise TransferFileError(
                f"{FLAG} {config.router_kv_transfer_qos}: the level {domain} of {flag} is missing; "
                f"the file has {', '.join(table.names)}",
                f"add it to levels, with the latency and bandwidth within one {domain}",
            )


def read_transfer_file(path: Path) -> TransferTable:
    """The table of a file; raises TransferFileError."""
    try:
        data = read_file(path, _MOST_BYTES)
        document = read_yaml(data, most_bytes=_MOST_BYTES)
    except OSError as error:
        raise TransferFileError(f"{FLAG} {path}: {file_problem(error)}") from None
    except YamlError as error:
        raise TransferFileError(f"{FLAG} {path}: invalid YAML: {error}") from None
    return _File(path, document, yaml_lines(data)).table()


class _File:
    """A document, and the lines of its parts for errors."""

    def __init__(
        self, path: Path, document: Any, lines: Mapping[tuple[str | int, ...], int]
    ) -> None:
        self._path = path
        self._document = document
        self._lines = lines

    def table(self) -> TransferTable:
        top = self._mapping((), self._document, ("levels", "beyond"), ("bytes_per_token",))
        rows = top["levels"]
        if not isinstance(rows, list) or not rows:
            self._refuse(("levels",), f"levels: expected a list of levels, got {rows!r:.80}")
        levels: dict[str, Link] = {}
        for number, row in enumerate(rows):
            path = ("levels", number)
            values = self._mapping(path, row, ("level", "latency", "bandwidth"), ())
            name = values["level"]
            where = (*path, "level")
            if not isinstance(name, str) or not name.strip():
                self._refuse(where, f"level: expected a topology domain, got {name!r:.80}")
            if name == BEYOND:
                self._refuse(where, "level beyond: give it as `beyond:` beside `levels:`")
            if name in levels:
                self._refuse(where, f"level {name} occurs twice; keep one of them")
            levels[name] = self._link(path, values)
        links = [*levels.items(), (BEYOND, self._link(("beyond",), self._beyond(top)))]
        self._check_order(links)
        sizes = self._sizes(top.get("bytes_per_token"))
        try:
            return TransferTable(tuple(levels.items()), links[-1][1], *sizes)
        except ConfigError as error:
            self._refuse(("levels",), str(error))

    def _beyond(self, top: Mapping[str, Any]) -> dict[str, Any]:
        return self._mapping(("beyond",), top["beyond"], ("latency", "bandwidth"), ())

    def _check_order(self, links: list[tuple[str, Link]]) -> None:
        for number, (near, far) in enumerate(pairwise(links)):
            (name, one), (wider, other) = near, far
            if one.latency_s > other.latency_s and one.bytes_per_s < other.bytes_per_s:
                self._refuse(
                    ("levels", number),
                    f"level {name} is slower than {wider}: expected levels from narrow to wide",
                )

    def _mapping(
        self,
        path: tuple[str | int, ...],
        value: Any,
        needed: tuple[str, ...],
        others: tuple[str, ...],
    ) -> dict[str, Any]:
        named = f"{path[0]}: " if path else ""
        known = (*needed, *others)
        if not isinstance(value, dict):
            self._refuse(path, f"{named}expected {', '.join(needed)}, got {value!r:.80}")
        for key in value:
            if key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(known)}"
                self._refuse((*path, key), f"unknown key {key!r:.80}: {hint}")
        for key in needed:
            if key not in value:
                self._refuse(path, f"{named}{key} is missing")
        return value

    def _link(self, path: tuple[str | int, ...], row: Mapping[str, Any]) -> Link:
        latency = self._amount((*path, "latency"), row["latency"], _SECONDS, "20us")
        rate = self._amount((*path, "bandwidth"), row["bandwidth"], _RATES, "25Gbit/s")
        try:
            return Link(latency, rate)
        except ConfigError as error:
            wrong = str(error).partition(":")[0]
            self._refuse((*path, wrong), str(error))

    def _amount(
        self, path: tuple[str | int, ...], value: Any, units: Mapping[str, Fraction], example: str
    ) -> float:
        match = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None or match[2] not in units or len(match[1]) > 30:
            self._refuse(
                path,
                f"{path[-1]}: expected a number and a unit ({', '.join(units)}), for example "
                f"{example}, got {value!r:.80}",
            )
        return float(Fraction(match[1]) * units[match[2]])

    def _sizes(self, value: Any) -> tuple[float | None, dict[str, float]]:
        """``bytes_per_token``: (of all models, by model)."""
        path = ("bytes_per_token",)
        if value is None:
            return None, {}
        if not isinstance(value, dict):
            return self._size(path, value), {}
        if len(value) > _MOST_MODELS:
            self._refuse(path, f"bytes_per_token: expected at most {_MOST_MODELS:,} models")
        return None, {model: self._size((*path, model), size) for model, size in value.items()}

    def _size(self, path: tuple[str | int, ...], value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 1 <= value <= 1e12:
            self._refuse(path, f"bytes_per_token: expected 1 to 1e12 bytes, got {value!r:.80}")
        return float(value)

    def _refuse(self, path: tuple[str | int, ...], problem: str) -> NoReturn:
        line: int | None = None
        while line is None and path:
            line, path = self._lines.get(path), path[:-1]
        raise TransferFileError(f"{FLAG} {self._path}: line {line or 1}: {problem}", _EXAMPLE)

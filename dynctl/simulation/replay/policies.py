"""The policies of a replay: built-in names, settings files, and single settings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from dynctl.base.errors import UsageProblem, named_in_errors, open_regular
from dynctl.base.yaml_reader import YamlError, read_yaml
from dynctl.planning.prefill_load import prefill_model
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.settings.router_settings import resolve
from dynctl.simulation.replay.fleet import ReplayPolicy
from router_core import PRESETS, SETTINGS

MOST_POLICIES: Final = 20
_MOST_BYTES: Final = 1 << 20

#: Name -> its settings, and what it is.
BUILT_IN: Final[Mapping[str, tuple[Mapping[str, Any], str]]] = {
    "round-robin": ({"router_mode": "round-robin"}, "each worker in turn"),
    "random": ({"router_mode": "random"}, "any worker"),
    "least-loaded": ({"router_mode": "least-loaded"}, "the fewest running requests"),
    "power-of-two": ({"router_mode": "power-of-two"}, "the less loaded of two workers"),
    "approximate": (
        {"router_mode": "kv", "use_kv_events": False},
        "cost, with the cache estimated from earlier choices",
    ),
    "kv": ({"router_mode": "kv"}, "cost, with the cache known from KV events"),
    "kv-tuned": (
        {"router_mode": "kv", "router_predicted_ttl_secs": 30.0, "prefill_load_scale": 2.0},
        "kv that weighs prefill twice and counts a prefix as cached when it is routed",
    ),
    "best-pair": (
        {"router_mode": "kv", "router_pair_selection": "best"},
        "kv that chooses prefill and decode worker together",
    ),
}
_LABEL: Final = re.compile(r"[\w.-]{1,40}")
_EXPECTED: Final = "expected {}, a preset ({}), or a YAML or TOML file of router settings"


def policies(given: Sequence[str]) -> tuple[list[ReplayPolicy], list[str]]:
    """The policies and warnings about their settings. Raises UsageProblem.

    Each text is ``[LABEL:]NAME|FILE[,SETTING=VALUE]..``; a file may set ``preset`` too.
    """
    if len(given) > MOST_POLICIES:
        raise UsageProblem(f"--policy: {len(given)} policies; expected at most {MOST_POLICIES}")
    chosen: list[ReplayPolicy] = []
    warnings: list[str] = []
    for text in given:
        policy, ignored = _policy(text)
        if policy.name in {other.name for other in chosen}:
            raise UsageProblem(
                f"--policy {text}: {policy.name} is given twice",
                f"give it another label: --policy LABEL:{text.rpartition(':')[2]}",
            )
        chosen.append(policy)
        warnings += (f"policy {policy.name}: {warning}" for warning in ignored)
    return chosen, warnings


def _policy(text: str) -> tuple[ReplayPolicy, Sequence[str]]:
    typed_base, *settings = (part.strip() for part in text.split(","))
    label, base = _split_label(typed_base)
    typed = f"--policy {text}"
    flags: dict[str, str | bool] = {}
    values, preset = _base_settings(base, typed)
    if not label:
        is_name = base in BUILT_IN or base in PRESETS
        label = (text if settings else base) if is_name else Path(base).stem
    for name, value in values.items():
        flags |= _flag(typed, str(name), value)
    for setting in settings:
        name, equals, raw = setting.partition("=")
        if not equals:
            raise UsageProblem(f"{typed}: {setting!r}; expected SETTING=VALUE after the name")
        flags |= _flag(typed, name.strip(), raw.strip())
    try:
        resolved = resolve(flags, {}, preset_name=preset)
        prefill_model(resolved.config, resolved.sources)
    except UsageProblem as error:
        raise UsageProblem(f"{typed}: {error.message}", error.hint) from None
    return ReplayPolicy(label, resolved.config), resolved.warnings


def _flag(typed: str, name: str, value: Any) -> dict[str, str | bool]:
    """The setting as flag and text, as a user would type it for `serve frontend`."""
    plain = name.lower().lstrip("-").replace("-", "_")
    candidates = (plain, f"router_{plain}", plain.removeprefix("router_"))
    known = next((setting for setting in candidates if setting in SETTINGS), None)
    if known is None:
        near = get_close_matches(plain, SETTINGS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageProblem(
            f"{typed}: {name}: no such setting{hint}", "dynctl config show lists the settings"
        )
    flag = ROUTER_OPTIONS[known].flags[0]
    if SETTINGS[known].type is bool:
        return {flag: value if isinstance(value, bool) else SETTINGS[known].parse(str(value))}
    if not isinstance(value, (str, int, float)) and value is not None:
        raise UsageProblem(f"{typed}: {name}: expected a single value, got {type(value).__name__}")
    return {flag: "none" if value is None else str(value)}


def _split_label(base: str) -> tuple[str, str]:
    """The label before a name or a file, empty without one, and the rest."""
    label, colon, rest = base.partition(":")
    if colon and _LABEL.fullmatch(label) and not Path(base).exists():
        return label, rest
    return "", base


def _base_settings(base: str, typed: str) -> tuple[Mapping[str, Any], str | None]:
    """The settings of a name or a file, and the preset on which they build."""
    if base in BUILT_IN:
        return BUILT_IN[base][0], None
    if base in PRESETS:
        return {}, base
    values = dict(_file(Path(base), typed))
    preset = values.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise UsageProblem(f"{typed}: preset {preset!r}; expected one of {', '.join(PRESETS)}")
    return values, preset


def _file(path: Path, typed: str) -> Mapping[str, Any]:
    if not path.exists():
        near = get_close_matches(str(path), [*BUILT_IN, *PRESETS], n=1)
        hint = f"did you mean {near[0]}?" if near else ""
        expected = _EXPECTED.format(", ".join(BUILT_IN), ", ".join(PRESETS))
        raise UsageProblem(f"{typed}: no such policy or file; {expected}", hint)
    with named_in_errors(path), open_regular(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UsageProblem(f"{typed}: larger than {_MOST_BYTES >> 20} MiB; expected settings")
    try:
        if path.suffix == ".toml":
            document: Any = tomllib.loads(data.decode())
        else:
            document = read_yaml(data)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageProblem(f"{typed}: not TOML: {error}") from None
    except YamlError as error:
        raise UsageProblem(f"{typed}: not YAML: {error}") from None
    if not isinstance(document, dict):
        raise UsageProblem(f"{typed}: expected a mapping from settings to values")
    return document

"""Resolve the router settings: flag over environment variable over the preset's default.

Every value has its source, for ``config show`` and the start-up log. Deprecated names work with a
warning; settings of features that are not built yet are validated and reported as ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynctl.base.errors import UsageProblem
from dynctl.settings.router_options import ROUTER_OPTIONS
from router_core import (
    DEFAULT_PRESET,
    PRESETS,
    SETTINGS,
    ConfigError,
    RouterConfig,
    Setting,
    find_setting,
    legacy_overlap_weight,
    preset,
)

PRESET_FLAG = "--preset"
PRESET_VARIABLE = "DYNCTL_PRESET"

#: Name of the enforcement in Dynamo's design proposal; an alternative to --kv-transfer-enforcement.
MISMATCH_FLAG = "--router-kv-transfer-mismatch-policy"
MISMATCH_VARIABLE = "DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY"
MISMATCH_POLICIES = {"fail": "required", "fallback": "fallback"}

#: Names of the 0.9 overlap score weight: 0 switches the cache credit off too.
_LEGACY_WEIGHT = {
    "--router-kv-overlap-score-weight",
    "--kv-overlap-score-weight",
    "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
    "DYN_KV_OVERLAP_SCORE_WEIGHT",
}


@dataclass(frozen=True, slots=True)
class Spelling:
    """One name of a setting: a flag or a variable, current or deprecated."""

    setting: str
    text: str
    deprecated: bool

    @property
    def kind(self) -> str:
        return "flag" if self.text.startswith("--") else "env"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The resolved settings. ``sources``: setting name -> ``flag --x``, ``env X`` or
    ``preset NAME``; ``warnings`` are texts for the user."""

    config: RouterConfig
    preset: str
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def spellings(name: str) -> Iterator[Spelling]:
    """Every flag and variable of a setting, current names first."""
    option = ROUTER_OPTIONS[name]
    for names in (option.flags, option.env):
        for index, text in enumerate(names):
            yield Spelling(name, text, index > 0)


def resolve(
    flags: Mapping[str, str | bool], env: Mapping[str, str], *, preset_name: str | None = None
) -> Resolved:
    """Resolve the router settings.

    ``flags``: given flag (``--router-temperature``) -> its text, or a bool for a switch. Raises
    UsageProblem with the flag or variable, its value and the bounds.
    """
    name = _preset(preset_name, env)
    config = preset(name)
    sources = dict.fromkeys(SETTINGS, f"preset {name}")
    warnings: list[str] = []
    values: dict[str, Any] = {}
    # Lowest precedence first; later ones overwrite value and source.
    variables: Mapping[str, str | bool] = {k: v for k, v in env.items() if v.strip()}
    given = {"env": variables, "flag": flags}
    for kind, texts in given.items():
        for setting in SETTINGS.values():
            for setting_values, spelling in _given(setting, kind, texts, warnings):
                for key, value in setting_values.items():
                    values[key], sources[key] = value, f"{kind} {spelling.text}"
        enforcement = _mismatch(kind, texts)
        if enforcement is not None:
            values["kv_transfer_enforcement"] = enforcement
            which = MISMATCH_FLAG if kind == "flag" else MISMATCH_VARIABLE
            sources["kv_transfer_enforcement"] = f"{kind} {which}"
    try:
        config = config.with_values(values)
    except ConfigError as error:
        option = ROUTER_OPTIONS.get(str(error).partition(":")[0])
        hint = "" if option is None else f"set {option.flags[0]} or {option.env[0]}"
        raise UsageProblem(str(error), hint) from None
    warnings += _without_effect(config, sources)
    return Resolved(config, name, sources, tuple(dict.fromkeys(warnings)))


def parse_assignments(
    config: RouterConfig, assignments: Iterable[str]
) -> tuple[RouterConfig, dict[str, Any]]:
    """``key=value`` texts applied to ``config``: the new config and what was set.

    Keys are field names, with ``-`` or ``_``, with or without the ``router_`` prefix. The 0.9
    ``overlap_score_weight`` sets prefill_load_scale, and the credit too when it is 0. Raises
    UsageProblem for an unknown key, ConfigError for a value out of bounds.
    """
    values: dict[str, Any] = {}
    for text in assignments:
        key, separator, raw = text.partition("=")
        if not separator:
            raise ConfigError(f"{text!r}: expected key=value, for example prefill_load_scale=1.5")
        name = key.strip().lower().lstrip("-").replace("-", "_")
        if name in ("overlap_score_weight", "kv_overlap_score_weight"):
            weight = SETTINGS["prefill_load_scale"].parse(raw)
            values |= legacy_overlap_weight(weight)
            continue
        candidates = (name, f"router_{name}", name.removeprefix("router_"))
        try:
            setting = find_setting(next((one for one in candidates if one in SETTINGS), name))
        except ConfigError as error:
            raise UsageProblem(str(error), "dynctl config show lists the settings") from None
        values[setting.name] = setting.parse(raw)
    return config.with_values(values), values


def bounds(setting: Setting) -> str:
    """The allowed values of a setting as text."""
    if setting.choices:
        text = "|".join(setting.choices)
    elif setting.type is bool:
        text = "true|false"
    else:
        low = "" if setting.low is None else f"{setting.low:g}"
        high = "" if setting.high is None else f"{setting.high:g}"
        kind = {int: "whole number", float: "number", str: "text"}[setting.type]
        text = kind if not low and not high else f"{kind} {low}..{high}"
    return f"{text}, or none" if setting.optional else text


def _preset(given: str | None, env: Mapping[str, str]) -> str:
    variable = env.get(PRESET_VARIABLE, "").strip()
    name, source = (given, PRESET_FLAG) if given is not None else (variable, PRESET_VARIABLE)
    if not name:
        return DEFAULT_PRESET
    if name not in PRESETS:
        raise UsageProblem(f"{source} {name}: expected one of {', '.join(PRESETS)}")
    return name


def _given(
    setting: Setting, kind: str, texts: Mapping[str, str | bool], warnings: list[str]
) -> Iterator[tuple[dict[str, Any], Spelling]]:
    """Values of one setting from its given names; the current name comes last and wins."""
    found = [s for s in spellings(setting.name) if s.kind == kind and s.text in texts]
    read: list[tuple[Any, Spelling]] = []
    for spelling in reversed(found):
        value = _parse(setting, spelling, texts[spelling.text])
        if spelling.deprecated:
            current = _current(setting.name, kind)
            warnings.append(f"{spelling.text} is deprecated: use {current}")
        if read and read[0][0] != value and spelling.deprecated:
            warnings.append(f"{read[0][1].text} and {spelling.text} differ")
        read.append((value, spelling))
        if not setting.is_built(value):
            warnings.append(f"{spelling.text}: {setting.needs} is not built yet: {setting.without}")
        if spelling.text in _LEGACY_WEIGHT:
            yield legacy_overlap_weight(value), spelling
        else:
            yield {setting.name: value}, spelling


def _current(name: str, kind: str) -> str:
    """The current flag or variable of a setting."""
    option = ROUTER_OPTIONS[name]
    return (option.flags if kind == "flag" else option.env)[0]


def _parse(setting: Setting, spelling: Spelling, text: str | bool) -> Any:
    try:
        return setting.check(text) if isinstance(text, bool) else setting.parse(text)
    except ConfigError as error:
        problem = str(error).removeprefix(f"{setting.name}: ")
        raise UsageProblem(
            f"{spelling.text}: {problem}", "dynctl config show -o wide lists settings and bounds"
        ) from None


def _mismatch(kind: str, texts: Mapping[str, str | bool]) -> str | None:
    """The enforcement of the mismatch policy; raises UsageProblem if both flags contradict."""
    which = MISMATCH_FLAG if kind == "flag" else MISMATCH_VARIABLE
    text = texts.get(which)
    if text is None:
        return None
    policy = str(text).strip().lower()
    if policy not in MISMATCH_POLICIES:
        raise UsageProblem(
            f"{which}: expected one of {', '.join(MISMATCH_POLICIES)}, got {text!r}",
            "fail never crosses the domain; fallback crosses when it has no decode worker",
        )
    enforcement = MISMATCH_POLICIES[policy]
    other = _current("kv_transfer_enforcement", kind)
    given = texts.get(other)
    if given is not None and str(given).strip().lower().replace("_", "-") != enforcement:
        raise UsageProblem(
            f"{which} {policy} means {other} {enforcement}, but {other} {given} is given too",
            "give one of them",
        )
    return enforcement


def _without_effect(config: RouterConfig, sources: Mapping[str, str]) -> Iterator[str]:
    """Warnings for settings that have no effect without another one."""
    if config.kv_transfer_domain is None:
        for name in ("kv_transfer_enforcement", "kv_transfer_preferred_weight"):
            if not sources[name].startswith("preset"):
                flag = ROUTER_OPTIONS["kv_transfer_domain"].flags[0]
                yield f"{sources[name].partition(' ')[2]} has no effect without {flag}"

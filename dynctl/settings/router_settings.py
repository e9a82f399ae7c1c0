"""Resolve the router settings: flag over environment variable over the preset's default.

Every value has its source, for ``config show`` and the start-up log. Deprecated names work with a
warning. A value without an effect is validated and reported, by the name that the user typed:
:func:`no_effect` reads where each setting has one from ``router_core.SETTINGS``, for flags,
variables, presets and ``route --set``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from dynctl.base.errors import UsageProblem
from dynctl.base.quantities import duration
from dynctl.settings.router_options import ROUTER_OPTIONS
from router_core import (
    DEFAULT_PRESET,
    LOAD_POLICIES,
    PRESETS,
    SETTINGS,
    ConfigError,
    Only,
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

#: Dynamo's JSON object with the settings of conditional disaggregation; field -> setting.
BYPASS_FLAG = "--router-conditional-disagg-config"
BYPASS_VARIABLE = "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG"
_BYPASS_KEY: Final = "router_conditional_disagg_config"
_SKIPPING: Final = "conditional_disagg_enabled"
BYPASS_FIELDS: Final = {
    name: f"conditional_disagg_{name}"
    for name in (
        "policy",
        "eff_isl_threshold",
        "eff_isl_ratio_threshold",
        "prefill_busy_threshold",
        "decode_busy_threshold",
    )
}

#: Variables of Dynamo's router that are no settings -> what dynctl lacks for them.
_NOT_READ: Final = {
    "DYN_ROUTER_ENDPOINT": "set --endpoint on dynctl serve router",
}
_ROUTER_VARIABLES: Final = "DYN_ROUTER_"
#: Variables of Dynamo's router that other parts read.
SNAPSHOT_VARIABLE: Final = "DYN_ROUTER_SNAPSHOT_THRESHOLD"
_READ_ELSEWHERE: Final = (SNAPSHOT_VARIABLE,)
_LOAD_MODEL: Final = "router_prefill_load_model"
#: What an estimate of the prefill load model needs to know.
_MODELLED_BY: Final = ("ais_backend", "ais_system", "ais_model_path")

_CLASSES: Final = "router_policy_config"
#: Settings of a queue with one class -> the field of a policy class in their place.
_ONE_CLASS: Final = {
    "router_queue_threshold": "prefill_busy_threshold_frac",
    "router_queue_policy": "queue_policy",
}

#: Names of the 0.9 overlap score weight: 0 switches the cache credit off too.
_LEGACY_WEIGHT = {
    "--router-kv-overlap-score-weight",
    "--kv-overlap-score-weight",
    "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
    "DYN_KV_OVERLAP_SCORE_WEIGHT",
}


#: Names of ``--set`` -> the setting: the settings themselves, and their flags.
_BY_KEY: Final = {
    flag.removeprefix("--").replace("-", "_"): name
    for name, option in ROUTER_OPTIONS.items()
    for flag in option.flags
} | {name: name for name in SETTINGS}


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

    @property
    def changed_by_preset(self) -> str | None:
        """The settings that the preset changes and nothing else sets, as one sentence."""
        changed = [
            f"{_flag(name)} {_shown_value(value)}"
            for name, value in PRESETS[self.preset].items()
            if value != SETTINGS[name].default and self.sources[name] == f"preset {self.preset}"
        ]
        return f"preset {self.preset}: {', '.join(changed)}" if changed else None


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Why the value of ``setting`` has no effect. ``elsewhere``: it has one in a running router, or
    in a router that has what is not built here."""

    setting: str
    text: str
    elsewhere: bool


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
            for setting_values, spelling in _given_values(setting, kind, texts, warnings):
                for key, value in setting_values.items():
                    values[key], sources[key] = value, f"{kind} {_typed_spelling(spelling, texts)}"
        enforcement = _mismatch(kind, texts)
        if enforcement is not None:
            values["kv_transfer_enforcement"] = enforcement
            which = MISMATCH_FLAG if kind == "flag" else MISMATCH_VARIABLE
            sources["kv_transfer_enforcement"] = f"{kind} {which}"
        for key, value in _bypass(kind, texts).items():
            which = BYPASS_FLAG if kind == "flag" else BYPASS_VARIABLE
            values[key], sources[key] = value, f"{kind} {which}"
    try:
        config = config.with_values(values)
    except ConfigError as error:
        option = ROUTER_OPTIONS.get(str(error).partition(":")[0])
        hint = "" if option is None else f"set {option.names}"
        raise UsageProblem(str(error), hint) from None
    _refuse_contradictions(config, sources)
    _refuse_bad_classes(config, sources)
    naming = partial(as_typed, sources=sources)
    for key in SETTINGS:
        warnings += _texts(no_effect(key, _typed_name(key, sources), config, naming))
    for key, value in PRESETS[name].items():
        if key not in values and value != SETTINGS[key].default:
            warnings += _texts(
                no_effect(key, f"preset {name}: {key} {_shown_value(value)}", config, naming)
            )
    warnings += _unknown_variables(variables)
    if SNAPSHOT_VARIABLE in variables and not config.router_durable_kv_events:
        warnings.append(
            f"{SNAPSHOT_VARIABLE} has no effect without {_flag('router_durable_kv_events')}"
        )
    return Resolved(config, name, sources, tuple(dict.fromkeys(warnings)))


def parse_assignments(
    config: RouterConfig,
    assignments: Iterable[str],
    unread: Mapping[str, str] = MappingProxyType({}),
) -> tuple[RouterConfig, dict[str, Any], list[NoEffect]]:
    """``key=value`` texts applied to ``config``: the new config, what was set, and what of it has
    no effect on a dry run.

    Keys are field names, with ``-`` or ``_``, with or without the ``router_`` prefix. The 0.9
    ``overlap_score_weight`` sets prefill_load_scale, and the credit too when it is 0. Raises
    UsageProblem for an unknown key, ConfigError for a value out of bounds. ``unread``: setting ->
    why the fleet at hand does not read it.
    """
    values: dict[str, Any] = {}
    typed: dict[str, str] = {}
    for text in assignments:
        key, separator, raw = text.partition("=")
        if not separator:
            raise ConfigError(f"{text!r}: expected key=value, for example prefill_load_scale=1.5")
        name = key.strip().lower().lstrip("-").replace("-", "_")
        if name in ("overlap_score_weight", "kv_overlap_score_weight"):
            parsed = legacy_overlap_weight(SETTINGS["prefill_load_scale"].parse(raw))
        elif f"router_{name.removeprefix('router_')}" == _BYPASS_KEY:
            parsed = _bypass_config(key.strip(), raw)
        else:
            candidates = (name, f"router_{name}", name.removeprefix("router_"))
            try:
                known = (_BY_KEY[name] for name in candidates if name in _BY_KEY)
                setting = find_setting(next(known, name))
            except ConfigError as error:
                raise UsageProblem(str(error), "dynctl config show lists the settings") from None
            parsed = {setting.name: setting.parse(_in_seconds(setting, raw))}
        values |= parsed
        typed |= dict.fromkeys(parsed, f"--set {text.strip()}")
    config = config.with_values(values)
    if values.keys() & {_SKIPPING, *BYPASS_FIELDS.values()}:
        unmet = _without_line(config, _key)
        if unmet:
            raise ConfigError(unmet)
    if config.router_policy_config is not None:
        keys = {name: text.rpartition("=")[0] for name, text in typed.items()}
        _refuse_two_queues(keys, config)
    ignored = [
        reason
        for name in values
        for reason in no_effect(name, typed[name], config, _key, in_dry_run=True)
    ]
    ignored += [
        NoEffect(name, f"{typed[name]} has no effect: {unread[name]}", False)
        for name in values
        if name in unread and name not in {reason.setting for reason in ignored}
    ]
    return config, values, list(dict.fromkeys(ignored))


def no_effect(
    name: str,
    typed: str | None,
    config: RouterConfig,
    naming: Callable[[str], str],
    *,
    in_dry_run: bool = False,
) -> Iterator[NoEffect]:
    """Why the value of a setting has no effect; nothing where it has one.

    ``typed``: the setting as the user typed it (None: not typed, nothing to report). ``naming``:
    the names of the other settings in the text.
    """
    setting, value = SETTINGS[name], getattr(config, name)
    if typed is None:
        return
    if not setting.is_built(value):
        text = f"{typed}: {setting.needs} is not built yet: {setting.without}"
        yield NoEffect(name, text, True)
        return
    shown = bool(setting.dry_run_values) and value not in setting.dry_run_values
    if in_dry_run and setting.dry_run and not shown:
        yield NoEffect(name, f"{typed} has no effect: {setting.dry_run}", True)
        return
    for only in setting.only:
        # One name may set both, as the 0.9 overlap score weight does.
        if not only.holds(config) and naming(only.setting) != typed:
            yield NoEffect(name, f"{typed} has no effect {_unmet(only, config, naming)}", False)
            return


def needs_dynamo(resolved: Resolved) -> Iterator[str]:
    """Warnings for what is set and needs the workers of a Dynamo deployment, where there are none.

    A setting that waits for another one has its warning in ``resolved`` already.
    """
    for name, setting in SETTINGS.items():
        typed = _typed_name(name, resolved.sources)
        if typed is None or not setting.dynamo or not getattr(resolved.config, name):
            continue
        if all(only.holds(resolved.config) for only in setting.only):
            yield (
                f"without the workers of a Dynamo deployment {typed} has no effect: specify the "
                "deployment with --discovery"
            )


def _unmet(only: Only, config: RouterConfig, naming: Callable[[str], str]) -> str:
    """What a setting lacks to have an effect: ``without A or B``, ``with A 1: expected 2``."""
    value, name = getattr(config, only.setting), naming(only.setting)
    separator = ", or "
    if value is None or value is False:
        text, separator = f"without {name}", " or "
    elif value is True:
        text, separator = f"with {name}", ": expected "
    elif only.values:
        expected = " or ".join(map(_shown_value, only.values))
        text = f"with {name} {_shown_value(value)}: expected {expected}"
    else:
        text = f"with {name} {value:g}: expected more than 0"
    other = only.instead
    while other is not None:
        text, separator = f"{text}{separator}{_condition(other, naming)}", ", or "
        other = other.instead
    return text


def _condition(only: Only, naming: Callable[[str], str]) -> str:
    """A condition as a user sets it, with the value that it needs."""
    name = naming(only.setting)
    if SETTINGS[only.setting].type is not bool:
        return " ".join((name, *map(_shown_value, only.values[:1])))
    if only.values != (False,):
        return name
    return f"--no-{name.removeprefix('--')}" if name.startswith("--") else f"{name}=false"


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


def _refuse_bad_classes(config: RouterConfig, sources: Mapping[str, str]) -> None:
    """Raise UsageProblem for a file of policy classes that cannot be read."""
    if config.router_policy_config is None:
        return
    from dynctl.settings.policy_file import policy_classes

    policy_classes(config, _typed_name(_CLASSES, sources) or _flag(_CLASSES))


def _given_values(
    setting: Setting, kind: str, texts: Mapping[str, str | bool], warnings: list[str]
) -> Iterator[tuple[dict[str, Any], Spelling]]:
    """Values of one setting from its given names; the current name comes last and wins."""
    typed = [s for s in spellings(setting.name) if s.kind == kind and s.text in texts]
    read: list[tuple[Any, Spelling]] = []
    for spelling in reversed(typed):
        value = _parse(setting, spelling, texts[spelling.text])
        if spelling.deprecated:
            current = Spelling(setting.name, _current(setting.name, kind), False)
            use = _typed_spelling(current, {current.text: texts[spelling.text]})
            warnings.append(f"{_typed_spelling(spelling, texts)} is deprecated: use {use}")
        if read and read[0][0] != value and spelling.deprecated:
            warnings.append(f"{read[0][1].text} and {spelling.text} differ")
        read.append((value, spelling))
        if spelling.text in _LEGACY_WEIGHT:
            yield legacy_overlap_weight(value), spelling
        else:
            yield {setting.name: value}, spelling


def _current(name: str, kind: str) -> str:
    """The current flag or variable of a setting."""
    option = ROUTER_OPTIONS[name]
    return option.flags[0] if kind == "flag" else option.variable


def _texts(reasons: Iterable[NoEffect]) -> Iterator[str]:
    return (reason.text for reason in reasons)


def _flag(name: str) -> str:
    return ROUTER_OPTIONS[name].flags[0]


def _key(name: str) -> str:
    return name


def _shown_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed_spelling(spelling: Spelling, texts: Mapping[str, str | bool]) -> str:
    """A flag or variable as the user typed it: a switch that is off is ``--no-..``."""
    if texts[spelling.text] is False:
        return f"--no-{spelling.text.removeprefix('--')}"
    return spelling.text


def _typed_name(name: str, sources: Mapping[str, str]) -> str | None:
    """The flag or variable that set a setting, None where the preset did."""
    kind, _, text = sources[name].partition(" ")
    return text if kind in ("flag", "env") else None


def as_typed(name: str, sources: Mapping[str, str]) -> str:
    """The flag or variable of a setting as the user typed it; its flag where it was not typed, and
    for a switch, which may have been typed as off."""
    if SETTINGS[name].type is bool or name not in sources:
        return _flag(name)
    return _typed_name(name, sources) or _flag(name)


def _in_seconds(setting: Setting, text: str) -> str:
    """The text of a setting in seconds without a unit: ``120`` of ``2m``."""
    seconds = duration(text) if setting.name.endswith("_secs") else None
    return text if seconds is None else repr(seconds)


def _parse(setting: Setting, spelling: Spelling, text: str | bool) -> Any:
    try:
        if isinstance(text, bool):
            return setting.check(text)
        return setting.parse(_in_seconds(setting, text))
    except ConfigError as error:
        problem = str(error).removeprefix(f"{setting.name}: ")
        if setting.name.endswith("_secs"):
            problem = problem.replace("a number,", "a number of seconds, or a duration as 2m,")
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


def _bypass(kind: str, texts: Mapping[str, str | bool]) -> dict[str, Any]:
    """Setting -> value of the JSON object of conditional disaggregation; raises UsageProblem."""
    which = BYPASS_FLAG if kind == "flag" else BYPASS_VARIABLE
    text = texts.get(which)
    if text is None:
        return {}
    try:
        fields = _bypass_config(which, str(text))
    except ConfigError as error:
        raise UsageProblem(
            str(error),
            """for example {"policy":"isl_or_load","prefill_busy_threshold":0.5}; fields: """
            + ", ".join(BYPASS_FIELDS),
        ) from None
    for name, value in fields.items():
        own = _current(name, kind)
        if own in texts and _parse(SETTINGS[name], Spelling(name, own, False), texts[own]) != value:
            raise UsageProblem(
                f"{which} and {own} {texts[own]}: they give {name} different values",
                "give one of them",
            )
    return fields


def _bypass_config(where: str, text: str) -> dict[str, Any]:
    """Read Dynamo's JSON object; raises ConfigError, which begins with ``where``."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: expected a JSON object, got {text[:80]!r}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {text[:80]!r}")
    checked = {}
    for field_name, value in parsed.items():
        name = BYPASS_FIELDS.get(field_name)
        if name is None:
            raise ConfigError(f"{where}: unknown field {field_name[:80]!r}")
        if SETTINGS[name].choices and isinstance(value, str):
            value = value.replace("_", "-")
        try:
            checked[name] = SETTINGS[name].check(value)
        except ConfigError as error:
            problem = str(error).partition(": ")[2]
            raise ConfigError(f"{where}: {field_name}: {problem}") from None
    return checked


def _without_line(config: RouterConfig, naming: Callable[[str], str]) -> str:
    """What a policy that reads the load of prefill workers lacks; empty where it lacks nothing."""
    policy = config.conditional_disagg_policy
    if not config.conditional_disagg_enabled or policy not in LOAD_POLICIES:
        return ""
    if config.bypass_busy_threshold is not None:
        return ""
    own, queue = "conditional_disagg_prefill_busy_threshold", "router_queue_threshold"
    return (
        f"{naming('conditional_disagg_policy')} {policy}: {naming(own)} or {naming(queue)} is"
        " needed: the load above which a prefill worker is busy"
    )


def _refuse_bypass(config: RouterConfig, sources: Mapping[str, str]) -> None:
    """Raise UsageProblem where conditional disaggregation cannot work, as Dynamo does."""
    whole = [name for name in BYPASS_FIELDS.values() if _typed_name(name, sources) in
             (BYPASS_FLAG, BYPASS_VARIABLE)]  # fmt: skip
    if not config.conditional_disagg_enabled:
        if whole:
            typed = _typed_name(whole[0], sources)
            raise UsageProblem(
                f"{typed} without {_flag(_SKIPPING)}: conditional disaggregation is off",
                f"add {_flag(_SKIPPING)}, or remove {typed}",
            )
        return
    given = _typed_name(_SKIPPING, sources) or _flag(_SKIPPING)
    _refuse_other(
        given, "conditional disaggregation", {"router_mode": "kv", "use_kv_events": True},
        config, sources,
    )  # fmt: skip
    unmet = _without_line(config, partial(as_typed, sources=sources))
    if unmet:
        raise UsageProblem(unmet, "set one of them, or use the policy isl-bounding")


def _refuse_other(
    given: str, what: str, wanted: Mapping[str, Any], config: RouterConfig,
    sources: Mapping[str, str],
) -> None:  # fmt: skip
    """Raise UsageProblem where a setting that ``what`` needs has another value."""
    for name, needed in wanted.items():
        value = getattr(config, name)
        if value != needed:
            other = _typed_name(name, sources) or _flag(name)
            text = other if isinstance(value, bool) else f"{other} {value}"
            raise UsageProblem(
                f"{given} and {text}: {what} needs {_flag(name)}"
                + ("" if isinstance(needed, bool) else f" {needed}"),
                f"remove {given} or {text}",
            )


def _refuse_contradictions(config: RouterConfig, sources: Mapping[str, str]) -> None:
    """Raise UsageProblem, with both names, where settings exclude each other."""
    _refuse_bypass(config, sources)
    policy = "router_approximate_cache_policy"
    if config.router_approximate_cache_policy == "lru" and config.use_kv_events:
        events = _typed_name("use_kv_events", sources) or _flag("use_kv_events")
        given = f"{_typed_name(policy, sources) or _flag(policy)} lru"
        raise UsageProblem(
            f"{given} and {events}: the policy is for workers whose KV events are not read",
            f"add --no-router-kv-events, or remove {given}",
        )
    if config.router_policy_config is not None:
        _refuse_two_queues(
            {name: _typed_name(name, sources) for name in (_CLASSES, *_ONE_CLASS)}, config
        )
    model = config.router_prefill_load_model
    if model == "none":
        return
    given = f"{_typed_name(_LOAD_MODEL, sources) or _flag(_LOAD_MODEL)} {model}"
    spelled = [_typed_name(name, sources) for name in _MODELLED_BY]
    older = any(text == ROUTER_OPTIONS[name].flags[-1] for name, text in
                zip(_MODELLED_BY, spelled, strict=True))  # fmt: skip
    missing = [
        ROUTER_OPTIONS[name].flags[-1 if older else 0]
        for name in _MODELLED_BY
        if getattr(config, name) is None
    ]
    # Measured durations need no description of what is measured.
    optional = model == "measured" and (
        len(missing) == len(_MODELLED_BY) and config.ais_tp_size is None
    )
    if missing and not optional:
        raise UsageProblem(
            f"{given}: {', '.join(missing)} not set",
            "specify what is modelled, for example --ais-backend vllm --ais-system h200_sxm "
            + f"--ais-model-path DIR, or remove {given}"
            if model != "measured"
            else "specify all of them, for the estimate before enough is measured, or none",
        )
    wanted = {"router_mode": "kv", "router_track_prefill_tokens": True}
    _refuse_other(given, "the model", wanted, config, sources)


def _refuse_two_queues(typed: Mapping[str, str | None], config: RouterConfig) -> None:
    """Raise UsageProblem where settings of the queue are typed beside policy classes, in which
    each class has its own."""
    for name, field_name in _ONE_CLASS.items():
        if typed.get(name) is not None:
            raise UsageProblem(
                f"{typed.get(_CLASSES) or _flag(_CLASSES)} {config.router_policy_config} and "
                f"{typed[name]} {_shown_value(getattr(config, name))} exclude each other",
                f"set policy_classes[].{field_name} in the file, and remove {typed[name]}",
            )


def _unknown_variables(env: Mapping[str, str | bool]) -> Iterator[str]:
    """Warnings for variables of the router that are no setting's, as by a typing error."""
    known = [name for option in ROUTER_OPTIONS.values() for name in option.env]
    known += (MISMATCH_VARIABLE, BYPASS_VARIABLE, *_READ_ELSEWHERE)
    for name in sorted(env):
        if name in _NOT_READ:
            yield f"{name} has no effect: {_NOT_READ[name]}"
        elif name.startswith(_ROUTER_VARIABLES) and name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{name} has no effect: unknown variable{hint}"

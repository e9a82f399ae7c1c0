"""`config show` and `version`."""

from __future__ import annotations

from typing import Any

from dynctl.documents.advice import AdvisedSetting, ModelAdvice
from dynctl.documents.client import Versions
from dynctl.documents.config import ConfigReport, SettingRow
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, table
from dynctl.screens.numbers import amount
from router_core import SETTINGS


def config_report(result: ConfigReport, canvas: Canvas) -> str:
    columns: list[Column[SettingRow]] = [
        # A setting is typed by its name, so only its source is shortened.
        Column("name", "SETTING", lambda s: s.name),
        Column("value", "VALUE", lambda s: s.value, text=_value, right=True),
        Column("source", "SOURCE", lambda s: s.source, name=True),
        Column("bounds", "BOUNDS", lambda s: s.bounds, rank=3, wide=True),
        Column("flag", "FLAG", lambda s: s.flag, rank=1, wide=True),
        Column("env", "ENVIRONMENT", lambda s: s.env, rank=2, wide=True),
        Column("help", "MEANING", lambda s: s.help, rank=4, wide=True),
        Column("aliases", "ALSO", _aliases, rank=5, wide=True),
    ]
    text = _config_head(result, canvas) + "\n"
    text += table(columns, [*result.settings, *result.serving], canvas)
    unbuilt = [setting.name for setting in result.settings if not setting.built]
    if unbuilt:
        note = f"not supported yet, validated and ignored: {', '.join(unbuilt)}"
        text += "\n" + canvas.paragraphs([note], rest="")
    if result.prefill_load:
        text += "\n" + canvas.paragraphs(result.prefill_load)
    for advice in result.advice or ():
        text += "\n" + _advice(advice, canvas)
    return text


def _config_head(result: ConfigReport, canvas: Canvas) -> str:
    """The preset and what it changes; of a frontend, how much of its settings is known."""
    hidden = sum(not setting.known for setting in result.settings)
    if hidden:
        note = (
            f"{hidden} of {len(result.settings)} settings are unknown: a Dynamo frontend exports "
            "few of them, and no worker's card has them"
        )
        return f"settings of {result.source}\n" + canvas.paragraphs([note], rest="")
    head = f"preset {result.preset or 'unknown'}, from {result.source}\n"
    changed = [
        f"{setting.name} {_value(setting)}"
        for setting in result.settings
        if setting.source == f"preset {result.preset}"
        and setting.value != SETTINGS[setting.name].default
    ]
    if not changed:
        return head
    return head + canvas.paragraphs([", ".join(changed)], first="changes ", rest=" " * 8)


def _aliases(setting: SettingRow) -> str:
    return ", ".join(setting.aliases)


def _advice(advice: ModelAdvice, canvas: Canvas) -> str:
    requests = f" ({advice.requests:,} requests)" if advice.requests else ""
    head = f"advice for {advice.model}{requests}: " if advice.model else "advice: "
    text = canvas.paragraphs([f"{head}{advice.workload}; {advice.why}"], rest="")
    columns: list[Column[AdvisedSetting]] = [
        Column("name", "SETTING", lambda s: s.name),
        Column("now", "NOW", lambda s: s.now, form=setting_text, right=True),
        Column("guide", "GUIDE", lambda s: s.low, text=_range, right=True),
        Column("advised", "ADVISED", lambda s: s.advised, text=_advice_text, right=True),
        Column("why", "WHY", lambda s: s.why, rank=1),
    ]
    if advice.settings:
        text += table(columns, advice.settings, canvas)
    for setting in advice.settings:
        if setting.result and not setting.fits:
            result = f"{setting.name} {_range(setting)}: {setting.result}"
            text += canvas.paragraphs([result], first="  ")
    if advice.not_preset:
        text += canvas.paragraphs([advice.not_preset])
    if advice.preset is not None:
        text += f"all of them: --preset {advice.preset}\n"
    return text


def _advice_text(setting: AdvisedSetting) -> str:
    if setting.fits:
        return "as now"
    return "keep" if setting.advised is None else amount(setting.advised)


def _range(setting: AdvisedSetting) -> str:
    if setting.low == setting.high:
        return amount(setting.low)
    return f"{amount(setting.low)} to {amount(setting.high)}"


def _value(setting: SettingRow) -> str:
    return setting_text(setting.value) if setting.known else "unknown"


def setting_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return amount(value) if isinstance(value, (int, float)) else str(value)


def versions(result: Versions, canvas: Canvas) -> str:
    lines = [f"dynctl {result.client}  (Python {result.python})"]
    for peer in result.peers:
        text = f"dynctl {peer.version}" if peer.version else peer.error or "no version reported"
        lines.append(f"{peer.url}  {text}")
    return "\n".join(lines) + "\n"

"""Any option with any number: refused or used, never a defect."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.commands import all_commands

NUMBERS = ["1e308", "-1", "9" * 400, "nan", "inf", "9e18", str(2**64), "-0.0", "1e-320", "0x10"]
#: Options whose value has a number behind a name.
FORMS = ["{}", "a={}", "load.a.decode_blocks={}", "dynamo.topology/zone=zone-a={}"]
#: They run until they are stopped, or write files.
LEFT_OUT = {"serve", "demo", "bundle", "context", "completion", "events", "top"}
ENDLESS = {("thresholds", "watch"), ("topology", "wait"), ("decisions", "tail")}
#: Options that name files or servers.
OTHERS = {
    "--model-path", "--save-view", "--view", "--output", "--kubeconfig", "--token-file",
    "--ca-cert", "--frontend", "--context",
}  # fmt: skip


def _options() -> list[tuple[tuple[str, ...], str]]:
    found = []

    def walk(command: Any, path: tuple[str, ...], context: Any) -> None:
        if hasattr(command, "list_commands"):
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                if inner is not None:
                    walk(inner, (*path, name), context)
        elif path[0] not in LEFT_OUT and path not in ENDLESS:
            for parameter in command.params:
                if not getattr(parameter, "is_flag", False) and parameter.opts[0][:2] == "--":
                    found.append((path, parameter.opts[0]))

    root = all_commands()
    walk(root, (), root.make_context("dynctl", ["version"], resilient_parsing=True))
    return [(path, name) for path, name in found if name not in OTHERS]


OPTIONS = _options()
ARGUMENT = {("route",): ["hi"], ("workers", "show"): ["prefill-a0"], ("why",): ["abc"]}


def test_the_options_were_found():
    names = {name for _, name in OPTIONS}
    assert {"--timeout", "--set", "--prefer-taint", "--wait"} <= names


@given(st.sampled_from(OPTIONS), st.sampled_from(NUMBERS), st.sampled_from(FORMS))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_number(dynctl, option, number, form):
    path, name = option
    value = form.format(number)
    ran = dynctl(*path, *ARGUMENT.get(path, []), "--demo", name, value)
    assert ran.code in (0, 1, 2, 3, 4), (path, name, value, ran.err)
    assert "defect" not in ran.err
    assert "Traceback" not in ran.err

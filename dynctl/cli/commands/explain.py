"""`dynctl explain CODE`."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import codes


def explain(
    options: GlobalOptions,
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE", autocompletion=codes, help="For example DYR0303.", show_default=False
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", hidden=True, help="Print all codes, as docs/checks.md.")
    ] = False,
) -> int:
    """Explain the code of a finding: cause and fix. Without a code, list all codes."""
    from dynctl.base.errors import UsageProblem
    from dynctl.findings.catalogue import all_codes
    from dynctl.findings.pages import code_list, page
    from dynctl.findings.pages import markdown as document
    from dynctl.screens.render import emit

    codes = all_codes()
    if markdown:
        emit(code_list(), options, screen=lambda *_: document() + "\n")
        return 0
    if code is None:
        emit(code_list(), options)
        return 0
    entry = codes.get(code.strip().upper())
    if entry is None:
        near = codes.near(code)
        hint = "\n".join(f"dynctl explain {one}  # {codes[one].title}" for one in near)
        raise UsageProblem(f"{code}: unknown code", hint or "list all codes: dynctl explain")
    emit(page(entry), options)
    return 0

"""`dynctl explain CODE`."""

from pathlib import Path
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
        Path | None,
        typer.Option(
            "--markdown", metavar="DIR", hidden=True, help="Write all codes as docs/checks/."
        ),
    ] = None,
) -> int:
    """Explain the code of a finding: cause and fix. Without a code, list all codes."""
    from dynctl.base.errors import UsageProblem
    from dynctl.findings.catalogue import all_codes
    from dynctl.findings.pages import code_list, page
    from dynctl.findings.pages import markdown as document
    from dynctl.screens.render import emit

    codes = all_codes()
    if markdown is not None:
        markdown.mkdir(exist_ok=True)
        for name, text in document().items():
            (markdown / name).write_text(text, encoding="utf-8")
        return 0
    if code is None:
        emit(code_list(), options)
        return 0
    entry = codes.get(code.strip().upper())
    if entry is None:
        near = codes.near(code)
        hint = "\n".join(f"dynctl explain {code}  # {codes[code].title}" for code in near)
        raise UsageProblem(f"{code}: unknown code", hint or "list all codes: dynctl explain")
    emit(page(entry), options)
    return 0

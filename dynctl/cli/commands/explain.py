"""`dynctl explain`: a code, or an error that a client saw."""

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
            metavar="CODE",
            autocompletion=codes,
            help="For example DYR0303; or an error as a client saw it: 503, or its text.",
            show_default=False,
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="DIR", hidden=True, help="Write all codes as docs/checks/."),
    ] = None,
) -> int:
    """Explain the code of a finding, or a client's error: cause and fix.

    Without a code, list all codes.
    """
    from dynctl.base.errors import UsageProblem
    from dynctl.findings.catalogue import all_codes
    from dynctl.findings.pages import code_list, page
    from dynctl.findings.pages import markdown as document
    from dynctl.findings.runbook import near, runbook
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
    if entry is not None:
        emit(page(entry), options)
        return 0
    errors = runbook(code)
    if errors is not None:
        emit(errors, options)
        return 0
    similar = [f"dynctl explain {known}  # {codes[known].title}" for known in codes.near(code)]
    similar = similar or [f"dynctl explain {text!r}" for text in near(code)]
    raise UsageProblem(
        f"{code[:200]}: unknown code, and no known error of a client",
        "\n".join(similar) or "list all codes: dynctl explain; statuses: dynctl explain 503",
    )

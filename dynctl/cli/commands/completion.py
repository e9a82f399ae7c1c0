"""`dynctl completion bash|zsh|fish`."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import SHELLS, script


def completion(
    options: GlobalOptions,
    context: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> int:
    """Print the shell completion script for commands, options and names.

    bash: eval "$(dynctl completion bash)"; zsh: the same, after compinit; fish: dynctl completion
    fish | source. To keep it, write it where your shell looks for completions. Names of workers,
    models, decisions, domains and contexts are read live if their source answers within 0.4 s.
    """
    from dynctl.base.errors import UsageProblem
    from dynctl.documents.client import CompletionScript
    from dynctl.screens.render import emit

    if shell not in SHELLS:
        raise UsageProblem(f"completion {shell}: expected one of {', '.join(SHELLS)}")
    document = CompletionScript(shell, script(context.find_root().command, shell))
    emit(document, options, screen=lambda result, _: str(result.script))
    return 0

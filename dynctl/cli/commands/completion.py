"""`dynctl completion bash|zsh|fish`."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions

SHELLS = ("bash", "zsh", "fish")


def completion(
    options: GlobalOptions,
    tree: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> int:
    """Print the shell completion script for commands, options and names.

    Its first lines describe the installation. Names of models, workers, domains and contexts are
    read live if the source answers within 0.2 s.
    """
    from importlib import import_module

    from dynctl.base.errors import UsageProblem
    from dynctl.cli.completion.tree import read_tree
    from dynctl.documents.client import CompletionScript
    from dynctl.screens.render import emit

    if shell not in SHELLS:
        raise UsageProblem(f"completion {shell}: expected one of {', '.join(SHELLS)}")
    write = import_module(f"dynctl.cli.completion.{shell}").script
    text = write(read_tree(tree.find_root().command))
    emit(CompletionScript(shell, text), options, screen=lambda result, _: str(result.script))
    return 0

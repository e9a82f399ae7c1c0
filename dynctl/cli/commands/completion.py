"""`dynctl completion bash|zsh|fish`: the script that completes command lines on TAB."""

from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions

SHELLS = ("bash", "zsh", "fish")


def completion(
    options: GlobalOptions,
    tree: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> int:
    """Print a script that completes commands, options and names on TAB.

    Its first lines say where to put it. Models, workers, domains and contexts are completed with
    what is there at that moment, where it answers within a fifth of a second.
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

"""The script for zsh: the tables and walk of the bash script, with descriptions of the words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dynctl.cli.completion.tree import Command, Tree, flags_of, meaning_arms, quoted

_HEAD: Final = """\
#compdef dynctl
# Completion of dynctl in zsh. Written by `dynctl completion zsh`; do not edit.
#
#   source <(dynctl completion zsh)          in this shell, after compinit
#   dynctl completion zsh > DIR/_dynctl      permanently; add DIR to $fpath before compinit
#
# Commands, options and fixed words are in this file. Only the names of running models, workers and
# domains and of contexts come from `dynctl __complete`, which takes at most 0.2 s.
"""

# `path`, `commands`, `options` and `functions` are names that zsh itself uses.
_WALK: Final = r"""
# Offers the values of $1 for the word at the cursor.
__dynctl_offer() {
    local dynctl_exe
    local -a dynctl_found dynctl_open
    case $1 in
        words:*)
            compadd -- ${=1#words:}
            ;;
        live:*)
            dynctl_exe=${(Q)words[1]}
            whence -p -- "$dynctl_exe" >/dev/null || dynctl_exe=dynctl
            dynctl_found=(${(f)"$("$dynctl_exe" __complete "${1#live:}" "$PREFIX" \
                "${(@)words[2,CURRENT-1]}" 2>/dev/null)"})
            # After `zone=` the word continues.
            dynctl_open=(${(M)dynctl_found:#*=})
            dynctl_found=(${dynctl_found:#*=})
            (( $#dynctl_open )) && compadd -S '' -- $dynctl_open
            (( $#dynctl_found )) && compadd -- $dynctl_found
            ;;
        file)
            _files
            ;;
        folder)
            _files -/
            ;;
        *)
            return 1
            ;;
    esac
}

_dynctl() {
    local at='' word='' closed='' meaning='' more='' names=''
    integer i=2 place=1
    local -a subs flags arguments
    __dynctl_command "$at"
    while (( i < CURRENT )); do
        word=${(Q)words[i]}
        if [[ -n $closed ]]; then
            (( place += 1 ))
        elif [[ $word == '--' ]]; then
            closed=1
        elif [[ $word == --*=* ]]; then
            :
        elif [[ $word == -?* ]]; then
            __dynctl_meaning "$at" "$word"
            if [[ -n $meaning ]]; then
                (( i += 1 ))
                if (( i == CURRENT )); then
                    __dynctl_offer "$meaning"
                    return
                fi
            fi
        elif [[ " $names " == *" $word "* ]]; then
            at="${at:+$at }$word"
            __dynctl_command "$at"
        else
            (( place += 1 ))
        fi
        (( i += 1 ))
    done
    if [[ -z $closed && $PREFIX == --*=* ]]; then
        __dynctl_meaning "$at" "${PREFIX%%=*}"
        compset -P 1 '*='
        __dynctl_offer "$meaning"
    elif [[ -z $closed && $PREFIX == -* ]]; then
        _describe -o 'option' flags
    elif [[ -n $names ]]; then
        (( place == 1 )) && _describe 'command' subs
    elif (( place <= $#arguments )); then
        __dynctl_offer "$arguments[place]"
    elif [[ -n $more ]]; then
        __dynctl_offer "$more"
    else
        return 1
    fi
}

# When sourced, register the function; when loaded from $fpath, run it.
if [[ ${funcstack[1]} == _dynctl ]]; then
    _dynctl "$@"
elif (( $+functions[compdef] )); then
    compdef _dynctl dynctl
fi
"""


def script(tree: Tree) -> str:
    """The completion script."""
    lines = [*_command_table(tree), "", *_meaning_table(tree)]
    return "".join((_HEAD, "\n", *(line + "\n" for line in lines), _WALK))


def _command_table(tree: Tree) -> Iterator[str]:
    yield "# Sets names, subs, flags, arguments and more (the argument that repeats) of command $1."
    yield "__dynctl_command() {"
    yield "    names='' subs=() arguments=() more=''"
    yield "    flags=("
    yield from _described(_flags(tree, None), 8)
    yield "    )"
    yield "    case $1 in"
    for command in tree.commands:
        yield f"        {quoted(command.path)})"
        if command.commands:
            yield f"            names={quoted(' '.join(name for name, _ in command.commands))}"
            yield "            subs=("
            yield from _described(command.commands, 16)
            yield "            )"
        own = list(_flags(tree, command))
        if own:
            yield "            flags+=("
            yield from _described(own, 16)
            yield "            )"
        if command.arguments:
            texts = " ".join(quoted(one.text) for one in command.arguments)
            yield f"            arguments=({texts})"
        if command.more:
            yield f"            more={quoted(command.arguments[-1].text)}"
        yield "            ;;"
    yield "    esac"
    yield "}"


def _meaning_table(tree: Tree) -> Iterator[str]:
    yield "# Sets meaning to the possible values of option $2 of the command $1; empty: a switch."
    yield "__dynctl_meaning() {"
    yield '    case "$1:$2" in'
    for places, text in meaning_arms(tree):
        patterns = (
            f"*:{name}" if path == "*" else quoted(f"{path}:{name}") for path, name in places
        )
        yield f"        ({'|'.join(patterns)})"
        yield f"            meaning={quoted(text)}"
        yield "            ;;"
    yield "        (*)"
    yield "            meaning=''"
    yield "            ;;"
    yield "    esac"
    yield "}"


def _flags(tree: Tree, command: Command | None) -> Iterator[tuple[str, str]]:
    return ((name, flag.summary) for flag in flags_of(tree, command) for name in flag.names)


def _described(entries: Iterable[tuple[str, str]], indent: int) -> Iterator[str]:
    """``'name:summary'`` for _describe; names have no colon."""
    for name, summary in entries:
        yield " " * indent + quoted(f"{name}:{summary}" if summary else name)

"""The script for bash (3.2 and later): commands and options as ``case`` tables, and a function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dynctl.cli.completion.tree import Command, Tree, flags_of, meaning_arms, quoted

_HEAD: Final = """\
# Completion of dynctl in bash. Written by `dynctl completion bash`; do not edit.
#
#   source <(dynctl completion bash)                                        in this shell
#   dynctl completion bash > ~/.local/share/bash-completion/completions/dynctl      permanently
#
# Commands, options and fixed words are in this file. Only the names of running models, workers and
# domains and of contexts come from `dynctl __complete`, which takes at most 0.2 s.
"""

_WALK: Final = r"""
# Sets words, cword and cur: the line up to the cursor, rejoined where readline splits (: = @);
# and ahead: the part of cur before the word that readline replaces.
__dynctl_words() {
    local i part rest line=${COMP_LINE:0:COMP_POINT}
    words=() cword=0 ahead=''
    for ((i = 0; i <= COMP_CWORD; i++)); do
        rest=${line#"${line%%[![:space:]]*}"}
        ((i == COMP_CWORD)) && part=$rest || part=${COMP_WORDS[i]}
        if ((i > 0)) && [[ $rest == "$line" && -n $part ]]; then
            ahead=${words[cword]}
            words[cword]+=$part
        else
            ahead=''
            ((i > 0)) && ((++cword))
            words[cword]=$part
        fi
        line=${rest#"$part"}
    done
    cur=${words[cword]}
    # For readline a word begins after a : or =, and with an @.
    [[ $part == [:=] ]] && ahead=$cur
    ahead=${ahead%@}
}

# Offers the values of $1 for the part $value of the word; $lead is the part before it.
__dynctl_offer() {
    local line exe
    case $1 in
        words:*)
            while IFS= read -r line; do
                COMPREPLY+=("$line")
            done < <(compgen -W "${1#words:}" -- "$value")
            ;;
        live:*)
            exe=${words[0]}
            type -P -- "$exe" >/dev/null || exe=dynctl
            while IFS= read -r line; do
                COMPREPLY+=("$line")
            done < <("$exe" __complete "${1#live:}" "$value" "${words[@]:1:cword-1}" 2>/dev/null)
            if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then
                compopt -o nospace 2>/dev/null
            fi
            ;;
        file | folder)
            # Let readline complete paths if it can, since it quotes them.
            [[ $1 == file ]] && line=default || line=dirnames
            compopt -o "$line" 2>/dev/null && return
            [[ $1 == file ]] && line=-f || line=-d
            while IFS= read -r line; do
                COMPREPLY+=("$line")
            done < <(compgen "$line" -- "$value")
            ;;
    esac
    for ((line = 0; line < ${#COMPREPLY[@]}; line++)); do
        COMPREPLY[line]=$lead${COMPREPLY[line]}
        COMPREPLY[line]=${COMPREPLY[line]#"$ahead"}
    done
}

_dynctl() {
    local IFS=$' \t\n' words cword cur ahead at='' place=0 closed='' word i
    local meaning='' value lead='' subs flags arguments more
    COMPREPLY=()
    __dynctl_words
    value=$cur
    __dynctl_command "$at"
    for ((i = 1; i < cword; i++)); do
        word=${words[i]}
        if [[ -n $closed ]]; then
            ((++place))
        elif [[ $word == -- ]]; then
            closed=1
        elif [[ $word == --*=* ]]; then
            continue
        elif [[ $word == -?* ]]; then
            __dynctl_meaning "$at" "$word"
            if [[ -n $meaning ]] && ((++i == cword)); then
                __dynctl_offer "$meaning"
                return
            fi
        elif [[ -n $subs && " $subs " == *" $word "* ]]; then
            at="${at:+$at }$word"
            __dynctl_command "$at"
        else
            ((++place))
        fi
    done
    if [[ -z $closed && $cur == --*=* ]]; then
        lead=${cur%%=*}=
        value=${cur#*=}
        __dynctl_meaning "$at" "${cur%%=*}"
        __dynctl_offer "$meaning"
    elif [[ -z $closed && $cur == -* ]]; then
        __dynctl_offer "words:$flags"
    elif [[ -n $subs ]]; then
        ((place == 0)) && __dynctl_offer "words:$subs"
    elif ((place < ${#arguments[@]})); then
        __dynctl_offer "${arguments[place]}"
    elif [[ -n $more ]]; then
        __dynctl_offer "$more"
    fi
}

complete -F _dynctl dynctl
"""


def script(tree: Tree) -> str:
    """The completion script."""
    return "".join(
        (_HEAD, "\n", *_line(_command_table(tree)), "\n", *_line(_meaning_table(tree)), _WALK)
    )


def _line(lines: Iterator[str]) -> Iterator[str]:
    return (line + "\n" for line in lines)


def _command_table(tree: Tree) -> Iterator[str]:
    yield "# Sets subs, flags, arguments and more (the argument that repeats) of the command $1."
    yield "__dynctl_command() {"
    yield "    subs='' arguments=() more=''"
    yield f"    flags={quoted(_names(tree, None))}"
    yield "    case $1 in"
    for command in tree.commands:
        yield f"        {quoted(command.path)})"
        if command.commands:
            yield f"            subs={quoted(' '.join(name for name, _ in command.commands))}"
        own = _names(tree, command)
        if own:
            yield f"            flags+={quoted(' ' + own)}"
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
    yield "    case $1:$2 in"
    for places, text in meaning_arms(tree):
        patterns = (
            f"*:{name}" if path == "*" else quoted(f"{path}:{name}") for path, name in places
        )
        yield f"        {' | '.join(patterns)})"
        yield f"            meaning={quoted(text)} ;;"
    yield "        *) meaning='' ;;"
    yield "    esac"
    yield "}"


def _names(tree: Tree, command: Command | None) -> str:
    return " ".join(name for flag in flags_of(tree, command) for name in flag.names)

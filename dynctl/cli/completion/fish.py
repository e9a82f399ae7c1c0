"""The script for fish (3.0 and later): the same tables and walk; prints ``word<TAB>summary``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dynctl.cli.completion.tree import Command, Tree, flags_of, meaning_arms

_HEAD: Final = """\
# Completion of dynctl in fish. Written by `dynctl completion fish`; do not edit.
#
#   dynctl completion fish | source                                   in this shell
#   dynctl completion fish > ~/.config/fish/completions/dynctl.fish   permanently
#
# Commands, options and fixed words are in this file. Only the names of running models, workers and
# domains and of contexts come from `dynctl __complete`, which takes at most 0.2 s.
"""

_WALK: Final = r"""
# Prints the values of $argv[1] for the value $argv[2]; $argv[3] is the part of the word before it,
# $argv[4] the program, and the rest the words before.
function __dynctl_offer
    set -l lead $argv[3]
    switch $argv[1]
        case 'words:*'
            for word in (string split ' ' -- (string replace 'words:' '' -- $argv[1]))
                printf '%s\n' "$lead$word"
            end
        case 'live:*'
            set -l exe $argv[4]
            set -l kind (string replace 'live:' '' -- $argv[1])
            type -q -- "$exe"; or set exe dynctl
            for word in (command $exe __complete $kind "$argv[2]" $argv[5..-1] 2>/dev/null)
                printf '%s\n' "$lead$word"
            end
        case file
            for word in (__fish_complete_path "$argv[2]")
                printf '%s\n' "$lead$word"
            end
        case folder
            for word in (__fish_complete_directories "$argv[2]" '')
                printf '%s\n' "$lead$word"
            end
    end
end

function __dynctl_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l exe $before[1]
    set -e before[1]
    set -l at ''
    set -l place 1
    set -l closed ''
    set -l meaning ''
    for word in $before
        if test -n "$meaning"
            set meaning ''
        else if test -n "$closed"
            set place (math $place + 1)
        else if test "x$word" = x--
            set closed yes
        else if string match -q -- '--*=*' $word
            continue
        else if string match -qr -- '^-.' $word
            set meaning (__dynctl_meaning "$at" $word)
        else if contains -- $word (__dynctl_commands "$at" | string replace -r '\t.*' '')
            set at (string trim -- "$at $word")
        else
            set place (math $place + 1)
        end
    end
    if test -n "$meaning"
        __dynctl_offer $meaning "$current" '' $exe $before
    else if test -z "$closed"; and string match -q -- '--*=*' "$current"
        set -l parts (string split -m 1 '=' -- $current)
        set meaning (__dynctl_meaning "$at" $parts[1])
        __dynctl_offer "$meaning" "$parts[2]" "$parts[1]=" $exe $before
    else if test -z "$closed"; and string match -q -- '-*' "$current"
        __dynctl_flags "$at"
    else
        set -l names (__dynctl_commands "$at")
        set -l arguments (__dynctl_arguments "$at")
        if test (count $names) -gt 0
            test $place -eq 1; and printf '%s\n' $names
        else if test (count $arguments) -gt 0
            # After a `+` the last argument repeats.
            if test "$arguments[-1]" = +
                set -e arguments[-1]
                test $place -gt (count $arguments); and set place (count $arguments)
            end
            test $place -le (count $arguments)
            and __dynctl_offer $arguments[$place] "$current" '' $exe $before
        end
    end
end

complete -c dynctl -f -a '(__dynctl_complete)'
"""


def script(tree: Tree) -> str:
    """The completion script."""
    lines = [
        "# Prints the commands of the group $argv[1].",
        *_function("commands", _commands(tree)),
        "",
        "# Prints the options of the command $argv[1].",
        *_function("flags", _flags(tree), common=_described(_pairs(tree, None))),
        "",
        "# Prints the possible values of each argument of the command $argv[1].",
        *_function("arguments", _arguments(tree)),
        "",
        *_meaning_table(tree),
    ]
    return "".join((_HEAD, "\n", *(line + "\n" for line in lines), _WALK))


def _function(
    name: str, found: Iterable[tuple[str, list[str]]], common: Iterable[str] = ()
) -> Iterator[str]:
    """A function that prints ``common`` and the words of one command."""
    yield f"function __dynctl_{name}"
    yield from _printed(list(common), 4)
    yield '    switch "$argv[1]"'
    for path, words in found:
        if words:
            yield f"        case {_quoted(path)}"
            yield from _printed(words, 12)
    yield "    end"
    yield "end"


def _printed(words: list[str], indent: int) -> Iterator[str]:
    if words:
        blank = " " * indent
        yield f"{blank}printf '%s\\n' \\"
        for word in words[:-1]:
            yield f"{blank}    {word} \\"
        yield f"{blank}    {words[-1]}"


def _commands(tree: Tree) -> Iterator[tuple[str, list[str]]]:
    return ((one.path, list(_described(one.commands))) for one in tree.commands)


def _flags(tree: Tree) -> Iterator[tuple[str, list[str]]]:
    return ((one.path, list(_described(_pairs(tree, one)))) for one in tree.commands)


def _arguments(tree: Tree) -> Iterator[tuple[str, list[str]]]:
    for one in tree.commands:
        yield one.path, [_quoted(item.text) for item in one.arguments] + ["+"] * one.more


def _meaning_table(tree: Tree) -> Iterator[str]:
    yield "# Prints the values of option $argv[2] of the command $argv[1]; nothing for a switch."
    yield "function __dynctl_meaning"
    yield '    switch "$argv[1]:$argv[2]"'
    for places, text in meaning_arms(tree):
        yield f"        case {' '.join(_quoted(f'{path}:{name}') for path, name in places)}"
        yield f"            echo {_quoted(text)}"
    yield "    end"
    yield "end"


def _pairs(tree: Tree, command: Command | None) -> Iterator[tuple[str, str]]:
    return ((name, flag.summary) for flag in flags_of(tree, command) for name in flag.names)


def _described(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, summary in entries:
        yield f"{_quoted(name)}\\t{_quoted(summary)}"


def _quoted(text: str) -> str:
    """A word for fish in single quotes, where only quote and backslash are special."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

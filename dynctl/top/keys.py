"""The keys of the panels: what each does, and the line that reminds of them."""

from __future__ import annotations

from typing import Final

from textual.binding import Binding, BindingType

from dynctl.base.errors import ExitCode

#: Looked at before the widget in focus, so that keys that come fast act in their order.
BINDINGS: Final[list[BindingType]] = [
    Binding(key, action, show=False, priority=True)
    for key, action in (
        *((str(number), f"panel({number})") for number in range(1, 5)),
        ("tab", "next_panel(1)"),
        ("shift+tab", "next_panel(-1)"),
        ("slash", "filter('')"),
        ("exclamation_mark", "filter('!')"),
        ("s", "sort"),
        ("S", "reverse"),
        ("g", "group"),
        ("enter", "open"),
        ("d", "describe"),
        ("y", "yaml"),
        ("t", "thresholds"),
        ("e", "export"),
        ("i", "index(0)"),
        ("I", "index(1)"),
        ("p", "pause"),
        ("r", "rate"),
        ("question_mark", "help"),
        ("escape", "back"),
        ("q", "leave(0)"),
        ("ctrl+c", f"leave({int(ExitCode.INTERRUPTED)})"),
    )
]

#: What keys do on the panels.
OWN: Final = frozenset(
    "panel next_panel filter sort reverse group open describe yaml thresholds export index pause "
    "rate help back leave".split()
)

#: The keys, the longest line that fits.
KEYS: Final = (
    "1-4 panels  / filter  s sort  g group  ↵ open  d describe  y yaml  t thresholds  e export  "
    "p pause  r rate  ? help  q quit",
    "1-4 panels / filter s sort g group ↵ open t thresholds p pause ? help q quit",
)

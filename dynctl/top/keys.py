"""The keys of the panels: what each does, and the line that reminds of them."""

from __future__ import annotations

from typing import Final

from textual.binding import Binding, BindingType

from dynctl.base.errors import ExitCode
from dynctl.screens.canvas import Canvas

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
FOOTER: Final = (
    "1-4 panels  / filter  s sort  g group  ↵ open  d describe  y yaml  t thresholds  e export  "
    "p pause  r rate  ? help  q quit",
    "1-4 panels / filter s sort g group ↵ open t thresholds p pause ? help q quit",
)


KEYS: Final = (
    ("1 2 3 4", "go to domains, workers, decisions, alerts; again: only this panel"),
    ("Tab", "the next panel"),
    ("up down PgUp PgDn", "walk the rows (also j k space Home End)"),
    ("Enter", "open: workers of a domain, a worker, a decision explained, a finding"),
    ("d  y", "describe the row in words; as YAML"),
    ("/  !", "filter: words that must be in the row, !word must not; ! alone turns it around"),
    ("s  S", "sort by the next column; turn the order around"),
    ("g", "group domains by the next of zone, rack, host, .."),
    ("t", "busy thresholds: try values, see who would turn busy, set them after a question"),
    ("i  I", "read what the worker caches, or all of them, where that is not told unasked"),
    ("e", "export the view to a file for --view: route --explain works on it offline"),
    ("p", "pause; what is shown stays"),
    ("r", "look less or more often"),
    ("?", "this page"),
    ("Esc", "back: close, drop the filter, show all panels"),
    ("q  Ctrl-C", "quit"),
)
WORDS: Final = (
    ("busy", "every rank of the worker is over a busy threshold: it gets no new request"),
    ("gone", "the worker does not answer, or is not routable"),
    ("stale", "it should have told its load again by now, or events of its cache were lost: dim"),
    ("STRANDED", "prefill workers whose policy leaves them no decode worker"),
    ("KV USED", "KV blocks in use of all, on workers that decode (or do both)"),
    ("WAIT", "requests accepted by the engines and not begun; + where not all of them tell"),
    ("P:D", "available decode workers for each available prefill worker"),
    ("CROSS", "share of KV hand-offs that left the domain value they began in"),
    ("CACHED", "prompt blocks that the prefill worker had cached, of all"),
    ("MARGIN", "by how many blocks the winner was cheaper than the next"),
    ("prefers", "a preferred domain costs so many times the best other one, and spills when that "
     "reaches the crossover"),
    ("?", "not known: the source does not tell; Enter or the panel says how to give it"),
)  # fmt: skip
_LABEL: Final = 20


def help_text(canvas: Canvas) -> str:
    """The page, for a canvas."""
    lines = [canvas.bold("keys"), ""]
    for keys, does in KEYS:
        lines += canvas.paragraph(does, first=f"  {keys}".ljust(_LABEL), rest=" " * _LABEL)
    lines += ["", canvas.bold("words"), ""]
    for word, means in WORDS:
        lines += canvas.paragraph(means, first=f"  {word}".ljust(_LABEL), rest=" " * _LABEL)
    return "\n".join(lines)

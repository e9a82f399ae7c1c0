"""The keys of the panels, the line of keys at the bottom, and the help page behind ``?``."""

from __future__ import annotations

from typing import Final

from textual.binding import Binding, BindingType

from dynctl.base.errors import ExitCode
from dynctl.screens.canvas import Canvas
from dynctl.top.panels.all import PANELS

#: Handled before the widget in focus, so that fast keystrokes act in their order.
BINDINGS: Final[list[BindingType]] = [
    Binding(key, action, show=False, priority=True)
    for key, action in (
        *((str(number), f"panel({number})") for number in range(1, len(PANELS) + 1)),
        ("tab", "next_panel(1)"),
        ("shift+tab", "next_panel(-1)"),
        ("slash", "filter('')"),
        ("exclamation_mark", "filter('!')"),
        ("colon", "jump"),
        ("l", "log"),
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

#: The actions of the panels' keys.
OWN: Final = frozenset(
    "panel next_panel filter sort reverse group open describe yaml thresholds export index pause "
    "rate help back leave jump log".split()
)

#: The line of keys; the first that fits is shown.
FOOTER: Final = (
    f"1-{len(PANELS)} panels  / filter  : go to  s sort  g group  ↵ open  d describe  l log  "
    "y yaml  t thresholds  e export  p pause  r rate  ? help  q quit",
    f"1-{len(PANELS)} panels / filter : go to s sort ↵ open l log t thresholds ? help q quit",
)


KEYS: Final = (
    (
        " ".join(str(number) for number in range(1, len(PANELS) + 1)),
        f"go to {', '.join(panel.NAME for panel in PANELS)}; again: show only this panel",
    ),
    ("Tab", "go to the next panel"),
    ("up down PgUp PgDn", "move through the rows (also j k space Home End)"),
    ("Enter", "open the row: zoom on a domain, a worker, a decision explained, a finding"),
    ("d  y", "describe the row; show it as YAML"),
    ("l", "log of the row: decisions, findings, a worker's pod log"),
    ("/  !", "filter all panels: rows must contain the words and no !word; ! alone inverts"),
    (":", "go to a panel, a worker, a decision or a code: :workers, :decode-a0, :DYT0901"),
    ("s  S", "sort by the next column; reverse the order"),
    ("g", "group by the next domain: zone, rack, host, .."),
    ("t", "busy thresholds: try values, see which workers turn busy, then set them"),
    ("i  I", "read the cache of this worker; of all workers, if they do not report it"),
    ("e", "export the view to a file; --view FILE and route --explain read it offline"),
    ("p", "pause or continue the refresh"),
    ("r", "change the refresh interval"),
    ("?", "show this page"),
    ("Esc", "go back: close, drop the filter, show all panels"),
    ("q  Ctrl-C", "quit"),
)
WORDS: Final = (
    ("busy", "every rank of the worker is over a busy threshold: it gets no new requests"),
    ("4/6", "4 of 6 workers are available; KV USED and WAIT count available workers only"),
    ("unavailable", "the worker does not respond, or the router does not route to it"),
    ("stale", "the load report is overdue, or KV events were lost; the row is dim"),
    ("STRANDED", "prefill workers whose policy leaves them no decode worker"),
    ("KV USED", "used share of all KV blocks, on workers that decode"),
    ("WAIT", "requests that the engines accepted and have not started; + if some engines do not "
     "report it"),
    ("P:D", "available decode workers for each available prefill worker"),
    ("CROSS", "share of KV hand-offs that left their domain value"),
    ("PREFILL DECODE", "of a domain: its workers of the role; of a worker: active prefill tokens "
     "and active decode blocks that the router counts"),
    ("CACHED", "of a worker: blocks in its cache; of a decision: prompt blocks found in the "
     "prefill worker's cache, of all prompt blocks"),
    ("INDEX", "whether the router's index of the worker's cache is current, and the age of the "
     "last event"),
    ("COST", "cost of the chosen worker in blocks; with two hops, of the prefill hop"),
    ("MARGIN", "how many blocks the winner was cheaper than the next candidate"),
    ("prefers", "cost of the preferred domain as a multiple of the best other one; requests spill "
     "when it reaches the crossover"),
    ("?", "unknown: the source does not report it; Enter or the panel shows how to provide it"),
)  # fmt: skip
_LABEL: Final = 20


def help_text(canvas: Canvas) -> str:
    """The help page."""
    lines = [canvas.bold("keys"), ""]
    for keys, does in KEYS:
        lines += canvas.paragraph(does, first=f"  {keys}".ljust(_LABEL), rest=" " * _LABEL)
    lines += ["", canvas.bold("words"), ""]
    for word, means in WORDS:
        lines += canvas.paragraph(means, first=f"  {word}".ljust(_LABEL), rest=" " * _LABEL)
    return "\n".join(lines)

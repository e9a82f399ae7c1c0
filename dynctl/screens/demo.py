"""`demo`: a screen per request with its actual decision, the closing screen, and the troubles of
simulated clusters."""

from __future__ import annotations

from dynctl.documents.demo import ClusterTrouble, ClusterTroubles, DemoEnd, DemoStep
from dynctl.screens.canvas import Canvas
from dynctl.screens.numbers import plural
from dynctl.screens.route import ExplainScreen

_ANSWER_CHARACTERS = 160


def demo_step(step: DemoStep, canvas: Canvas) -> str:
    """Title, description, the explained decision, and the client's response."""
    title = f"{step.number}. {step.title}"
    lines = ["", canvas.bold(title), "=" * len(title)]
    lines += canvas.paragraph(step.doing, first="")
    lines += ["", ExplainScreen()(step.route, canvas).rstrip("\n")]
    answer = " ".join(step.answer.split())
    if len(answer) > _ANSWER_CHARACTERS:
        answer = answer[: _ANSWER_CHARACTERS - 3] + "..."
    response = f"HTTP {step.status} after {step.seconds * 1000:.0f} ms: {answer}"
    lines += canvas.paragraph(response, first="client".ljust(9), rest=" " * 9)
    return "\n".join(lines) + "\n"


def demo_end(end: DemoEnd, canvas: Canvas) -> str:
    """The closing screen: what ran, and what to try next while the fleet runs."""
    if not end.kept:
        text = (
            f"That was a fleet of {plural(len(end.engines), 'engine')} and one frontend, "
            f"{end.seconds:.1f} s in total. `dynctl demo --keep` keeps it running."
        )
        return "\n" + "\n".join(canvas.paragraph(text, first="")) + "\n"
    tries = [] if end.found_by_default else [f"export DYNCTL_FRONTEND={end.url}"]
    tries += [
        "dynctl top",
        "dynctl workers list",
        'dynctl route --explain "Which zone would serve this?"',
        "dynctl thresholds set --active-prefill-tokens 500 --dry-run",
        f"curl -s {end.url}/v1/chat/completions \\",
        "  -H 'content-type: application/json' \\",
        '  -d \'{"model":"demo","messages":[{"role":"user","content":"Hello"}]}\'',
    ]
    title = "The fleet keeps running. In another terminal:"
    if end.loaded:
        tries.insert(1 - end.found_by_default + 1, "dynctl decisions tail")
        title = "Traffic is running. Now run, in another terminal:"
    lines = ["", canvas.bold(title), ""]
    return "\n".join([*lines, *(f"  {line}" for line in tries), "", "Ctrl-C stops it."]) + "\n"


def cluster_troubles(result: ClusterTroubles, canvas: Canvas) -> str:
    """Each trouble with its codes and what is seen of it, then the commands."""
    lines = []
    for trouble in result.troubles:
        lines += [f"{canvas.bold(trouble.name)}  {' '.join(trouble.codes)}"]
        lines += canvas.paragraph(f"{trouble.happened} {trouble.seen}")
    return "\n".join([*lines, "", *result.commands]) + "\n"


def cluster_trouble(trouble: ClusterTrouble, canvas: Canvas) -> str:
    """What happened and is seen, and the commands that show it, one a line."""
    lines = [canvas.bold(trouble.name), *canvas.paragraph(f"{trouble.happened} {trouble.seen}")]
    codes = f"topology verify reports {', '.join(trouble.codes)}, the cause first."
    return "\n".join([*lines, *canvas.paragraph(codes), "", *trouble.commands]) + "\n"

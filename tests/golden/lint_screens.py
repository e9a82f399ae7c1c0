"""Screens of `topology lint`: what is fine, what is broken, and what cannot be judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dynctl.manifests.files import parse_manifests
from dynctl.manifests.lint.run import lint
from dynctl.screens.canvas import Canvas
from dynctl.screens.render import draw

HERE = Path(__file__).parent / "lint"
MANIFESTS = Path(__file__).parents[1] / "fixtures" / "manifests"
WIDTHS = (80, 200)
SHOWN = {
    "healthy": "healthy-v1beta1",
    "draft": "DYT0103",
    "stranded": "DYT0901",
    "refused": "DYT0118",
    "topology": "DYT0202",
    "alpha": "v1alpha1",
}


def screens() -> dict[str, Callable[[int], str]]:
    def drawer(stem: str) -> Callable[[int], str]:
        data = (MANIFESTS / f"{stem}.yaml").read_bytes()
        report = lint(parse_manifests(data, "deploy.yaml"))
        return lambda width: draw(report, Canvas(width))

    return {name: drawer(stem) for name, stem in SHOWN.items()}


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, drawn in screens().items():
        for width in WIDTHS:
            (HERE / f"{name}-{width}.txt").write_text(drawn(width))

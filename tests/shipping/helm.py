"""Helm, run by the Python that has it: ``helm.py lint CHART`` and ``helm.py render CHART JSON``.

Prints JSON: the findings of lint, or the rendered files by name.
"""

import json
import sys
from importlib import import_module
from typing import Any

if __name__ == "__main__":
    charts: Any = import_module("helm_python.chart")
    what, path, *rest = sys.argv[1:]
    if what == "lint":
        print(json.dumps(charts.lint(path, strict=True)))
    else:
        given = json.loads(rest[0])
        with charts.Chart.load(path) as chart:
            print(json.dumps(chart.render(**given)))

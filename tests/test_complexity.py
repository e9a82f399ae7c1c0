"""How complex the functions of the product are: ceilings that only go down.

Counted by lizard, which counts conditions inside expressions and comprehensions too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import lizard  # type: ignore[import-untyped]

ROOT: Final = Path(__file__).parents[1]
#: No function above it is accepted.
HIGHEST: Final = 20
#: Share of functions above 10; the aim is 0.04.
SHARE_ABOVE_10: Final = 0.0503


def test_functions_get_simpler() -> None:
    functions = [
        (function.cyclomatic_complexity, f"{path.relative_to(ROOT)}:{function.long_name}")
        for package in ("dynctl", "router_core")
        for path in sorted((ROOT / package).rglob("*.py"))
        for function in lizard.analyze_file(str(path)).function_list
    ]
    assert len(functions) > 7_000
    above = sorted((row for row in functions if row[0] > HIGHEST), reverse=True)
    shown = "\n".join(f"{complexity} {place}" for complexity, place in above)
    assert not above, f"{len(above)} functions above {HIGHEST}:\n{shown}"
    share = sum(complexity > 10 for complexity, _ in functions) / len(functions)
    assert share <= SHARE_ABOVE_10, f"{share:.4f} of the functions are above 10"

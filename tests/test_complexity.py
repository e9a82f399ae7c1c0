"""How complex the functions of the product are: ceilings that only go down.

Counted by lizard, which counts conditions inside expressions and comprehensions too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import lizard  # type: ignore[import-untyped]

ROOT: Final = Path(__file__).parents[1]
#: Functions above 20; the aim is none. No function above the highest is accepted.
MOST_ABOVE_20: Final = 1
HIGHEST: Final = 21
#: Share of functions above 10; the aim is 0.04.
SHARE_ABOVE_10: Final = 0.0559


def test_functions_get_simpler() -> None:
    functions = [
        (function.cyclomatic_complexity, f"{path.relative_to(ROOT)}:{function.long_name}")
        for package in ("dynctl", "router_core")
        for path in sorted((ROOT / package).rglob("*.py"))
        for function in lizard.analyze_file(str(path)).function_list
    ]
    assert len(functions) > 7_000
    above = sorted((one for one in functions if one[0] > 20), reverse=True)
    shown = "\n".join(f"{complexity} {place}" for complexity, place in above)
    assert len(above) <= MOST_ABOVE_20, f"{len(above)} functions above 20:\n{shown}"
    assert above[0][0] <= HIGHEST, shown
    share = sum(complexity > 10 for complexity, _ in functions) / len(functions)
    assert share <= SHARE_ABOVE_10, f"{share:.4f} of the functions are above 10"

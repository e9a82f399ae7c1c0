"""A process of ``serve frontend --processes`` with the web page."""

import sys
from typing import Final

from dynctl.serving.services.processes import run_child
from dynctl.web.routes import page_routes

MODULE: Final = "dynctl.web.child"

if __name__ == "__main__":
    sys.exit(run_child((page_routes,)))

"""`dynctl serve frontend|router|engine`."""

from dynctl.options import GlobalOptions


def frontend(options: GlobalOptions) -> int:
    """Run the OpenAI frontend with the router inside."""
    raise NotImplementedError


def router(options: GlobalOptions) -> int:
    """Run the standalone router."""
    raise NotImplementedError


def engine(options: GlobalOptions) -> int:
    """Run a simulated engine."""
    raise NotImplementedError

"""dynctl: route, explain and verify topology-aware disaggregated LLM serving."""

from functools import cache


@cache
def version() -> str:
    """The installed version, for example ``0.1.0``; ``0+unknown`` from an uninstalled tree.

    A function, not a module constant: reading package metadata costs milliseconds that
    ``dynctl --help`` should not pay.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("dynctl")
    except PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> str:
    if name == "__version__":
        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Commands of topology are run as all commands are."""

from tests.dynctl.cli.conftest import dynctl

__all__ = ["dynctl"]

"""Fixtures of the topology commands: the same as those of all commands."""

from tests.dynctl.cli.conftest import dynctl

__all__ = ["dynctl"]

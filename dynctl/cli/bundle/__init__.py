"""The bundle for bug reports: reports and state in one file.

All contents pass :mod:`dynctl.cli.bundle.redaction`, which removes secrets and prompts.
"""

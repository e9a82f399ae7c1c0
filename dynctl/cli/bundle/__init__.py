"""A bundle: what `dynctl` sees, in one file that may be sent to a stranger.

Whatever goes in passes :mod:`dynctl.cli.bundle.redaction` first: no secret, no prompt.
"""

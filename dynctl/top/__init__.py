"""`dynctl top`: the dashboard, and its single frame for `--once`.

Only the modules with widgets import textual, so that ``top --once`` starts fast.
"""

"""`dynctl top` on the screen: tables of one snapshot, and the app that shows one after the other.

Only the modules with widgets import textual, so that ``top --once`` does not wait for it.
"""

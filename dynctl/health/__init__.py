"""The state of a live deployment, joined from discovery entries, and its checks.

Pure: this room reads and writes nothing.
"""

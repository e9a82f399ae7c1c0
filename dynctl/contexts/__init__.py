"""Contexts: named bundles of endpoints in one file, so that nobody types them twice.

``keys`` says what a context may hold, ``file`` reads and writes the file, ``settling`` lays a
context under flags and environment. A context never holds a secret, only where one is found.
"""

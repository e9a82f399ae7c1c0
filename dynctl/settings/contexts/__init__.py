"""Contexts: named bundles of endpoints in one file, so that nobody types them twice.

``keys`` says what a context may hold, ``file`` reads the file and ``changing`` changes it,
``settling`` lays a context under flags and environment. A context never holds a secret, only
where one is found.
"""

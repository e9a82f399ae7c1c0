"""Contexts: saved endpoints, by name, in one file.

``keys``: what a context may contain. ``file`` reads the file, ``edit`` changes it. ``precedence``
applies a context to the options of a command. A context never contains a secret, only the name of
the variable or file that does.
"""

"""Every JSON document that programs may parse.

A document is a frozen msgspec struct, encoded and decoded by :mod:`dynctl.documents.codec`; modules
also build documents from values of the router. Reports of checks are in :mod:`dynctl.findings`.
"""

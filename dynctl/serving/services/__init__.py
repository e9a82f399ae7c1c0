"""Processes without inference of their own: router, indexer, observer; several frontends."""

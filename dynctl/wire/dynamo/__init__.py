"""Dynamo's own formats, as captured from 1.6.1: bytes to values and back, without any IO."""

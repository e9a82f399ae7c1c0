"""Bytes, JSON and msgpack to values and back. Pure: no IO, no clock, no sockets."""

"""Topology: what a worker reads about its place, and what dynctl checks about it."""

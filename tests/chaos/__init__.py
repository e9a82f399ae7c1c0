"""Faults of engines and networks under load; ``make test-chaos``."""

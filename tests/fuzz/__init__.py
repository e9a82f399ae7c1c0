"""Mutated messages for every decoder and endpoint; ``make fuzz``."""

"""A frontend under load, restarts and gaps: its state must stay flat; ``make soak``."""

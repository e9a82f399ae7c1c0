"""Busy thresholds of one or many frontends: read, compared, set, tried and watched."""

"""Replays of traces through a simulated fleet, in virtual time."""

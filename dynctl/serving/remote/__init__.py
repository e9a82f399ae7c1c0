"""A router in another process, and the fleet that it routes."""

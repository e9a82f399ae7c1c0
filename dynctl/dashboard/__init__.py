"""What `dynctl top` shows: frozen snapshots of a fleet, their history, and where they come from."""

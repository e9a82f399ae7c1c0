"""`dynctl test` behind routers that others made."""

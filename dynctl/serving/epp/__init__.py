"""The endpoint picker: the router as an ext_proc server for a gateway."""

"""`serve epp` behind a real Envoy."""

"""Messages that a gateway and an endpoint picker exchange: Envoy's ext_proc, and gRPC's health."""

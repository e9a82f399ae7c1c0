"""Adapters to other systems: the only users of the libraries of ZMQ, etcd, NATS, Kubernetes."""

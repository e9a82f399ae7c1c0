"""Adapters to the world: discovery, events, requests. Only this room touches zmq, etcd and NATS."""

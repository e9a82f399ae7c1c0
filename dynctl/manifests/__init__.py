"""Topology on Kubernetes: manifests, what is wrong with them, what a pod needs, what fits where."""

"""Kubernetes objects as the API server writes them, read into values. Pure."""

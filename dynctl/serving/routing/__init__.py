"""The router at work, without engines and HTTP: prompts, index, admission, service, replicas."""

"""The router at work: the OpenAI frontend, its fleet of engines and the flow of a request."""

"""The running router: the OpenAI frontend, its fleet of engines and the flow of a request."""

"""``serve attach``: an engine with an OpenAI API as a worker of a Dynamo fleet."""

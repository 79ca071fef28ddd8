"""The HTTP door: the APIs of OpenAI and Anthropic over the core of the server. Knows nothing of gRPC."""

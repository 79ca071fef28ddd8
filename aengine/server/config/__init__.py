"""How a server is set up: its configuration, and where `aengine-grpc` reads it from. Imports nothing else of the server."""

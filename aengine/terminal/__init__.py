"""`aengine-chat`: a chat in a terminal or in a pipe, with an engine in this process or behind a gRPC server."""

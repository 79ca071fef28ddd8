"""gRPC on top of an engine: proto messages in, proto messages out. Knows nothing of scheduling, models or devices."""

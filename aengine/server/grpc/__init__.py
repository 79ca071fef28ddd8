"""The gRPC door: the port, how a call runs and ends, what its errors become, and the services."""

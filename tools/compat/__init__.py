"""Runs the clients of others that are too heavy for the tests against `aengine-serve`, as they come."""

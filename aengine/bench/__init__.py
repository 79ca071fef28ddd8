"""Measurements: programs that print figures. Nothing here is imported by the engine, and no test asserts on a time."""

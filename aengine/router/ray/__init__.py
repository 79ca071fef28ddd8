"""Replicas as actors of a Ray cluster."""

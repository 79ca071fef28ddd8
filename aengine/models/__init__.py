"""Models: where they come from, what they are, how their weights are named, and the decoder that runs them.

Knows nothing of requests, schedulers or samplers.
"""

"""Models that `families/` does not know, run by the code of transformers, with our attention and KV pages. Imports transformers.

Owns what such a model must be, how it is loaded, and the check that it computes what its own forward pass does.
"""

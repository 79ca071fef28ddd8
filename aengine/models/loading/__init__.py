"""Weights on their way from files, or from elsewhere, to the names of the house."""

"""Logits to tokens. Knows rows, their parameters and positions, and nothing of models, pages or requests."""

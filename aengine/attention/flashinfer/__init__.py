"""Attention through FlashInfer. Nothing here imports it before it is asked for."""

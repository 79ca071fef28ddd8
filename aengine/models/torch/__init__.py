"""The decoder in torch."""

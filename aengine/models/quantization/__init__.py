"""Quantised checkpoints: from the quantization_config of a config.json to the `QuantizedRows` of each module.

Knows nothing of families, of how a model is executed, or of how files are read.
"""

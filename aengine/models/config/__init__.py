"""What a model says of itself: config.json, or the metadata of a GGUF file, to a `ModelSpec`."""

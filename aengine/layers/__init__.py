"""What a decoder does between its matrix products: norms, rotary embedding, activation. Knows nothing of models, checkpoints or batches."""

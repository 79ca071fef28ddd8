"""The building blocks of a decoder: linear, norm, rotary, embedding. Know nothing of models, checkpoints or batches."""

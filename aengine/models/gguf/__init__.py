"""GGUF files: one file with the description, the tokenizer and the weights of a model.

Follows the specification of the format in the repository ggml-org/ggml (docs/gguf.md) and, for names and layouts, what llama.cpp's
converter writes.
"""

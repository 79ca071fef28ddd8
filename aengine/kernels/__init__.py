"""Our own kernels, a folder per kind of device. They know tensors and shapes, but no checkpoints, requests or schedulers."""

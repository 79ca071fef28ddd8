"""Our own kernels, a folder per kind of device. Know tensors and shapes; nothing of checkpoints, requests or schedulers."""

"""The kernels of GPUs, in Triton; nothing here runs where Triton is not installed."""

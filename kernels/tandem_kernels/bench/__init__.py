"""Check and time every kernel against the machine's limits and torch's own: `python -m tandem_kernels.bench`.

This package imports nothing of `tandem`.
"""

"""Times every kernel beside the machine's limits and torch's own: `python -m tandem_kernels.bench`; imports nothing of
Tandem."""

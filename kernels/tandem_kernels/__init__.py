"""Kernels over paged KV: a plain torch meaning for each and fast versions beside it; imports nothing of tandem."""

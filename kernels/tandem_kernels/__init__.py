"""Provide kernels over paged KV: a reference implementation of each in plain torch, and fast CPU and GPU versions.

This package imports nothing of `tandem`. `contract` defines what every kernel computes; read it first.
`dispatch.kernels_for` returns the kernels of a device. `reference` implements them in plain torch, `triton` on GPUs,
and `native` as compiled CPU code with its own decoder. `bench` checks and times them.
"""

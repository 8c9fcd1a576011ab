"""Kernels over paged KV: a reference implementation of each in plain torch, and fast CPU and GPU versions.

This package imports nothing of `tandem`.
"""

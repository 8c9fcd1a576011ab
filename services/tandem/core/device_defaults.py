"""What settings come to that leave a value to the device; never looks at the device itself.

A function of the tree alone, so that every process that is given the same settings reads the same numbers in them.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.core.config import Bytes, Config

CPU_BLOCK_SIZE, CUDA_BLOCK_SIZE = 16, 64
"""Tokens. On a GPU 64 until one has been measured: a block is one descriptor of a transfer, and those of small models
are to have 64 KiB at least."""
CPU_KV_BYTES = 1 << 30
CPU_PLANS, CUDA_PLANS = 1, 2


def with_device_defaults(config: Config) -> Config:
    """The same tree with values in place of what stands for one; a second time it changes nothing. The size of a GPU's
    KV pool stays 0: only who has loaded the weights knows it."""
    model, engine = config.model, config.engine
    is_cuda = model.device == "cuda"
    # Guesses begin with the last token, which nobody knows while the step that draws it runs.
    may_overlap = is_cuda and config.speculative.method == "off"
    dtype = ("bfloat16" if is_cuda else "float32") if model.dtype == "auto" else model.dtype
    engine = replace(
        engine,
        block_size=engine.block_size or (CUDA_BLOCK_SIZE if is_cuda else CPU_BLOCK_SIZE),
        kv_cache_memory=engine.kv_cache_memory or Bytes(0 if is_cuda else CPU_KV_BYTES),
        plan_depth=engine.plan_depth or (CUDA_PLANS if may_overlap else CPU_PLANS),
        num_threads=engine.num_threads or (1 if is_cuda else 0),
    )
    return replace(config, model=replace(model, dtype=dtype), engine=engine)

"""Fill in settings whose default depends on the device, without inspecting the device.

The result depends on the settings alone, so every process with the same settings computes the same values.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.core.config import Bytes, Config

CPU_BLOCK_SIZE, CUDA_BLOCK_SIZE = 16, 64
"""Tokens. 64 on a GPU is not measured yet: a block is one transfer descriptor, which should hold at least 64 KiB even
for small models."""
CPU_KV_BYTES = 1 << 30
FILES_HOST_BYTES = 1 << 30
"""Host memory through which blocks go to files and come back, where engine.host_cache_memory is 0."""
CPU_PLANS, CUDA_PLANS = 1, 2


def with_device_defaults(config: Config) -> Config:
    """Return a copy of the settings in which every "0" and "auto" that stands for the default of the device is replaced
    by this default.

    Applying the function to its result changes nothing. The size of a GPU's KV pool stays 0, because it is known only
    after the weights are loaded.
    """
    model = config.model
    engine = config.engine
    is_cuda = model.device == "cuda"
    # Drafting starts from the last token, which is unknown while the step that samples it runs.
    may_overlap = is_cuda and config.speculative.method == "off"
    dtype = ("bfloat16" if is_cuda else "float32") if model.dtype == "auto" else model.dtype
    engine = replace(
        engine,
        block_size=engine.block_size or (CUDA_BLOCK_SIZE if is_cuda else CPU_BLOCK_SIZE),
        kv_cache_memory=engine.kv_cache_memory or Bytes(0 if is_cuda else CPU_KV_BYTES),
        host_cache_memory=engine.host_cache_memory or Bytes(FILES_HOST_BYTES if engine.file_cache_path else 0),
        plan_depth=engine.plan_depth or (CUDA_PLANS if may_overlap else CPU_PLANS),
        num_threads=engine.num_threads or (1 if is_cuda else 0),
    )
    return replace(config, model=replace(model, dtype=dtype), engine=engine)

"""Compute the KV layout, the number of KV blocks and the longest request from settings and sizes."""

from __future__ import annotations

from tandem.core.config import EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.model_config import DecoderConfig


def layout_of(config: DecoderConfig, model: ModelConfig, engine: EngineConfig) -> KVLayout:
    """Return the model's KV layout. The settings must have device defaults filled in."""
    dtype = model.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    return KVLayout(engine.block_size, (KVGroup(config.layers, config.kv_heads, config.head_dim, dtype),))


def num_blocks(layout: KVLayout, num_bytes: int, setting: str) -> int:
    """Return how many blocks fit into `num_bytes`. Raises TandemError that names `setting` if not even one does."""
    number = num_bytes // layout.block_bytes
    if number < 1:
        needed = f"one block of {layout} has {layout.block_bytes} bytes"
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{needed}, {setting} is less", param=setting)
    return number


def num_blocks_of(share: KVLayout, engine: EngineConfig, pool_bytes: int = 0) -> tuple[int, int]:
    """Return the number of blocks in the KV pool and of block slots in the host cache.

    `share`: layout of the part of a block that one rank holds. `pool_bytes`: size of the pool, 0 for
    `engine.kv_cache_memory`. Raises TandemError when a configured size does not hold one block."""
    num_slots = num_blocks(share, engine.host_cache_memory, "host_cache_memory") if engine.host_cache_memory else 0
    return num_blocks(share, pool_bytes or engine.kv_cache_memory, "kv_cache_memory"), num_slots


def max_model_len(requested: int, num_positions: int, num_slots: int) -> int:
    """Return the longest request in tokens: `requested`, or if that is 0 what both model and KV pool can hold.

    The pool bounds the default because a request without `max_tokens` gets the whole length, and one that the pool
    cannot hold would be rejected. Raises TandemError when `requested` exceeds either bound."""
    limits = {"the model's positions end at": num_positions, "kv_cache_memory holds": num_slots}
    for limit, num_tokens in limits.items():
        if requested > num_tokens:
            message = f"max_model_len={requested}: {limit} {num_tokens}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="max_model_len")
    return requested or min(limits.values())

"""How many KV blocks there are and how long a request may be, from settings and sizes; never allocates any."""

from __future__ import annotations

from tandem.core.config import EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.model_config import DecoderConfig


def layout_of(config: DecoderConfig, model: ModelConfig, engine: EngineConfig) -> KVLayout:
    """Of settings without a value that is left to the device."""
    dtype = model.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    return KVLayout(engine.block_size, (KVGroup(config.layers, config.kv_heads, config.head_dim, dtype),))


def num_blocks(layout: KVLayout, num_bytes: int, setting: str) -> int:
    """Raises TandemError that names the setting when there is not room for one."""
    number = num_bytes // layout.block_bytes
    if number < 1:
        needed = f"one block of {layout} has {layout.block_bytes} bytes"
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{needed}, {setting} is less", param=setting)
    return number


def num_blocks_of(share: KVLayout, engine: EngineConfig, pool_bytes: int = 0) -> tuple[int, int]:
    """Of a pool of `pool_bytes` (0: what the setting says), and of the host memory beside it; `share` is what a rank
    holds of a block. Raises TandemError where memory is asked for that holds none."""
    num_slots = num_blocks(share, engine.host_cache_memory, "host_cache_memory") if engine.host_cache_memory else 0
    return num_blocks(share, pool_bytes or engine.kv_cache_memory, "kv_cache_memory"), num_slots


def max_model_len(asked: int, num_positions: int, num_slots: int) -> int:
    """The longest request, in tokens. Where nothing is asked for, a small KV pool bounds it too: requests that say no
    `max_tokens` get all the room there is, and one that the pool cannot hold would be refused."""
    limits = {"the model's positions end at": num_positions, "kv_cache_memory holds": num_slots}
    for limit, num_tokens in limits.items():
        if asked > num_tokens:
            message = f"max_model_len={asked}: {limit} {num_tokens}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="max_model_len")
    return asked or min(limits.values())

"""Compute KV layout, size of the KV pool and longest request from settings and sizes, and allocate the KV cache.

`engine.gpu_memory_utilization` is a fraction of the whole GPU rather than of its free memory, so that workers that
start on one GPU at the same time each get their share, whatever the others have allocated by then.
"""

from __future__ import annotations

from tandem.core.config import EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.ranks.leader import RankedCache
from tandem.runtime.ranks.rank_context import RankContext
from tandem_kernels.contract import SCRATCH_BYTES
from tandem_kernels.dispatch import BlockDigestOp
from tandem_kernels.reference import block_digest as reference_digest

CONTEXT_BYTES = 768 << 20
"""GPU memory of a process outside the allocator: CUDA context, loaded kernels, library handles, captured graphs."""
SLACK = 1.5
"""Factor on the size of live tensors for the allocator's fragmentation."""
_FLOAT64 = 8


def layout_of(config: DecoderSpec, model: ModelConfig, engine: EngineConfig) -> KVLayout:
    """Return the layout of the model's KV blocks.

    `model` and `engine` must have been completed by `with_device_defaults`."""
    dtype = model.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    return KVLayout(engine.block_size, (KVGroup(config.num_layers, config.kv_heads, config.head_dim, dtype),))


def num_blocks(layout: KVLayout, num_bytes: int, setting: str) -> int:
    """Return how many blocks of `layout` fit into `num_bytes`.

    `setting`: name of the setting that gave `num_bytes`. Raises TandemError that names it if not even one block fits.
    """
    number = num_bytes // layout.block_bytes
    if number < 1:
        message = f"engine.{setting} must hold at least one KV block, which has {layout.block_bytes:,} bytes ({layout})"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param=setting)
    return number


def num_blocks_of(share: KVLayout, engine: EngineConfig, pool_bytes: int = 0) -> tuple[int, int]:
    """Return the number of blocks in the KV pool, and of block slots in the host cache (0 if it is off).

    `share`: layout of the part of a block that one rank holds. `pool_bytes`: size of the pool in bytes; 0: use
    `engine.kv_cache_memory`. Raises TandemError when a configured size does not hold one block."""
    num_slots = num_blocks(share, engine.host_cache_memory, "host_cache_memory") if engine.host_cache_memory else 0
    return num_blocks(share, pool_bytes or engine.kv_cache_memory, "kv_cache_memory"), num_slots


def allocate_cache(
    layout: KVLayout,
    engine: EngineConfig,
    rank_context: RankContext,
    block_digest: BlockDigestOp = reference_digest,
    aside: DeviceStream | None = None,
    pool_bytes: int = 0,
) -> KVCache:
    """Allocate this rank's part of the KV pool and of the host cache, and return it.

    With tensor parallelism all ranks call it, wait for each other and use the smallest number of blocks among them; on
    the first rank the result executes block operations on all ranks. `layout`: layout of a block of the whole model.
    `rank_context`: this rank's position and connections. `block_digest`: function that digests blocks. `aside`: see
    `KVCache`. `pool_bytes`: see `num_blocks_of`. Raises TandemError when a configured size does not hold one block."""
    heads = rank_context.shard.part(layout.group.heads)
    sizes = num_blocks_of(layout.for_rank(heads), engine, pool_bytes)
    num_blocks, num_host_slots = (rank_context.communicator.least(size) for size in sizes)
    pool = (layout, num_blocks, block_digest, num_host_slots, heads, aside)
    return RankedCache(rank_context, *pool) if rank_context.is_leader else KVCache(*pool)


def max_model_len(engine: EngineConfig, config: DecoderSpec, cache: KVCache) -> int:
    """Return the longest request in tokens: `engine.max_model_len`, or if that is 0 the smaller of the model's context
    length and the number of tokens that the KV pool holds.

    Raises TandemError when `engine.max_model_len` exceeds one of the two. The pool bounds the default because a request
    without `max_tokens` may use the whole length, and a request that the pool cannot hold would be rejected."""
    requested: int = engine.max_model_len
    limits = {
        "the model's context length": config.max_length,
        "the KV pool (engine.kv_cache_memory)": cache.num_blocks * cache.layout.block_size,
    }
    for limit, num_tokens in limits.items():
        if requested > num_tokens:
            message = f"engine.max_model_len={requested} exceeds {limit} of {num_tokens} tokens: lower it, or set 0"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="max_model_len")
    return requested or min(limits.values())


def gpu_pool_bytes(utilization: float, *, total: int, free: int, used: int, step: int) -> int:
    """Return the bytes left for the KV pool of a process that may use the fraction `utilization` of a GPU.

    `total`: size of the GPU's memory. `free`: free memory of the GPU now. `used`: memory held by this process's
    tensors, mostly weights. `step`: temporary memory of the largest step. Zero or a negative number means that there is
    no room for a pool."""
    return min(int(utilization * total) - used - step - CONTEXT_BYTES, free - step)


def step_bytes(config: DecoderSpec, engine: EngineConfig, item_bytes: int) -> int:
    """Estimate the temporary memory of the largest step in bytes: activations, logits and kernel scratch memory.

    `item_bytes`: bytes of one activation. Sampling computes in float64, with up to two copies of the logits."""
    num_rows = max(engine.max_num_batched_tokens, engine.max_num_seqs)
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    row = (4 * config.hidden_size + heads + 3 * config.active_inner) * item_bytes
    logits = engine.max_num_seqs * config.vocab_size * (2 * item_bytes + 2 * _FLOAT64)
    # Graphs keep the scratch memory that was allocated during their capture.
    return int(SLACK * (num_rows * row + logits)) + SCRATCH_BYTES * (1 + engine.cuda_graphs)

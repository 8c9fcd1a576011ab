"""Load a model on a GPU: weights, KV pool, CUDA graphs and asynchronous executor."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tandem.core.config import EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.cuda_graphs import GraphedModel, ladder
from tandem.runtime.cuda_stream import CudaStream, device_kernels, open_cuda, require_float8
from tandem.runtime.device import torch_dtype
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.grammar_engine import LlguidanceMasks
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.kv_sizing import allocate_cache, gpu_pool_bytes, layout_of, max_model_len, step_bytes
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.models.decoder import Decoder
from tandem.runtime.random_weights import open_weights
from tandem.runtime.ranks.follower import Follower
from tandem.runtime.ranks.leader import RankedModel
from tandem.runtime.ranks.rank_context import SINGLE_RANK, RankContext
from tandem_kernels.dispatch import Kernels

_log = logging.getLogger(__name__)


def load_cuda(
    directory: Path,
    config: DecoderSpec,
    model: ModelConfig,
    engine: EngineConfig,
    grammars: LlguidanceMasks | None,
    rank_context: RankContext,
) -> AsyncExecutor:
    """Load the first or only rank's part of the model on its GPU and return the executor.

    `directory`, `config`: the model directory and its parsed config.json. `grammars`: masks for constrained output,
    None if grammars are not supported. `rank_context`: the rank's position and connections. Raises TandemError when
    there is no usable GPU, its kernels are missing, or its memory is too small."""
    device = open_cuda(rank_context.shard.rank % engine.ranks_per_node)
    with _explained_out_of_memory(device):
        decoder, cache, kernels, stream = _load(device, directory, config, model, engine, rank_context)
        executor = compose_executor(decoder, cache, kernels, stream, engine, grammars, rank_context)
    # Work launched on other streams must be complete before the first step.
    torch.cuda.synchronize(device)
    return executor


def load_cuda_follower(
    directory: Path, config: DecoderSpec, model: ModelConfig, engine: EngineConfig, rank_context: RankContext
) -> Follower:
    """Load the part of the model for a tensor-parallel rank other than the first on its GPU.

    Returns the object that executes the first rank's commands on this rank. Arguments and errors are those of
    `load_cuda`."""
    device = open_cuda(rank_context.shard.rank % engine.ranks_per_node)
    with _explained_out_of_memory(device):
        decoder, cache, _, stream = _load(device, directory, config, model, engine, rank_context)
        local, _ = _graphed(decoder, cache, stream, engine)
    torch.cuda.synchronize(device)
    return Follower(local, cache, rank_context.communicator, stream)


@contextmanager
def _explained_out_of_memory(device: torch.device) -> Iterator[None]:
    """Convert torch.OutOfMemoryError into a TandemError that reports the GPU's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        memory = f"{free >> 20} of {total >> 20} MiB are free"
        message = (
            f"the GPU's memory does not hold weights and KV pool ({memory}): lower engine.kv_cache_memory; {error}"
        )
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="kv_cache_memory") from error


def _load(
    device: torch.device,
    directory: Path,
    config: DecoderSpec,
    model: ModelConfig,
    engine: EngineConfig,
    rank_context: RankContext,
) -> tuple[Decoder, KVCache, Kernels, DeviceStream]:
    """Load this rank's part of the weights and allocate its part of the KV pool; also return kernels and a new stream.

    All ranks load concurrently. Raises TandemError."""
    if engine.kv_cache_dtype == "float8_e4m3fn":
        require_float8(device, "engine.kv_cache_dtype", "auto")
    if model.quantization == "fp8":
        require_float8(device, "model.quantization", "none")
    kernels = device_kernels(device, batch_invariant=model.batch_invariant)
    # torch does little work on the CPU here, and workers share the cores.
    torch.set_num_threads(1)
    stream = CudaStream(device)
    dtype, shard = torch_dtype(model.dtype), rank_context.shard
    with open_weights(directory, dtype, device) as checkpoint:
        decoder = Decoder(config, checkpoint, model.quantization, kernels, shard, rank_context.communicator)
    # Weights were concatenated from several tensors, whose memory the allocator still caches.
    torch.cuda.empty_cache()
    layout = layout_of(config, model, engine)
    pool_bytes: int = engine.kv_cache_memory
    if not pool_bytes:
        share = layout.for_rank(shard.part(config.kv_heads))
        pool_bytes = _pool_bytes(device, config, engine, dtype) - share.probe_bytes
    cache = allocate_cache(layout, engine, rank_context, kernels.block_digest, CudaStream(device), pool_bytes)
    torch.cuda.synchronize(device)
    name = torch.cuda.get_device_name(device)
    _log.info("the worker computes with %s kernels on %s and keeps KV in %r", kernels.name, name, cache)
    return decoder, cache, kernels, stream


def compose_executor(
    model: CausalModel,
    cache: KVCache,
    kernels: Kernels,
    stream: DeviceStream,
    engine: EngineConfig,
    grammars: LlguidanceMasks | None,
    rank_context: RankContext = SINGLE_RANK,
) -> AsyncExecutor:
    """Build the asynchronous executor of a loaded model; CUDA graphs are captured if `engine.cuda_graphs` is set.

    `model`, `cache` and `stream` belong to the same device, and `kernels` run on it. `grammars`: masks for constrained
    output, None if grammars are not supported. `rank_context`: the rank's position and connections. Raises TandemError
    when `engine.max_model_len` exceeds what the model or the KV pool can hold."""
    model, longest = _graphed(model, cache, stream, engine)
    if rank_context.is_leader:
        model = RankedModel(model, rank_context)
    return AsyncExecutor(model, cache, kernels.sample, stream, longest, grammars)


def _graphed(model: CausalModel, cache: KVCache, stream: DeviceStream, engine: EngineConfig) -> tuple[CausalModel, int]:
    """Return the model, with CUDA graphs of its decode steps if configured, and the longest request in tokens."""
    longest = max_model_len(engine, model.config, cache)
    if engine.cuda_graphs:
        max_blocks = -(-longest // cache.layout.block_size)
        model = GraphedModel(model, cache, stream, ladder(engine.max_num_seqs), max_blocks)
    return model, longest


def _pool_bytes(device: torch.device, config: DecoderSpec, engine: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes for the KV pool under `engine.gpu_memory_utilization`. Raises TandemError if none are left."""
    free, total = torch.cuda.mem_get_info(device)
    used, step = torch.cuda.memory_reserved(device), step_bytes(config, engine, dtype.itemsize)
    num_bytes = gpu_pool_bytes(engine.gpu_memory_utilization, total=total, free=free, used=used, step=step)
    if num_bytes <= 0:
        message = (
            f"engine.gpu_memory_utilization={engine.gpu_memory_utilization:g} of {total >> 20} MiB leaves nothing for "
            f"KV: {used >> 20} MiB hold weights, {step >> 20} MiB are for a step's activations, "
            f"{free >> 20} MiB are free; raise it, lower engine.max_num_batched_tokens or raise engine.tensor_parallel"
        )
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="gpu_memory_utilization")
    return num_bytes

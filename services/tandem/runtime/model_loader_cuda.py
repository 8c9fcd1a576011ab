"""Composes an executor on a device that computes by itself: weights, KV pool and graphs; never runs one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tandem.core.config import EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.cuda_graphs import GraphedModel, ladder
from tandem.runtime.cuda_stream import CudaStream, device_kernels, free_and_total, open_cuda, require_float8, reserved
from tandem.runtime.device import torch_dtype
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.gpu_memory import GpuMemory, step_bytes
from tandem.runtime.grammar_masks import GrammarMasks
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.kv_sizing import layout_of, max_model_len, num_blocks_of
from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.models.decoder import Decoder
from tandem.runtime.random_weights import open_weights
from tandem.runtime.ranks.follower import Follower
from tandem.runtime.ranks.leader import FollowerCommands, RankedCache, RankedModel
from tandem.runtime.ranks.rank_context import RankContext
from tandem_kernels.dispatch import Kernels

_log = logging.getLogger(__name__)


def load_cuda(
    directory: Path,
    config: DecoderConfig,
    model: ModelConfig,
    engine: EngineConfig,
    grammars: GrammarMasks | None,
    place: RankContext,
) -> AsyncExecutor:
    """On the GPU of this rank. Raises TandemError where there is none, its kernels are missing, or its memory is too
    small."""
    device, kernels, stream = _open(model, engine, place)
    with _told(device):
        decoder, cache = _load(device, kernels, directory, config, model, engine, place)
        executor = compose_executor(decoder, cache, kernels, stream, engine, grammars, place.lead)
    # All that was begun on other streams is there before the first step.
    torch.cuda.synchronize(device)
    return executor


def load_cuda_follower(
    directory: Path, config: DecoderConfig, model: ModelConfig, engine: EngineConfig, place: RankContext
) -> Follower:
    """A rank but the first, as `load_cuda` loads that."""
    device, kernels, stream = _open(model, engine, place)
    with _told(device):
        decoder, cache = _load(device, kernels, directory, config, model, engine, place)
        local, _ = _graphed(decoder, cache, stream, engine)
    torch.cuda.synchronize(device)
    return Follower(local, cache, place.communicator, stream)


def _open(model: ModelConfig, engine: EngineConfig, place: RankContext) -> tuple[torch.device, Kernels, DeviceStream]:
    device = open_cuda(place.shard.rank)
    if engine.kv_cache_dtype == "float8_e4m3fn":
        require_float8(device)
    kernels = device_kernels(device, batch_invariant=model.batch_invariant)
    # What torch still does on the CPU is small; workers share the cores.
    torch.set_num_threads(1)
    return device, kernels, CudaStream(device)


@contextmanager
def _told(device: torch.device) -> Iterator[None]:
    """Raises TandemError where memory runs out inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = free_and_total(device)
        memory = f"{free >> 20} of {total >> 20} MiB are free"
        message = f"the GPU's memory is too small for weights and engine.kv_cache_memory ({memory}): {error}"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="kv_cache_memory") from error


def _load(
    device: torch.device,
    kernels: Kernels,
    directory: Path,
    config: DecoderConfig,
    model: ModelConfig,
    engine: EngineConfig,
    place: RankContext,
) -> tuple[Decoder, KVCache]:
    """This rank's part of the model and of the pool. All ranks load side by side, and agree on the number of blocks."""
    dtype, shard = torch_dtype(model.dtype), place.shard
    with open_weights(directory, dtype, device) as checkpoint:
        decoder = Decoder(config, checkpoint, model.quantization, kernels, shard, place.communicator)
    # Tensors that were put together from others have left their room to the allocator.
    torch.cuda.empty_cache()
    layout, heads = layout_of(config, model, engine), shard.part(config.kv_heads)
    share = layout.for_rank(heads)
    pool_bytes = engine.kv_cache_memory or _pool_bytes(device, config, engine, dtype) - share.probe_bytes
    sizes = num_blocks_of(share, engine, pool_bytes)
    num_blocks, num_host_slots = (place.communicator.least(size) for size in sizes)
    settings = (layout, num_blocks, kernels.block_digest, num_host_slots, heads, CudaStream(device))
    cache = KVCache(*settings) if place.lead is None else RankedCache(place.lead, *settings)
    torch.cuda.synchronize(device)
    _log.info("%s kernels on %s, %r", kernels.name, torch.cuda.get_device_name(device), cache)
    return decoder, cache


def compose_executor(
    model: CausalModel,
    cache: KVCache,
    kernels: Kernels,
    stream: DeviceStream,
    engine: EngineConfig,
    grammars: GrammarMasks | None,
    lead: FollowerCommands | None = None,
) -> AsyncExecutor:
    """All of one device, and with a `lead` of the other ranks'. Raises TandemError where `engine.max_model_len` cannot
    be."""
    model, longest = _graphed(model, cache, stream, engine)
    if lead is not None:
        model = RankedModel(model, lead)
    return AsyncExecutor(model, cache, kernels.sample, stream, longest, grammars)


def _graphed(model: CausalModel, cache: KVCache, stream: DeviceStream, engine: EngineConfig) -> tuple[CausalModel, int]:
    """The model with its decode steps as graphs, if they are wanted, and the longest request in tokens."""
    block_size = cache.layout.block_size
    longest = max_model_len(engine.max_model_len, model.config.max_length, cache.num_blocks * block_size)
    if engine.cuda_graphs:
        model = GraphedModel(model, cache, stream, ladder(engine.max_num_seqs), -(-longest // block_size))
    return model, longest


def _pool_bytes(device: torch.device, config: DecoderConfig, engine: EngineConfig, dtype: torch.dtype) -> int:
    """Raises TandemError when the worker's share of the device holds no more than its weights."""
    free, total = free_and_total(device)
    memory = GpuMemory(total, free, reserved(device), step_bytes(config, engine, dtype.itemsize))
    num_bytes = memory.for_pool(engine.gpu_memory_utilization)
    if num_bytes <= 0:
        raise TandemError(ErrorKind.UNSUPPORTED, _too_small(memory, engine), param="gpu_memory_utilization")
    return num_bytes


def _too_small(memory: GpuMemory, engine: EngineConfig) -> str:
    total, free, used, step = (size >> 20 for size in (memory.total, memory.free, memory.used, memory.step))
    return (
        f"engine.gpu_memory_utilization={engine.gpu_memory_utilization:g} of {total} MiB leaves nothing for KV: "
        f"{used} MiB hold weights, {step} MiB are for a step's activations, {free} MiB are free"
    )

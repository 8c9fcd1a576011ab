"""Load the model that a worker serves: weights, KV pool, executor, tokenizer bundle and fingerprint."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import Config, EngineConfig, ModelConfig
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import ErrorKind, TandemError
from tandem.kv.layout import ModelFingerprint
from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.cuda_graphs import GraphedModel, ladder
from tandem.runtime.cuda_stream import CudaStream, device_kernels, open_cuda, require_float8
from tandem.runtime.cuda_stream import arithmetic as cuda_arithmetic
from tandem.runtime.device import num_compute_threads, torch_dtype
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.executor import TorchExecutor
from tandem.runtime.fingerprint import model_fingerprint, weights_digest
from tandem.runtime.int8 import check_int8
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.kv_sizing import allocate_cache, gpu_pool_bytes, layout_of, max_model_len, step_bytes
from tandem.runtime.model_config import for_longest, read_model_config
from tandem.runtime.model_store import cache_root, resolve_model
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.models.compiled import CompiledModel, packed_weights, shape_of
from tandem.runtime.models.decoder import Decoder
from tandem.runtime.parallel.shard import require_divisible
from tandem.runtime.random_weights import is_random, open_weights
from tandem.runtime.ranks.follower import Follower
from tandem.runtime.ranks.leader import RankedModel
from tandem.runtime.ranks.rank_context import SINGLE_RANK, RankContext
from tandem.runtime.tokenizer_bundle import read_bundle
from tandem.runtime.weight_packing import Packing
from tandem_kernels.dispatch import REFERENCE, Kernels
from tandem_kernels.native import library as native
from tandem_kernels.native.build import NativeUnavailable
from tandem_kernels.native.decoder import unsupported

if TYPE_CHECKING:
    from tandem.runtime.grammar_engine import LlguidanceMasks

AnyExecutor = TorchExecutor | AsyncExecutor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to serve.

    `executor`: runs step plans with the model. `grammars`: masks for constrained output; None if llguidance does not
    support the tokenizer. `bundle`: the tokenizer files for gateways. `fingerprint`: equal on workers that may exchange
    KV."""

    executor: AnyExecutor
    grammars: LlguidanceMasks | None
    bundle: TokenizerBundle
    fingerprint: ModelFingerprint


def check_parallel(model: ModelConfig, engine: EngineConfig) -> None:
    """Check that the model can run on `engine.tensor_parallel` ranks; raises TandemError that names what prevents it.

    Downloads and converts the model if needed."""
    directory = resolve_model(model.id, cache_root(model.cache_dir))
    config, whole = read_model_config(directory), engine.enable_expert_parallel
    require_divisible(config, engine.tensor_parallel, has_whole_experts=whole)
    _require_gpu_for_fp8(model)
    if model.quantization == "int8":
        message = "engine.tensor_parallel must be 1 with model.quantization=int8"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="quantization")
    if engine.kernels == "compiled":
        message = "engine.tensor_parallel must be 1 with engine.kernels=compiled, which run in one rank only"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="kernels")


def _require_gpu_for_fp8(model: ModelConfig) -> None:
    if model.quantization == "fp8" and model.device != "cuda":
        message = "model.quantization=fp8 runs on a GPU only: set it to int8 or none, or model.device to cuda"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="quantization")


def files_digest(model: ModelConfig) -> str:
    """Return the hexadecimal digest of the model's files that every rank reads: the weights, and the sizes in its
    config.json. Raises TandemError as `load_model` does."""
    cache_dir = cache_root(model.cache_dir)
    directory = resolve_model(model.id, cache_dir)
    content = f"{weights_digest(directory, cache_dir)} {read_model_config(directory)}"
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def load_model(model: ModelConfig, engine: EngineConfig, rank_context: RankContext | None = None) -> LoadedModel:
    """Load the model that a worker serves, downloading and converting it if needed.

    `rank_context`: with tensor parallelism, the context of the first rank, the only one to call this function; the
    other ranks call `load_follower` at the same time. Raises TandemError that names what is wrong with the model or the
    settings."""
    model = with_device_defaults(Config(model=model)).model
    cache_dir = cache_root(model.cache_dir)
    directory = resolve_model(model.id, cache_dir)
    config = for_longest(read_model_config(directory), engine.max_model_len)
    bundle = read_bundle(directory, config)
    grammars = _grammars(bundle, config)
    executor = load_executor(directory, config, model, engine, grammars, rank_context)
    digest = weights_digest(directory, cache_dir)
    return LoadedModel(
        executor=executor,
        grammars=grammars,
        bundle=bundle,
        fingerprint=model_fingerprint(digest, config, model, bundle, executor.layout, _arithmetic(model, engine)),
    )


def _arithmetic(model: ModelConfig, engine: EngineConfig) -> str:
    """Name what the bits of results depend on if they are batch-invariant; an empty string if they are not."""
    if not model.batch_invariant:
        return ""
    if model.device == "cuda":
        whole = " with whole experts" if engine.enable_expert_parallel else ""
        return f"{cuda_arithmetic()}, {engine.tensor_parallel} ranks{whole}"
    return f"vectors of {native.vector_width()} floats"


def load_executor(
    directory: Path,
    config: DecoderSpec,
    model: ModelConfig,
    engine: EngineConfig,
    grammars: LlguidanceMasks | None = None,
    rank_context: RankContext | None = None,
) -> AnyExecutor:
    """Load the weights, allocate the KV pool and the host cache, and return the executor.

    `directory`, `config`: the model directory and its parsed config.json. `grammars`: masks for constrained output,
    None if grammars are not supported. `engine.kv_cache_memory` and `engine.host_cache_memory` are bytes per rank.
    `rank_context`: with tensor parallelism, the context of the first rank. Raises TandemError when the model, the
    settings or the device do not fit together."""
    settings = with_device_defaults(Config(model=model, engine=engine))
    model, engine = settings.model, settings.engine
    if model.device == "cuda":
        rank_context = rank_context or SINGLE_RANK
        with _gpu(engine, rank_context) as device:
            decoder, cache, kernels, stream = _load_gpu_rank(device, directory, config, model, engine, rank_context)
            return compose_executor(decoder, cache, kernels, stream, engine, grammars, rank_context)
    _require_gpu_for_fp8(model)
    if rank_context is not None:
        return _compose(*_load_rank(directory, config, model, engine, rank_context), engine, grammars)
    if model.quantization == "int8":
        check_int8(config, model.dtype)
    num_threads = num_compute_threads(engine.num_threads)
    reason = _why_reference(directory, config, model, engine)
    if reason is None:
        # Beside the compiled kernels torch only samples tokens; more threads would take cores from the kernels' own.
        torch.set_num_threads(1)
        cache = allocate_cache(layout_of(config, model, engine), engine, SINGLE_RANK, native.block_digest)
        compiled = _load_compiled(directory, config, model, num_threads)
        message = "the worker computes with compiled kernels, vectors of %d floats and %d threads"
        _log.info(message, native.vector_width(), num_threads)
        return TorchExecutor(compiled, cache, max_model_len(engine, config, cache), grammars)
    if model.batch_invariant:
        message = f"model.batch_invariant needs compiled kernels on a CPU, and they cannot be used: {reason}"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="batch_invariant")
    loaded = _load_rank(directory, config, model, engine, SINGLE_RANK)
    _log.info("the worker computes with reference kernels in torch and %d threads: %s", num_threads, reason)
    return _compose(*loaded, engine, grammars)


def load_follower(model: ModelConfig, engine: EngineConfig, rank_context: RankContext) -> Follower:
    """Load the part of the model for a tensor-parallel rank other than the first.

    Returns the object that executes the first rank's commands on this rank. Blocks until all ranks have allocated their
    KV pool. Raises TandemError as `load_executor` does."""
    settings = with_device_defaults(Config(model=model, engine=engine))
    model, engine = settings.model, settings.engine
    directory = resolve_model(model.id, cache_root(model.cache_dir))
    config = for_longest(read_model_config(directory), engine.max_model_len)
    if model.device == "cuda":
        with _gpu(engine, rank_context) as device:
            decoder, cache, _, stream = _load_gpu_rank(device, directory, config, model, engine, rank_context)
            local, _ = _graphed(decoder, cache, stream, engine)
            return Follower(local, cache, rank_context.communicator, stream)
    return Follower(*_load_rank(directory, config, model, engine, rank_context), rank_context.communicator)


@contextmanager
def _gpu(engine: EngineConfig, rank_context: RankContext) -> Iterator[torch.device]:
    """Return a context manager for loading on the GPU of a rank, which it yields; at its end the work on the GPU is
    complete.

    torch.OutOfMemoryError is converted into a TandemError that reports the GPU's memory."""
    device = open_cuda(rank_context.shard.rank % engine.ranks_per_node)
    try:
        yield device
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        memory = f"{free >> 20} of {total >> 20} MiB are free"
        message = (
            f"the GPU's memory does not hold weights and KV pool ({memory}): lower engine.kv_cache_memory; {error}"
        )
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="kv_cache_memory") from error
    # Work launched on other streams must be complete before the first step.
    torch.cuda.synchronize(device)


def _load_gpu_rank(
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


def _load_rank(
    directory: Path, config: DecoderSpec, model: ModelConfig, engine: EngineConfig, rank_context: RankContext
) -> tuple[CausalModel, KVCache]:
    """Load one CPU rank's part of the weights and of the KV pool for the reference kernels.

    All ranks load concurrently and agree on the smallest number of blocks."""
    shard = rank_context.shard
    torch.set_num_threads(max(1, num_compute_threads(engine.num_threads) // engine.ranks_per_node))
    with open_weights(directory, torch_dtype(model.dtype)) as checkpoint:
        decoder = Decoder(config, checkpoint, model.quantization, shard=shard, communicator=rank_context.communicator)
    cache = allocate_cache(layout_of(config, model, engine), engine, rank_context)
    if not shard.is_whole:
        heads = cache.heads
        _log.info("rank %d of %d holds the KV heads [%d, %d)", shard.rank, shard.size, heads.start, heads.stop)
    return RankedModel(decoder, rank_context) if rank_context.is_leader else decoder, cache


def _compose(model: CausalModel, cache: KVCache, engine: EngineConfig, grammars: LlguidanceMasks | None) -> AnyExecutor:
    """Build the executor of a model on the CPU."""
    if engine.plan_depth > 1:
        # Run-ahead planning needs the asynchronous executor; here it can be tested without a GPU.
        return compose_executor(model, cache, REFERENCE, DeviceStream(), engine, grammars)
    return TorchExecutor(model, cache, max_model_len(engine, model.config, cache), grammars)


def _grammars(bundle: TokenizerBundle, config: DecoderSpec) -> LlguidanceMasks | None:
    """Build the grammar masks of a tokenizer; None, with a warning, if llguidance does not support the tokenizer.

    Such a model still serves all requests without a grammar."""
    # Imported on use: kernels are also tested where llguidance is not installed.
    from tandem.runtime.grammar_engine import LlguidanceMasks

    try:
        return LlguidanceMasks(bundle, config.vocab_size)
    except TandemError as error:
        _log.warning("the worker refuses requests with a grammar, such as JSON schemas: %s", error.message)
        return None


def _why_reference(directory: Path, config: DecoderSpec, model: ModelConfig, engine: EngineConfig) -> str | None:
    """Return why the compiled kernels are not used; None when they are.

    Raises TandemError when `engine.kernels` requires them and they cannot be used."""
    if engine.kernels == "reference":
        return "engine.kernels=reference"
    reason = unsupported(shape_of(config))
    if is_random(directory):
        reason = "weights are random, and compiled kernels read weights from files"
    if model.dtype != "float32":
        reason = f"compiled kernels compute in float32, and model.dtype is {model.dtype}"
    if engine.kv_cache_dtype != "auto":
        reason = f"compiled kernels store KV in float32, and engine.kv_cache_dtype is {engine.kv_cache_dtype}"
    if reason is None:
        try:
            native.load()
        except NativeUnavailable as problem:
            reason = str(problem)
    if reason is not None and engine.kernels == "compiled":
        raise TandemError(
            ErrorKind.UNSUPPORTED, f"engine.kernels=compiled is not possible: {reason}; set it to auto", param="kernels"
        )
    return reason


def _load_compiled(directory: Path, config: DecoderSpec, model: ModelConfig, num_threads: int) -> CompiledModel:
    cache_dir = cache_root(model.cache_dir)
    digest = weights_digest(directory, cache_dir)
    dtype = torch_dtype(model.dtype)
    packing = Packing.EXACT if model.compact else Packing.FLOAT
    if model.quantization == "int8":
        packing = Packing.INT8
    weights = packed_weights(
        lambda: Checkpoint(directory, dtype, stored=config.stored), config, packing, digest, cache_dir
    )
    num_mib = sum(tensor.nbytes for tensor in weights.values()) >> 20
    _log.info("the worker holds %d MiB of weights, packed as %s", num_mib, packing)
    return CompiledModel(config, weights, packing, native.Team(num_threads))

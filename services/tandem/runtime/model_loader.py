"""Load the model that a worker serves: weights, KV pool, executor, tokenizer bundle and fingerprint."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import Config, EngineConfig, ModelConfig
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import ErrorKind, TandemError
from tandem.kv.layout import ModelFingerprint
from tandem.runtime import kv_sizing
from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.cuda_stream import arithmetic as cuda_arithmetic
from tandem.runtime.device import num_compute_threads, torch_dtype
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.executor import TorchExecutor
from tandem.runtime.fingerprint import model_fingerprint, weights_digest
from tandem.runtime.grammar_engine import LlguidanceMasks
from tandem.runtime.int8 import check_int8
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.kv_sizing import layout_of
from tandem.runtime.model_config import for_longest, read_model_config
from tandem.runtime.model_loader_cuda import compose_executor, load_cuda, load_cuda_follower
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
from tandem_kernels.dispatch import REFERENCE
from tandem_kernels.native import library as native
from tandem_kernels.native.build import NativeUnavailable
from tandem_kernels.native.decoder import unsupported

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
        return load_cuda(directory, config, model, engine, grammars, rank_context or SINGLE_RANK)
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
        cache = kv_sizing.allocate_cache(layout_of(config, model, engine), engine, SINGLE_RANK, native.block_digest)
        compiled = _load_compiled(directory, config, model, num_threads)
        message = "the worker computes with compiled kernels, vectors of %d floats and %d threads"
        _log.info(message, native.vector_width(), num_threads)
        return TorchExecutor(compiled, cache, kv_sizing.max_model_len(engine, config, cache), grammars)
    if model.batch_invariant:
        message = f"model.batch_invariant needs compiled kernels on a CPU, and they cannot be used: {reason}"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="batch_invariant")
    decoder, cache = _load_rank(directory, config, model, engine, SINGLE_RANK)
    _log.info("the worker computes with reference kernels in torch and %d threads: %s", num_threads, reason)
    return _compose(decoder, cache, engine, grammars)


def load_follower(model: ModelConfig, engine: EngineConfig, rank_context: RankContext) -> Follower:
    """Load the part of the model for a tensor-parallel rank other than the first.

    Returns the object that executes the first rank's commands on this rank. Blocks until all ranks have allocated their
    KV pool. Raises TandemError as `load_executor` does."""
    settings = with_device_defaults(Config(model=model, engine=engine))
    model, engine = settings.model, settings.engine
    directory = resolve_model(model.id, cache_root(model.cache_dir))
    config = for_longest(read_model_config(directory), engine.max_model_len)
    if model.device == "cuda":
        return load_cuda_follower(directory, config, model, engine, rank_context)
    return Follower(*_load_rank(directory, config, model, engine, rank_context), rank_context.communicator)


def _load_rank(
    directory: Path, config: DecoderSpec, model: ModelConfig, engine: EngineConfig, rank_context: RankContext
) -> tuple[CausalModel, KVCache]:
    """Load one CPU rank's part of the weights and of the KV pool for the reference kernels.

    All ranks load concurrently and agree on the smallest number of blocks."""
    shard = rank_context.shard
    torch.set_num_threads(max(1, num_compute_threads(engine.num_threads) // engine.ranks_per_node))
    with open_weights(directory, torch_dtype(model.dtype)) as checkpoint:
        decoder = Decoder(config, checkpoint, model.quantization, shard=shard, communicator=rank_context.communicator)
    cache = kv_sizing.allocate_cache(layout_of(config, model, engine), engine, rank_context)
    if not shard.is_whole:
        heads = cache.heads
        _log.info("rank %d of %d holds the KV heads [%d, %d)", shard.rank, shard.size, heads.start, heads.stop)
    return RankedModel(decoder, rank_context) if rank_context.is_leader else decoder, cache


def _compose(model: CausalModel, cache: KVCache, engine: EngineConfig, grammars: LlguidanceMasks | None) -> AnyExecutor:
    """Build the executor of a model on the CPU."""
    if engine.plan_depth > 1:
        # Run-ahead planning needs the asynchronous executor; here it can be tested without a GPU.
        return compose_executor(model, cache, REFERENCE, DeviceStream(), engine, grammars)
    return TorchExecutor(model, cache, kv_sizing.max_model_len(engine, model.config, cache), grammars)


def _grammars(bundle: TokenizerBundle, config: DecoderSpec) -> LlguidanceMasks | None:
    """Build the grammar masks of a tokenizer; None, with a warning, if llguidance does not support the tokenizer.

    Such a model still serves all requests without a grammar."""
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

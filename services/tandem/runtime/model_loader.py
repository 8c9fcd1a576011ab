"""Composes what a worker serves: weights, executor, tokenizer bundle and fingerprint; decides nothing about serving."""

from __future__ import annotations

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
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.cuda_stream import arithmetic as cuda_arithmetic
from tandem.runtime.device import num_compute_threads, torch_dtype
from tandem.runtime.device_stream import HostStream
from tandem.runtime.executor import TorchExecutor
from tandem.runtime.fingerprint import model_fingerprint, weights_digest
from tandem.runtime.grammar_engine import LlguidanceMasks
from tandem.runtime.int8 import check_int8
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.kv_sizing import layout_of
from tandem.runtime.model_config import DecoderConfig, read_model_config
from tandem.runtime.model_loader_cuda import compose_executor, load_cuda, load_cuda_follower
from tandem.runtime.model_store import cache_root, resolve_model
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.models.compiled import CompiledModel, packed_weights, shape_of
from tandem.runtime.models.decoder import Decoder
from tandem.runtime.parallel.shard import require_divisible
from tandem.runtime.random_weights import is_random, open_weights
from tandem.runtime.ranks.follower import Follower
from tandem.runtime.ranks.leader import RankedCache, RankedModel
from tandem.runtime.ranks.rank_context import RankContext
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
    """A model ready to serve. `name` is what clients call it, or by an alias; `max_model_len` is in tokens."""

    name: str
    aliases: tuple[str, ...]
    directory: Path
    config: DecoderConfig
    executor: AnyExecutor
    grammars: LlguidanceMasks | None
    bundle: TokenizerBundle
    fingerprint: ModelFingerprint

    @property
    def max_model_len(self) -> int:
        return self.executor.max_model_len


def check_parallel(model: ModelConfig, engine: EngineConfig) -> None:
    """Fetch and convert as needed, and raise TandemError unless the model runs on `engine.tensor_parallel` ranks."""
    directory = resolve_model(model.id, cache_root(model.cache_dir))
    require_divisible(read_model_config(directory), engine.tensor_parallel)
    if model.quantization != "none":
        message = f"{model.quantization} weights have groups that ranks would cut: use no tensor_parallel with them"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="quantization")
    if engine.kernels == "compiled":
        message = "compiled kernels compute whole models: use no tensor_parallel with them"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="kernels")


def load_model(model: ModelConfig, engine: EngineConfig, place: RankContext | None = None) -> LoadedModel:
    """Fetch, convert and load as needed; on the first of several ranks, at its `place`. Raises TandemError that says
    what is wrong with the model or the settings."""
    model = with_device_defaults(Config(model=model)).model
    cache_dir = cache_root(model.cache_dir)
    directory = resolve_model(model.id, cache_dir)
    config = read_model_config(directory)
    bundle = read_bundle(directory, config)
    grammars = _grammars(bundle, config)
    executor = load_executor(directory, config, model, engine, grammars, place)
    name, *aliases = model.served_names
    digest = weights_digest(directory, cache_dir)
    return LoadedModel(
        name=name,
        aliases=tuple(aliases),
        directory=directory,
        config=config,
        executor=executor,
        grammars=grammars,
        bundle=bundle,
        fingerprint=model_fingerprint(digest, config, model, bundle, executor.layout, _arithmetic(model, engine)),
    )


def _arithmetic(model: ModelConfig, engine: EngineConfig) -> str:
    """All that the bits of a result depend on, where they depend on no batch."""
    if not model.batch_invariant:
        return ""
    if model.device == "cuda":
        return f"{cuda_arithmetic()}, {engine.tensor_parallel} ranks"
    return f"vectors of {native.vector_width()} floats"


def load_executor(
    directory: Path,
    config: DecoderConfig,
    model: ModelConfig,
    engine: EngineConfig,
    grammars: LlguidanceMasks | None = None,
    place: RankContext | None = None,
) -> AnyExecutor:
    """Weights, a KV pool of `engine.kv_cache_memory` bytes and `engine.host_cache_memory` beside it, of each rank if
    there are several. Raises TandemError."""
    settings = with_device_defaults(Config(model=model, engine=engine))
    model, engine = settings.model, settings.engine
    if model.device == "cuda":
        return load_cuda(directory, config, model, engine, grammars, place or RankContext())
    if place is not None:
        decoder, cache = _load_rank(directory, config, model, engine, place)
        return _compose(decoder, cache, engine, grammars)
    if model.quantization == "int8":
        check_int8(config, model.dtype)
    num_threads = num_compute_threads(engine.num_threads)
    reason = _why_reference(directory, config, model, engine)
    if reason is not None and model.batch_invariant:
        message = f"on a CPU only the compiled kernels are batch-invariant, which are not used: {reason}"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="batch_invariant")
    # Next to compiled kernels torch only draws tokens: threads of its own would take cores from theirs.
    torch.set_num_threads(1 if reason is None else num_threads)
    layout = layout_of(config, model, engine)
    num_blocks, num_host_slots = kv_sizing.num_blocks_of(layout, engine)
    if reason is None:
        compiled = _load_compiled(directory, config, model, num_threads)
        cache = KVCache(layout, num_blocks, native.block_digest, num_host_slots)
        _log.info("compiled kernels, vectors of %d floats, %d threads", native.vector_width(), num_threads)
        return TorchExecutor(compiled, cache, _longest(cache, config, engine), grammars)
    with open_weights(directory, torch_dtype(model.dtype)) as checkpoint:
        decoder = Decoder(config, checkpoint, model.quantization)
    _log.info("reference kernels in plain torch (%s), %d threads", reason, num_threads)
    return _compose(decoder, KVCache(layout, num_blocks, num_host_slots=num_host_slots), engine, grammars)


def load_follower(model: ModelConfig, engine: EngineConfig, place: RankContext) -> Follower:
    """A rank but the first, as `load_model` loads that. Raises TandemError."""
    settings = with_device_defaults(Config(model=model, engine=engine))
    model, engine = settings.model, settings.engine
    directory = resolve_model(model.id, cache_root(model.cache_dir))
    config = read_model_config(directory)
    if model.device == "cuda":
        return load_cuda_follower(directory, config, model, engine, place)
    return Follower(*_load_rank(directory, config, model, engine, place), place.communicator)


def _load_rank(
    directory: Path, config: DecoderConfig, model: ModelConfig, engine: EngineConfig, place: RankContext
) -> tuple[CausalModel, KVCache]:
    """The part of a rank. All ranks load side by side, and agree on the number of blocks."""
    shard, lead = place.shard, place.lead
    torch.set_num_threads(max(1, num_compute_threads(engine.num_threads) // shard.size))
    with open_weights(directory, torch_dtype(model.dtype)) as checkpoint:
        local = Decoder(config, checkpoint, shard=shard, communicator=place.communicator)
    layout, heads = layout_of(config, model, engine), shard.part(config.kv_heads)
    sizes = kv_sizing.num_blocks_of(layout.for_rank(heads), engine)
    num_blocks, num_host_slots = (place.communicator.least(size) for size in sizes)
    _log.info("rank %d of %d: KV heads [%d, %d)", shard.rank, shard.size, heads.start, heads.stop)
    if lead is None:
        return local, KVCache(layout, num_blocks, num_host_slots=num_host_slots, heads=heads)
    cache = RankedCache(lead, layout, num_blocks, num_host_slots=num_host_slots, heads=heads)
    return RankedModel(local, lead), cache


def _compose(model: CausalModel, cache: KVCache, engine: EngineConfig, grammars: LlguidanceMasks | None) -> AnyExecutor:
    """On the CPU."""
    if engine.plan_depth > 1:
        # As on a GPU, where the next step is planned while one runs: so it can be tried without one.
        return compose_executor(model, cache, REFERENCE, HostStream(), engine, grammars)
    return TorchExecutor(model, cache, _longest(cache, model.config, engine), grammars)


def _longest(cache: KVCache, config: DecoderConfig, engine: EngineConfig) -> int:
    return kv_sizing.max_model_len(engine.max_model_len, config.max_length, cache.num_blocks * engine.block_size)


def _grammars(bundle: TokenizerBundle, config: DecoderConfig) -> LlguidanceMasks | None:
    """A model whose tokenizer cannot be walked still serves all requests without a grammar."""
    try:
        return LlguidanceMasks(bundle, config.vocab_size)
    except TandemError as error:
        _log.warning("%s", error.message)
        return None


def _why_reference(directory: Path, config: DecoderConfig, model: ModelConfig, engine: EngineConfig) -> str | None:
    """Why the compiled kernels are not used; None when they are. Raises TandemError when they were asked for."""
    if engine.kernels == "reference":
        return "as configured"
    reason = unsupported(shape_of(config))
    if is_random(directory):
        reason = "weights are drawn, compiled kernels read theirs from files"
    if model.dtype != "float32":
        reason = f"compiled kernels compute in float32, the model is to run in {model.dtype}"
    if engine.kv_cache_dtype != "auto":
        reason = f"compiled kernels keep KV in float32, not in {engine.kv_cache_dtype}"
    if reason is None:
        try:
            native.load()
        except NativeUnavailable as problem:
            reason = str(problem)
    if reason is not None and engine.kernels == "compiled":
        raise TandemError(ErrorKind.UNSUPPORTED, f"no compiled kernels: {reason}", param="kernels")
    return reason


def _load_compiled(directory: Path, config: DecoderConfig, model: ModelConfig, num_threads: int) -> CompiledModel:
    cache_dir = cache_root(model.cache_dir)
    digest = weights_digest(directory, cache_dir)
    dtype = torch_dtype(model.dtype)
    packing = Packing.EXACT if model.compact else Packing.FLOAT
    if model.quantization == "int8":
        packing = Packing.INT8
    weights = packed_weights(lambda: Checkpoint(directory, dtype), config, packing, digest, cache_dir)
    _log.info("weights packed as %s: %d MiB", packing, sum(tensor.nbytes for tensor in weights.values()) >> 20)
    return CompiledModel(config, weights, packing, native.Team(num_threads))

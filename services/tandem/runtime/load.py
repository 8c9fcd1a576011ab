"""Composes a model from its id: directory, weights, KV pool, executor, tokenizer files; never runs a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.kv.layout import KVGroup, KVLayout, ModelFingerprint
from tandem.runtime.bundle import read_bundle
from tandem.runtime.cache import KVCache
from tandem.runtime.catalog import cache_root, locate
from tandem.runtime.device import require_cpu, set_threads, torch_dtype
from tandem.runtime.executor import TorchExecutor
from tandem.runtime.fingerprint import model_fingerprint, weights_digest
from tandem.runtime.model_config import DecoderConfig, read_model_config
from tandem.runtime.models.decoder import Decoder
from tandem.runtime.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve. `name` is what clients call it; `max_model_len` is in tokens."""

    name: str
    directory: Path
    config: DecoderConfig
    executor: TorchExecutor
    bundle: TokenizerBundle
    fingerprint: ModelFingerprint

    @property
    def max_model_len(self) -> int:
        return self.executor.max_model_len


def load_model(model: ModelConfig, engine: EngineConfig) -> LoadedModel:
    """Fetch, convert and load as needed. Raises TandemError that says what is wrong with the model or the settings."""
    require_cpu(model.device)
    set_threads(engine.num_threads)
    cache_dir = cache_root(model.cache_dir)
    directory = locate(model.id, cache_dir)
    config = read_model_config(directory)
    bundle = read_bundle(directory, config)
    executor = load_executor(directory, config, model.dtype, engine)
    return LoadedModel(
        name=model.served_name or Path(model.id).name.removesuffix(".gguf"),
        directory=directory,
        config=config,
        executor=executor,
        bundle=bundle,
        fingerprint=model_fingerprint(weights_digest(directory, cache_dir), config, bundle, executor.layout),
    )


def load_executor(directory: Path, config: DecoderConfig, dtype: str, engine: EngineConfig) -> TorchExecutor:
    """Weights and a KV pool of `engine.kv_cache_memory` bytes."""
    layout = KVLayout(engine.block_size, (KVGroup(config.layers, config.kv_heads, config.head_dim, dtype),))
    num_blocks = engine.kv_cache_memory // layout.block_bytes
    if num_blocks < 1:
        needed = f"one block of {layout} has {layout.block_bytes} bytes"
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{needed}, kv_cache_memory is less", param="kv_cache_memory")
    max_model_len = _max_model_len(engine.max_model_len, config.max_length, num_blocks * engine.block_size)
    with Checkpoint(directory, torch_dtype(dtype)) as checkpoint:
        decoder = Decoder(config, checkpoint)
    return TorchExecutor(decoder, KVCache(layout, num_blocks), max_model_len)


def _max_model_len(asked: int, num_positions: int, num_slots: int) -> int:
    """The longest request, in tokens. Where nothing is asked for, a small KV pool bounds it too: requests that say no
    `max_tokens` get all the room there is, and one that the pool cannot hold would be refused."""
    limits = {"the model's positions end at": num_positions, "kv_cache_memory holds": num_slots}
    for limit, num_tokens in limits.items():
        if asked > num_tokens:
            message = f"max_model_len={asked}: {limit} {num_tokens}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="max_model_len")
    return asked or min(limits.values())

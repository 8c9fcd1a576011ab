"""What a worker serves, as its parts: executor, KV memory, digests, tokenizer files; never runs any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import Config
from tandem.core.device_defaults import with_device_defaults
from tandem.core.grammar import Grammar
from tandem.engine.ports import Executor, Pipeline
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.device import num_compute_threads
from tandem.runtime.model_loader import LoadedModel, load_model
from tandem.transfer.digest_checks import Digest
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.prefault import prefault
from tandem.worker.model.rank_model import load_ranked_model
from tandem.worker.ranks.local_rank import launch_children
from tandem.worker.ranks.rank_group import Launch, RankGroup


def _ignore(grammar: Grammar) -> None:
    """Of a model that knows no grammars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """`pipeline` runs the executor's plans ahead; None: it computes at once. `pool` is the KV memory of the executor's
    first rank as transports see it, `digest` that of its blocks, called by the transfer thread while the executor runs.
    `fingerprint` is hexadecimal, `max_model_len` in tokens. `prepare` compiles a grammar ahead, on any thread, and
    never raises. `rank_group`: the other ranks, if there are any. `trial_digests`: of each of the pool's trial blocks,
    one number per KV head of the model."""

    name: str
    executor: Executor
    pool: MemoryPool
    digest: Digest
    fingerprint: str
    max_model_len: int
    bundle: TokenizerBundle
    aliases: tuple[str, ...] = ()
    pipeline: Pipeline | None = None
    prepare: Callable[[Grammar], None] = _ignore
    rank_group: RankGroup | None = None
    trial_digests: tuple[tuple[int, ...], ...] = ()


def load_worker_model(config: Config, launch: Launch | None = None) -> WorkerModel:
    """Fetch, convert and load as needed, which may take minutes; all memory is there after. Raises TandemError.

    Further ranks are what `launch` starts, children of this process if it is None.
    """
    config = with_device_defaults(config)
    loaded, rank_group = _load(config, launch or launch_children(config))
    executor = loaded.executor
    cache = executor.cache
    pool = MemoryPool.of(cache.region, cache.layout, keepalive=cache)
    prefault(pool, num_compute_threads(config.engine.num_threads))
    return WorkerModel(
        name=loaded.name,
        executor=executor,
        pipeline=executor if isinstance(executor, AsyncExecutor) else None,
        pool=pool,
        digest=cache.digest_here,
        fingerprint=loaded.fingerprint.digest,
        max_model_len=loaded.max_model_len,
        bundle=loaded.bundle,
        prepare=_ignore if loaded.grammars is None else loaded.grammars.prepare,
        aliases=loaded.aliases,
        rank_group=rank_group,
        trial_digests=tuple(cache.fill_trial_blocks()),
    )


def _load(config: Config, launch: Launch) -> tuple[LoadedModel, RankGroup | None]:
    if config.engine.tensor_parallel == 1:
        return load_model(config.model, config.engine), None
    return load_ranked_model(config, launch)

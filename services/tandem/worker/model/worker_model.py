"""Load what a worker serves: executor, KV memory, digest function and tokenizer files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import Config
from tandem.core.device_defaults import with_device_defaults
from tandem.core.grammar import Grammar
from tandem.engine.ports import Executor, HostBlocks, Pipeline
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.device import num_compute_threads
from tandem.runtime.model_loader import load_model
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.prefault import prefault
from tandem.transfer.transfer_engine import Digest
from tandem.worker.model.rank_model import load_ranked_model
from tandem.worker.ranks.local_rank import launch_children
from tandem.worker.ranks.rank_group import Launch, RankGroup

_log = logging.getLogger(__name__)


def _ignore(grammar: Grammar) -> None:
    """Accept a grammar without compiling it, for models without grammar support."""


def _has_nothing_to_prepare(grammar: Grammar) -> bool:
    return True


def _has_no_experts() -> Mapping[int, Sequence[int]]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """Hold the loaded model of a worker, with everything that the worker needs to run and describe it.

    `executor`: computes steps. `pipeline`: computes a step while the engine plans the next one; None where `executor`
    computes each step during the call. `pool`: KV memory of the first rank as transports see it. `digest`: computes
    digests of the pool's blocks, on the transfer thread while the executor runs. `fingerprint`: hexadecimal digest of
    model and KV format. `max_model_len`: most tokens of a sequence. `bundle`: tokenizer files. `name`, `aliases`: name
    of the model and its further names. `prepare`: compiles a grammar before its job starts, on any thread, without
    raising. `is_prepared`: returns whether a grammar is compiled. `rank_group`: the other ranks; None if there are
    none. `trial_digests`: for each of the pool's probe blocks (which link probes read), one digest per KV head of the
    model. `host`: access to the host memory that holds evicted blocks, by which the file cache reads and writes them;
    None without such memory. `expert_tokens`: returns by layer how many tokens each expert has computed, see
    `CausalModel.expert_tokens`.
    """

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
    is_prepared: Callable[[Grammar], bool] = _has_nothing_to_prepare
    rank_group: RankGroup | None = None
    trial_digests: tuple[tuple[int, ...], ...] = ()
    host: HostBlocks | None = None
    expert_tokens: Callable[[], Mapping[int, Sequence[int]]] = _has_no_experts


def load_worker_model(config: Config, launch: Launch | None = None) -> WorkerModel:
    """Load the model on all ranks, download and convert its files as needed, and allocate all memory. Blocks the
    calling thread, for minutes with a large model. Raises TandemError when the model or the settings cannot be used or
    a rank fails.

    `launch`: starts the process of each rank other than the first; None starts child processes.
    """
    config = with_device_defaults(config)
    _log.info("loading %s", config.model.id)
    rank_group: RankGroup | None = None
    if config.engine.tensor_parallel == 1:
        loaded = load_model(config.model, config.engine)
    else:
        loaded, rank_group = load_ranked_model(config, launch or launch_children(config))
    name, *aliases = config.model.served_names
    executor = loaded.executor
    cache = executor.cache
    pool = MemoryPool(cache.region, cache.layout, keepalive=cache)
    prefault(pool, num_compute_threads(config.engine.num_threads))
    return WorkerModel(
        name=name,
        executor=executor,
        pipeline=executor if isinstance(executor, AsyncExecutor) else None,
        pool=pool,
        digest=cache.digest_here,
        fingerprint=loaded.fingerprint.digest,
        max_model_len=executor.max_model_len,
        bundle=loaded.bundle,
        prepare=_ignore if loaded.grammars is None else loaded.grammars.prepare,
        is_prepared=_has_nothing_to_prepare if loaded.grammars is None else loaded.grammars.is_prepared,
        aliases=tuple(aliases),
        rank_group=rank_group,
        trial_digests=tuple(cache.fill_trial_blocks()),
        host=cache,
        expert_tokens=executor.model.expert_tokens,
    )

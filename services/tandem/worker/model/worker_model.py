"""Load what a worker serves: executor, KV memory, digest function and tokenizer files, on one rank or on several that
share the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import Config
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.ports import Executor, HostBlocks, Pipeline
from tandem.engine.rank_messages import RanksLost
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.device import num_compute_threads, rank_device
from tandem.runtime.grammar_engine import LlguidanceMasks
from tandem.runtime.model_loader import LoadedModel, check_parallel, files_digest, load_follower, load_model
from tandem.runtime.parallel.communicator import CollectiveFailed
from tandem.runtime.parallel.shard import Shard
from tandem.runtime.parallel.shared_store import SharedStore
from tandem.runtime.parallel.torch_group import LOOPBACK, TorchGroup
from tandem.runtime.ranks.follower import Follower
from tandem.runtime.ranks.rank_context import RankContext
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.prefault import FIRST_BYTES, prefault
from tandem.transfer.transfer_engine import Digest
from tandem.worker.addresses import own_host
from tandem.worker.ranks.local_rank import launch_children
from tandem.worker.ranks.rank_group import START_S, Launch, RankGroup
from tandem.worker.ranks.rank_listener import MEET_S, listen_on_network, listen_on_socket
from tandem.worker.ranks.shared_settings import shared_settings

JOIN_S = 30.0
"""Seconds in which all ranks must join the process group, once all are ready."""
LOAD_S = 3600.0
"""Seconds that the slowest rank may take to load its part of the weights after the fastest."""
REASON_S = 2.0
"""Seconds to wait for the error message of a rank that has just failed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """Hold the loaded model of a worker, with everything that the worker needs to run and describe it.

    `executor`: computes steps. `pipeline`: computes a step while the engine plans the next one; None where `executor`
    computes each step during the call. `pool`: KV memory of the first rank as transports see it. `digest`: computes
    digests of the pool's blocks, on the transfer thread while the executor runs. `fingerprint`: hexadecimal digest of
    model and KV format. `max_model_len`: most tokens of a sequence. `bundle`: tokenizer files. `name`, `aliases`: name
    of the model and its further names. `grammars`: compiles the grammars of jobs; None for a model without grammar
    support. `rank_group`: the other ranks; None if there are none. `trial_digests`: for each of the pool's probe blocks
    (which link probes read), one digest per KV head of the model. `host`: access to the host memory that holds evicted
    blocks, by which the file cache reads and writes them; None without such memory. `expert_tokens`: returns by layer
    how many tokens each expert has computed, see `CausalModel.expert_tokens`.
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
    grammars: LlguidanceMasks | None = None
    rank_group: RankGroup | None = None
    trial_digests: tuple[tuple[int, ...], ...] = ()
    host: HostBlocks | None = None
    expert_tokens: Callable[[], Mapping[int, Sequence[int]]]


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
        loaded, rank_group = _load_ranked_model(config, launch or launch_children(config))
    name, *aliases = config.model.served_names
    executor = loaded.executor
    cache = executor.cache
    pool = MemoryPool(cache.region, cache.layout, keepalive=cache)
    prefault(pool, num_compute_threads(config.engine.num_threads), FIRST_BYTES)
    return WorkerModel(
        name=name,
        executor=executor,
        pipeline=executor if isinstance(executor, AsyncExecutor) else None,
        pool=pool,
        digest=cache.digest_here,
        fingerprint=loaded.fingerprint.digest,
        max_model_len=executor.max_model_len,
        bundle=loaded.bundle,
        grammars=loaded.grammars,
        aliases=tuple(aliases),
        rank_group=rank_group,
        trial_digests=tuple(cache.fill_trial_blocks()),
        host=cache,
        expert_tokens=executor.model.expert_tokens,
    )


def _load_ranked_model(config: Config, launch: Launch) -> tuple[LoadedModel, RankGroup]:
    """Start the other ranks, and load the model on all ranks. Returns the first rank's part of the model, and the group
    of the other ranks, which the caller must close. `launch`: starts the process of one rank.

    Raises TandemError when a rank fails, after all ranks have ended.
    """
    check_parallel(config.model, config.engine)
    is_local = config.engine.nnodes == 1
    store = SharedStore()
    rank_group = RankGroup(
        listen_on_socket if is_local else partial(listen_on_network, config),
        config.engine.tensor_parallel,
        launch,
        config.worker.step_stall_s,
        on_entry=store.receive,
        settings=shared_settings(config),
        start_s=START_S if is_local else MEET_S,
    )
    store.publish = rank_group.publish
    try:
        loaded = _load_first(config, rank_group, store)
        rank_group.wait_loaded()
        if not is_local:
            rank_group.require_weights(files_digest(config.model))
    except (CollectiveFailed, RanksLost) as failure:
        reason = rank_group.reason(REASON_S)
        rank_group.close()
        raise reason or TandemError(ErrorKind.INTERNAL, f"the ranks did not form a group: {failure}") from failure
    except BaseException:
        rank_group.close()
        raise
    return loaded, rank_group


def load_rank_model(config: Config, store: SharedStore, rank: int) -> Follower:
    """Load the part of the model that this rank computes, allocate all of its memory, and return it as a Follower,
    which executes the first rank's commands. `store`: key-value store by which the ranks find each other. `rank`:
    number of this rank, from 1. Raises TandemError when the part cannot be loaded and CollectiveFailed when another
    rank has ended."""
    shard = Shard(rank, config.engine.tensor_parallel, config.engine.enable_expert_parallel)
    group = _join(config, store, shard)
    follower = load_follower(config.model, config.engine, RankContext(shard, group))
    cache = follower.cache
    pool = MemoryPool(cache.region, cache.layout, keepalive=cache)
    prefault(pool, num_compute_threads(config.engine.num_threads))
    cache.fill_trial_blocks()
    group.bound(config.worker.step_stall_s)
    return follower


def own_files_digest(config: Config, rank: int) -> str:
    """Return the digest of the model's files on this machine, which the first rank compares with its own. `rank`:
    number of this rank. Returns "" where this rank need not report the digest, which is so on a worker of one machine,
    and on all ranks but the first of each machine. Raises TandemError where a file is gone."""
    engine = config.engine
    return files_digest(config.model) if engine.nnodes > 1 and rank % engine.ranks_per_node == 0 else ""


def _load_first(config: Config, rank_group: RankGroup, store: SharedStore) -> LoadedModel:
    shard = Shard(0, config.engine.tensor_parallel, config.engine.enable_expert_parallel)
    group = _join(config, store, shard)
    loaded = load_model(config.model, config.engine, RankContext(shard, group, rank_group.send_command))
    group.bound(config.worker.step_stall_s)
    # A collective on a GPU or with another machine does not notice by itself that another rank has ended.
    rank_group.watch(lambda _reason: group.abort())
    return loaded


def _join(config: Config, store: SharedStore, shard: Shard) -> TorchGroup:
    """Join the process group of the ranks, with a timeout long enough for loading; the caller sets a shorter one after
    loading. A rank that ends is noticed at once, whatever the timeout."""
    engine = config.engine
    device = rank_device(config.model.device, shard.rank % engine.ranks_per_node)
    host = LOOPBACK if engine.nnodes == 1 else own_host(config.worker)
    group = TorchGroup(store, shard, device, JOIN_S, host)
    group.bound(LOAD_S)
    return group

"""Load one rank's part of a model that several ranks share: on the first rank, which also starts the others, or on
another rank."""

from __future__ import annotations

from functools import partial

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.rank_messages import RanksLost
from tandem.runtime.device import num_compute_threads, rank_device
from tandem.runtime.model_loader import LoadedModel, check_parallel, files_digest, load_follower, load_model
from tandem.runtime.parallel.communicator import CollectiveFailed
from tandem.runtime.parallel.shard import Shard
from tandem.runtime.parallel.shared_store import SharedStore
from tandem.runtime.parallel.torch_group import LOOPBACK, TorchGroup
from tandem.runtime.ranks.follower import Follower
from tandem.runtime.ranks.rank_context import RankContext
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.prefault import prefault
from tandem.worker.addresses import own_host
from tandem.worker.ranks.rank_group import START_S, Launch, RankGroup
from tandem.worker.ranks.rank_listener import MEET_S, listen_on_network, listen_on_socket
from tandem.worker.ranks.shared_settings import shared_settings

JOIN_S = 30.0
"""Seconds in which all ranks must join the process group, once all are ready."""
LOAD_S = 3600.0
"""Seconds that the slowest rank may take to load its part of the weights after the fastest."""
REASON_S = 2.0
"""Seconds to wait for the error message of a rank that has just failed."""


def load_ranked_model(config: Config, launch: Launch) -> tuple[LoadedModel, RankGroup]:
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

"""Load a model over several ranks: the part of the first rank together with its rank group, or the part of another
rank."""

from __future__ import annotations

from pathlib import Path

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.rank_messages import RanksLost
from tandem.runtime.device import num_compute_threads, rank_device
from tandem.runtime.model_loader import LoadedModel, check_parallel, load_follower, load_model
from tandem.runtime.parallel.communicator import CollectiveFailed
from tandem.runtime.parallel.shard import Shard
from tandem.runtime.parallel.torch_group import TorchGroup, join_group
from tandem.runtime.ranks.follower import Follower
from tandem.runtime.ranks.rank_context import RankContext
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.prefault import prefault
from tandem.worker.ranks.rank_channel import private_directory
from tandem.worker.ranks.rank_group import Launch, RankGroup

JOIN_S = 30.0
"""Seconds in which all ranks must join the process group, once each has reported that it is about to."""
LOAD_S = 3600.0
"""Seconds that the slowest rank may take to load its part of the weights after the fastest."""
REASON_S = 2.0
"""Seconds to wait for the error message of a rank that has just failed."""


def load_ranked_model(config: Config, launch: Launch) -> tuple[LoadedModel, RankGroup]:
    """Start the other ranks with `launch` and load the model on all ranks; return the first rank's part and the group
    of the other ranks, which the caller must close.

    Raises TandemError when a rank fails, after all ranks have ended.
    """
    check_parallel(config.model, config.engine)
    size = config.engine.tensor_parallel
    rank_group = RankGroup(private_directory(), size, launch, config.worker.step_stall_s)
    try:
        loaded = _load_first(config, rank_group)
        rank_group.wait_loaded()
    except (CollectiveFailed, RanksLost) as failure:
        reason = rank_group.reason(REASON_S)
        rank_group.close()
        raise reason or TandemError(ErrorKind.INTERNAL, f"the ranks did not form a group: {failure}") from failure
    except BaseException:
        rank_group.close()
        raise
    return loaded, rank_group


def load_rank_model(config: Config, directory: Path, rank: int) -> Follower:
    """Load the model part of `rank`, one other than the first, with all of its memory allocated; `directory` is that of
    the ranks' sockets. Raises TandemError when it cannot be loaded and CollectiveFailed when another rank has ended."""
    shard = Shard(rank, config.engine.tensor_parallel)
    group = _join(config, directory, shard)
    follower = load_follower(config.model, config.engine, RankContext(shard, group))
    cache = follower.cache
    pool = MemoryPool(cache.region, cache.layout, keepalive=cache)
    prefault(pool, num_compute_threads(config.engine.num_threads))
    cache.fill_trial_blocks()
    group.bound(config.worker.step_stall_s)
    return follower


def _load_first(config: Config, rank_group: RankGroup) -> LoadedModel:
    shard = Shard(0, config.engine.tensor_parallel)
    group = _join(config, rank_group.directory, shard)
    loaded = load_model(config.model, config.engine, RankContext(shard, group, rank_group.send_command))
    group.bound(config.worker.step_stall_s)
    # A collective on a GPU does not notice by itself that another rank has ended.
    rank_group.watch(lambda _reason: group.abort())
    return loaded


def _join(config: Config, directory: Path, shard: Shard) -> TorchGroup:
    """Join the process group of the ranks with a timeout long enough for loading. The caller sets a shorter one after
    loading; a rank that ends is noticed at once either way."""
    group = join_group(directory, shard, rank_device(config.model.device, shard.rank), JOIN_S)
    group.bound(LOAD_S)
    return group

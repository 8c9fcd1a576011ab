"""Loads a model over several ranks: the first one's part with its rank group, or another one's; never starts a
process."""

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
"""For ranks that have all said that they are about to meet."""
LOAD_S = 3600.0
"""For the slowest rank to read its part of the weights, after the fastest."""
WORD_S = 2.0
"""For the word of a rank that has just failed to come."""


def load_ranked_model(config: Config, launch: Launch) -> tuple[LoadedModel, RankGroup]:
    """As `load_model`, with the other ranks that `launch` starts, all of them loaded. Raises TandemError, with nothing
    left behind."""
    check_parallel(config.model, config.engine)
    size = config.engine.tensor_parallel
    rank_group = RankGroup(private_directory(), size, launch, config.worker.step_stall_s)
    try:
        loaded = _load_first(config, rank_group)
        rank_group.wait_loaded()
    except (CollectiveFailed, RanksLost) as failure:
        told = rank_group.reason(WORD_S)
        rank_group.close()
        raise told or TandemError(ErrorKind.INTERNAL, f"the ranks do not come together: {failure}") from failure
    except BaseException:
        rank_group.close()
        raise
    return loaded, rank_group


def load_rank_model(config: Config, directory: Path, rank: int) -> Follower:
    """The part of a rank but the first, all of its memory there. Raises TandemError and CollectiveFailed."""
    shard = Shard(rank, config.engine.tensor_parallel)
    group = _join(config, directory, shard)
    follower = load_follower(config.model, config.engine, RankContext(shard, group))
    cache = follower.cache
    pool = MemoryPool.of(cache.region, cache.layout, keepalive=cache)
    prefault(pool, num_compute_threads(config.engine.num_threads))
    cache.fill_trial_blocks()
    group.bound(config.worker.step_stall_s)
    return follower


def _load_first(config: Config, rank_group: RankGroup) -> LoadedModel:
    shard = Shard(0, config.engine.tensor_parallel)
    group = _join(config, rank_group.directory, shard)
    loaded = load_model(config.model, config.engine, RankContext(shard, group, rank_group.send_command))
    group.bound(config.worker.step_stall_s)
    # A collective on a GPU does not notice by itself that a rank is gone.
    rank_group.watch(lambda _reason: group.abort())
    return loaded


def _join(config: Config, directory: Path, shard: Shard) -> TorchGroup:
    """Until it is bound again an exchange waits as long as another rank may load; of one that ends it is told at
    once."""
    group = join_group(directory, shard, rank_device(config.model.device, shard.rank), JOIN_S)
    group.bound(LOAD_S)
    return group

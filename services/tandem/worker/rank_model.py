"""Loads a model over several ranks: the first one's part with its crew, or another one's; never starts a process."""

from __future__ import annotations

from pathlib import Path

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.ranks import RanksLost
from tandem.runtime.device import num_compute_threads, rank_device
from tandem.runtime.load import LoadedModel, check_parallel, load_follower, load_model
from tandem.runtime.parallel.communicator import CollectiveFailed
from tandem.runtime.parallel.follower import Follower
from tandem.runtime.parallel.group import TorchGroup, join_group
from tandem.runtime.parallel.place import Place
from tandem.runtime.parallel.shard import Shard
from tandem.transfer.pages import populate
from tandem.transfer.pool import MemoryPool
from tandem.worker.crew import Crew, Launch
from tandem.worker.rank_line import private_directory

JOIN_S = 30.0
"""For ranks that have all said that they are about to meet."""
LOAD_S = 3600.0
"""For the slowest rank to read its part of the weights, after the fastest."""
WORD_S = 2.0
"""For the word of a rank that has just failed to come."""


def load_ranked_model(config: Config, launch: Launch) -> tuple[LoadedModel, Crew]:
    """As `load_model`, with the other ranks that `launch` starts, all of them loaded. Raises TandemError, with nothing
    left behind."""
    check_parallel(config.model, config.engine)
    size = config.engine.tensor_parallel
    crew = Crew(private_directory(), size, launch, config.worker.step_stall_s)
    try:
        loaded = _load_first(config, crew)
        crew.wait_loaded()
    except (CollectiveFailed, RanksLost) as failure:
        told = crew.reason(WORD_S)
        crew.close()
        raise told or TandemError(ErrorKind.INTERNAL, f"the ranks do not come together: {failure}") from failure
    except BaseException:
        crew.close()
        raise
    return loaded, crew


def load_rank_model(config: Config, directory: Path, rank: int) -> Follower:
    """The part of a rank but the first, all of its memory there. Raises TandemError and CollectiveFailed."""
    shard = Shard(rank, config.engine.tensor_parallel)
    group = _join(config, directory, shard)
    follower = load_follower(config.model, config.engine, Place(shard, group))
    cache = follower.cache
    pool = MemoryPool.of(cache.region, cache.layout, keepalive=cache)
    populate(pool, num_compute_threads(config.engine.num_threads))
    cache.fill_trial_blocks()
    group.bound(config.worker.step_stall_s)
    return follower


def _load_first(config: Config, crew: Crew) -> LoadedModel:
    shard = Shard(0, config.engine.tensor_parallel)
    group = _join(config, crew.directory, shard)
    loaded = load_model(config.model, config.engine, Place(shard, group, crew.tell))
    group.bound(config.worker.step_stall_s)
    # A collective on a GPU does not notice by itself that a rank is gone.
    crew.watch(lambda _reason: group.abort())
    return loaded


def _join(config: Config, directory: Path, shard: Shard) -> TorchGroup:
    """Until it is bound again an exchange waits as long as another rank may load; of one that ends it is told at
    once."""
    group = join_group(directory, shard, rank_device(config.model.device, shard.rank), JOIN_S)
    group.bound(LOAD_S)
    return group

"""Run the ranks of one model as threads of this process, over gloo."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from tandem.core.config import EngineConfig, ModelConfig
from tandem.engine.rank_messages import RankCommand
from tandem.runtime.executor import TorchExecutor
from tandem.runtime.model_config import read_model_config
from tandem.runtime.model_loader import load_executor, load_follower
from tandem.runtime.parallel.shard import Shard
from tandem.runtime.parallel.shared_store import SharedStore
from tandem.runtime.parallel.torch_group import TorchGroup
from tandem.runtime.ranks.follower import Follower
from tandem.runtime.ranks.rank_context import RankContext

TIMEOUT_S = 60.0

Wrap = Callable[[Callable[[RankCommand], None]], Callable[[RankCommand], None]]


def linked_stores(size: int) -> list[SharedStore]:
    """Stores that share their entries."""
    stores = [SharedStore() for _ in range(size)]

    def publish(own: SharedStore, key: str, value: bytes) -> None:
        for store in stores:
            if store is not own:
                store.receive(key, value)

    for store in stores:
        store.publish = partial(publish, store)
    return stores


@contextmanager
def ranked_executor(
    directory: Path,
    model: ModelConfig,
    engine: EngineConfig,
    wrap: Wrap = lambda carry_out: carry_out,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[TorchExecutor]:
    """An executor on `engine.tensor_parallel` ranks. `wrap` is put around what the followers do with a command."""
    size = engine.tensor_parallel
    inboxes: list[queue.SimpleQueue[RankCommand | None]] = [queue.SimpleQueue() for _ in range(size - 1)]
    failures: list[BaseException] = []
    stores = linked_stores(size)

    def join(rank: int) -> TorchGroup:
        return TorchGroup(
            stores[rank], Shard(rank, size, engine.enable_expert_parallel), torch.device("cpu"), timeout_s
        )

    def follow(rank: int) -> None:
        try:
            place = RankContext(Shard(rank, size, engine.enable_expert_parallel), join(rank))
            follower: Follower = load_follower(model, engine, place)
            carry_out = wrap(follower.carry_out)
            while (command := inboxes[rank - 1].get()) is not None:
                carry_out(command)
        except BaseException as failure:
            failures.append(failure)

    def send_command(command: RankCommand) -> None:
        for inbox in inboxes:
            inbox.put(command)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    try:
        place = RankContext(Shard(0, size, engine.enable_expert_parallel), join(0), send_command)
        yield load_executor(directory, read_model_config(directory), model, engine, rank_context=place)
    finally:
        for inbox in inboxes:
            inbox.put(None)
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    assert not failures, failures

"""Implement `Communicator` with torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

Process groups are created without torch's process-wide default group, so that one process can have several. Ranks
rendezvous through a file in a directory that only their user can enter, and connect over the loopback interface,
because neither library authenticates its peers. Only numbers are exchanged, nothing is unpickled.

The NCCL path is untested: it needs as many GPUs as ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tandem.runtime.parallel.communicator import CollectiveFailed, Communicator
from tandem.runtime.parallel.shard import Shard

RENDEZVOUS = "rendezvous"
"""Name of the rendezvous file."""
_LOOPBACK = "lo"


class TorchGroup(Communicator):
    """`Communicator` over a torch.distributed process group: gloo on a CPU, NCCL on GPUs.

    On a CPU each collective blocks until it is done. On a GPU only `least` blocks: the other collectives run behind the
    current stream's earlier work and before its later work."""

    def __init__(self, store: Store, shard: Shard, device: torch.device, timeout_s: float) -> None:
        """Join the group and wait for the other ranks. Raises CollectiveFailed when they do not join in time.

        `timeout_s` is also the longest that a collective waits for a rank."""
        self.rank = shard.rank
        self.size = shard.size
        self._device = device
        make = _nccl if device.type == "cuda" else _gloo
        self._group = _guarded(lambda: make(store, shard, timeout_s))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._wait(lambda: self._group.allreduce([x]))
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait(lambda: self._group.broadcast([x], options))
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        x = x.contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._wait(lambda: self._group.gather([] if parts is None else [parts], [x], options))
        return parts

    def least(self, number: int) -> int:
        x = torch.tensor([number], dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._wait(lambda: self._group.allreduce([x], options))
        return int(x)

    def bound(self, timeout_s: float) -> None:
        """Set how many seconds a later collective waits at most for a rank before it fails."""
        self._group.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._group.abort()

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Start a collective and wait for it; on CUDA the current stream waits, not the caller."""
        _guarded(lambda: begin().wait())

    def __repr__(self) -> str:
        return f"TorchGroup(rank {self.rank} of {self.size}, {self._device})"


def join_group(directory: Path, shard: Shard, device: torch.device, timeout_s: float) -> TorchGroup:
    """Join the process group whose ranks find each other through a file in `directory`, and wait for all of them.

    `directory` must be used for one group only. `timeout_s`: longest wait for a rank, here and in each later
    collective. Raises CollectiveFailed when a rank does not join in time."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _LOOPBACK)
    store = dist.FileStore(str(directory / RENDEZVOUS), shard.size)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    return TorchGroup(store, shard, device, timeout_s)


def _gloo(store: Store, shard: Shard, timeout_s: float) -> Any:
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, timedelta(seconds=timeout_s))


def _nccl(store: Store, shard: Shard, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)


def _guarded(call: Callable[[], Any]) -> Any:
    """Call a function and convert RuntimeError, which torch raises for every failure, into CollectiveFailed."""
    try:
        return call()
    except RuntimeError as error:
        raise CollectiveFailed(f"{type(error).__name__}: {error}".splitlines()[0]) from error

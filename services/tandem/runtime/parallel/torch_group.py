"""A communicator over torch.distributed, gloo for CPU tensors and NCCL for CUDA's; never starts a rank.

Groups are objects here, without the library's process-wide default one, so that several fit into one process. They
find each other through a file in a directory that only their user can enter, and speak over the loopback interface:
neither library knows who talks to it, so nobody else may reach them. Only numbers are exchanged, nothing is unpickled.

The NCCL part has not run: it needs as many GPUs as ranks.
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

from tandem.runtime.parallel.communicator import CollectiveFailed
from tandem.runtime.parallel.shard import Shard

RENDEZVOUS = "rendezvous"
"""The file's name."""
_LOOPBACK = "lo"


class TorchGroup:
    """A `Communicator`. On CUDA nothing but `least` waits for the device; an exchange is ordered behind the current
    stream's work, and that which follows behind it."""

    def __init__(self, store: Store, shard: Shard, device: torch.device, timeout_s: float) -> None:
        """Waits for the others. Raises CollectiveFailed when they do not come in time; `timeout_s` is also the longest
        that an exchange waits for a rank."""
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
        """From now on an exchange waits no longer for a rank than this."""
        self._group.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._group.abort()

    def _wait(self, begin: Callable[[], Any]) -> None:
        """On CUDA this lets the current stream wait, not the caller."""
        _guarded(lambda: begin().wait())

    def __repr__(self) -> str:
        return f"TorchGroup(rank {self.rank} of {self.size}, {self._device})"


def join_group(directory: Path, shard: Shard, device: torch.device, timeout_s: float) -> TorchGroup:
    """The group whose ranks meet in `directory`, once per directory. Raises CollectiveFailed."""
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
    """torch raises RuntimeError and its children for whatever goes wrong."""
    try:
        return call()
    except RuntimeError as error:
        raise CollectiveFailed(f"{type(error).__name__}: {error}".splitlines()[0]) from error

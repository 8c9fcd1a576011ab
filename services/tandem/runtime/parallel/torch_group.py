"""Implement `Communicator` with torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

Process groups are created without torch's process-wide default group, so that one process can have several. Ranks
exchange their addresses through a store that the caller passes. Neither gloo nor NCCL authenticates or encrypts its
connections. Only numbers are exchanged, nothing is unpickled.

The NCCL path is untested: it needs as many GPUs as ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tandem.runtime.parallel.communicator import CollectiveFailed, Communicator
from tandem.runtime.parallel.shard import Shard

LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux, see netdevice(7)."""


class TorchGroup(Communicator):
    """`Communicator` over a torch.distributed process group: gloo on a CPU, NCCL on GPUs.

    On a CPU each collective blocks until it is done. On a GPU only `least` blocks. The other collectives are queued:
    they run after the work that the current CUDA stream has already, and before its later work."""

    def __init__(
        self, store: Store, shard: Shard, device: torch.device, timeout_s: float, host: str = LOOPBACK
    ) -> None:
        """Join the group and wait for the other ranks. Raises CollectiveFailed when they do not join in time.

        `store`: store that all ranks of this group share and no other group uses. `timeout_s`: seconds that joining,
        and later each collective, waits for the other ranks. `host`: address of this machine at which the other ranks
        reach this one."""
        self.rank = shard.rank
        self.size = shard.size
        self._device = device
        self._store = store  # its methods are called from C++, which does not keep the Python object alive
        self._store.set_timeout(timedelta(seconds=timeout_s))
        before = _open_sockets()
        make = _nccl if device.type == "cuda" else _gloo
        self._group = _guarded(lambda: make(store, shard, timeout_s, host))
        self._sockets = _open_sockets().keys() - before.keys()

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
        """Set for how many seconds each later collective waits for the other ranks before it fails."""
        self._store.set_timeout(timedelta(seconds=timeout_s))  # NCCL connects at the first collective
        self._group.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._group.abort()
        # gloo has no abort, but what waits for a connection fails when it ends. The end of its listener would end the
        # process: a listener has no peer, which raises OSError here.
        for name, number in _open_sockets().items():
            if name in self._sockets:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Start a collective and wait for it; on CUDA the current stream waits, not the caller."""
        _guarded(lambda: begin().wait())

    def __repr__(self) -> str:
        return f"TorchGroup(rank {self.rank} of {self.size}, {self._device})"


def _gloo(store: Store, shard: Shard, timeout_s: float, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, options)


def _nccl(store: Store, shard: Shard, timeout_s: float, host: str) -> Any:
    """Join a group of NCCL, which finds its own address by the name of a network interface in the environment.

    That is the interface with the address `host`, unless the user has set a name. If no interface has the address, NCCL
    chooses one."""
    interface = interface_of(host)
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)


def interface_of(host: str) -> str | None:
    """Return the name of the network interface of this machine that has the IPv4 address of `host`; None if none
    has."""
    try:
        address = socket.inet_aton(socket.gethostbyname(host))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()))
                if found[20:24] == address:
                    return name
    return None


def _open_sockets() -> dict[str, int]:
    """Return the file descriptors of this process's sockets, by a name that no later socket has."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(entry)
            if name.startswith("socket:"):
                found[name] = int(entry.name)
    return found


def _guarded(call: Callable[[], Any]) -> Any:
    """Call a function and convert RuntimeError, which torch raises for every failure, into CollectiveFailed."""
    try:
        return call()
    except RuntimeError as error:
        raise CollectiveFailed(f"{type(error).__name__}: {error}".splitlines()[0]) from error

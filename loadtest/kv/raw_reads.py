"""Read KV blocks with bare library or kernel calls, as the baseline of pulls; the content is not checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tandem.core.clock import SystemClock
from tandem.engine.transfer_messages import TransportPeer
from tandem.transfer.interface import BlockCopy
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.nixl_agent import open_agent
from tandem.transfer.nixl_transport import memory_type, split_metadata
from tandem.transfer.process_memory import MAX_SPANS, CopySpan, ProcessMemory

Bare = Callable[[Sequence[BlockCopy]], float]
"""Function from block copies to the seconds that they took."""


def bare_local(pool: MemoryPool, peer: TransportPeer, pid: int) -> Bare:
    """Return a reader that uses process_vm_readv, with one call for every 1,024 series of adjacent blocks."""
    memory, clock = ProcessMemory(), SystemClock()
    region = peer.ranks[0].region

    def read(copies: Sequence[BlockCopy]) -> float:
        size = pool.region.block_bytes
        runs = _runs(copies)
        spans = [
            CopySpan(
                region.address + c[0].remote * size,
                pool.region.address + c[0].local * size,
                len(c) * size,
            )
            for c in runs
        ]
        began = clock.now()
        for start in range(0, len(spans), MAX_SPANS):
            memory.read(pid, spans[start : start + MAX_SPANS])
        return clock.now() - began

    return read


def _runs(copies: Sequence[BlockCopy]) -> list[list[BlockCopy]]:
    """Group copies that are neighbours on both sides."""
    runs: list[list[BlockCopy]] = []
    for copy in sorted(copies, key=lambda copy: copy.remote):
        last = runs[-1][-1] if runs else None
        if last is not None and (last.remote + 1, last.local + 1) == (copy.remote, copy.local):
            runs[-1].append(copy)
        else:
            runs.append([copy])
    return runs


def bare_nixl(pool: MemoryPool, peer: TransportPeer) -> Bare:
    """Return a reader that makes one NIXL READ by an agent of its own.

    The read is prepared before the clock starts and polled continuously.
    """
    clock = SystemClock()
    api: Any = open_agent("bare-consumer.1").api
    memory, number = memory_type(pool.region.device)
    api.register_memory([(pool.region.address, pool.num_bytes, number, "")], memory)
    (rank,) = peer.ranks
    name, region = api.add_remote_agent(split_metadata(rank.metadata)[1]), rank.region

    def blocks(agent: str, address: int, num: int) -> Any:
        strided = np.array([(address, pool.region.block_bytes, number, pool.region.block_bytes, num)], dtype=np.uint64)
        return api.prep_xfer_dlist(agent, strided, memory)

    mine = blocks("NIXL_INIT_AGENT", pool.region.address, pool.region.num_blocks)
    theirs = blocks(name.decode() if isinstance(name, bytes) else name, region.address, region.num_blocks)

    def read(copies: Sequence[BlockCopy]) -> float:
        ours, yours = ([getattr(c, side) for run in _runs(copies) for c in run] for side in ("local", "remote"))
        handle = api.make_prepped_xfer("READ", mine, ours, theirs, yours)
        began = clock.now()
        state = api.transfer(handle)
        while state == "PROC":
            state = api.check_xfer_state(handle)
        seconds = clock.now() - began
        if state != "DONE":
            raise RuntimeError(f"the bare read ended as {state}")
        handle.release()
        return seconds

    return read

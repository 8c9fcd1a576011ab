"""Compare bare reads over the TCP transport with reads over NIXL's TCP, between two processes of this machine.

    python -m loadtest.kv.tcp_reads [--mib 16,64,256] [--rounds 9] [--connections 1,2,4]

Each round reads the same blocks once over each, into a pool that is not in the caches; digests are left out. The
process that is read polls without a pause for NIXL, whose reads advance only then, and does nothing for the TCP
transport.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from tandem.core.clock import SystemClock
from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.transfer.interface import BlockCopy, ReadState, Transport
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.tcp_transport import TcpTransport

MIB = 1 << 20
LAYOUT = KVLayout(16, (KVGroup(30, 3, 64, "float32"),))
"""That of SmolLM2: blocks of 720 KiB."""
COLD_BYTES = 64 * MIB
POLL_S = 0.0002
SOURCE = WorkerRef(WorkerId("source"), Incarnation(1), "127.0.0.1:1")


class Offered(NamedTuple):
    """Describe the process that is read, for the one that connects to it."""

    tcp: TransportPeer
    nixl: TransportPeer


def serve(num_blocks: int, pipe: Connection) -> None:
    """Run the process that is read, until `pipe` ends. A message True begins, and False ends, polling of NIXL."""
    pool, _content = _open_pool(num_blocks)
    tcp, nixl = TcpTransport(pool, "tcp.1"), NixlTransport(pool, "nixl.1")
    pipe.send(Offered(tcp.describe(SOURCE), nixl.describe(SOURCE)))
    is_polling = False
    try:
        while True:
            if not is_polling or pipe.poll(0):
                is_polling = pipe.recv()
                pipe.send(is_polling)
            nixl.progress()
    except EOFError:
        return


def _open_pool(num_blocks: int) -> tuple[MemoryPool, object]:
    content = np.random.default_rng(0).integers(0, 256, (num_blocks, LAYOUT.block_bytes), np.uint8)
    region = KVRegion(content.ctypes.data, num_blocks, LAYOUT.block_bytes, 0, LAYOUT.group.heads)
    return MemoryPool(region, LAYOUT, keepalive=content), content


def _seconds(transport: Transport, peer: TransportPeer, num_blocks: int, pause_s: float) -> float:
    """Return the seconds of a read of the first blocks; the transport is polled every `pause_s` seconds."""
    copies = [BlockCopy(BlockId(block), BlockId(block)) for block in range(num_blocks)]
    clock, pause = SystemClock(), threading.Event()
    began = clock.now()
    read = transport.post_read(peer, copies)
    while (state := read.poll()) is ReadState.PENDING:
        if pause_s:
            pause.wait(pause_s)
    if state is not ReadState.DONE:
        raise RuntimeError("the read failed")
    return clock.now() - began


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.kv.tcp_reads", description="Reads over TCP against NIXL over TCP.")
    parser.add_argument("--mib", default="16,64,256", metavar="N,N,...", help="to read (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of each size (default: %(default)s)")
    parser.add_argument("--connections", default="1,2,4", metavar="N,N,...", help="of the TCP transport")
    args = parser.parse_args(argv)
    sizes = [max(1, int(part) * MIB // LAYOUT.block_bytes) for part in args.mib.split(",")]
    os.environ["UCX_TLS"] = "tcp"
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    with ExitStack() as stack:
        source = context.Process(target=serve, args=(max(sizes), theirs), daemon=True)
        source.start()
        theirs.close()
        stack.callback(source.join)
        stack.callback(ours.close)
        offered: Offered = ours.recv()
        pool, _content = _open_pool(max(sizes))
        numbers = [int(part) for part in args.connections.split(",")]
        readers = {f"tcp, {n} connections": TcpTransport(pool, f"tcp.{n}.1", num_connections=n) for n in numbers}
        nixl = NixlTransport(pool, "reader.1")
        nixl.connect(offered.nixl)
        for reader in readers.values():
            stack.callback(reader.close)
            reader.connect(offered.tcp)
        cold = np.zeros(COLD_BYTES, np.uint8)
        sys.stdout.write("| MiB | transport | ms | GB/s | of NIXL's TCP |\n|---:|---|---:|---:|---:|\n")
        for num_blocks in sizes:
            seconds: dict[str, list[float]] = {}
            for _ in range(args.rounds + 1):
                for name, reader in readers.items():
                    cold += 1
                    seconds.setdefault(name, []).append(_seconds(reader, offered.tcp, num_blocks, POLL_S))
                for is_polling in (True, False):
                    ours.send(is_polling)
                    ours.recv()
                    if is_polling:
                        cold += 1
                        seconds.setdefault("NIXL, UCX over TCP", []).append(
                            _seconds(nixl, offered.nixl, num_blocks, 0.0)
                        )
            _write_rows(num_blocks * LAYOUT.block_bytes, seconds)
    return 0


def _write_rows(num_bytes: int, seconds: dict[str, list[float]]) -> None:
    """Write medians, without the first round, which meets cold connections."""
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    for name, median in medians.items():
        times = medians["NIXL, UCX over TCP"] / median
        sys.stdout.write(
            f"| {num_bytes / MIB:.0f} | {name} | {median * 1e3:.1f} | {num_bytes / median / 1e9:.2f} | {times:.2f}x |\n"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

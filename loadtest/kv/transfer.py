"""Measure pulls of KV between two processes against a bare read of the same blocks, without a model.

    python -m loadtest.kv.transfer [--wires shm,ucx_tcp,tcp,local] [--mib 1,16,64,256] [--ranks 1] [--json FILE]

A *pull* is all that a worker does from an announcement to `Pulled`: engine, orders, reads, digests, publishing, over
its own threads. A *bare read* copies the same blocks to the same places in one call that was prepared before the clock
started, and is polled without a pause by a consumer, and over TCP by a producer, that do nothing else: over NIXL one
READ of the same descriptors, over the local transport one process_vm_readv. The bare read beside our own TCP is NIXL's
over TCP. Pull and bare read alternate; medians are compared. With several ranks the producer's heads lie in as many
pools, each with an agent of its own, and a pull reads a part of each block from each; the bare read still copies whole
blocks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadtest.kv.consumer_harness import GUARD_S, ConsumerHarness
from loadtest.kv.raw_reads import Bare, bare_local, bare_nixl
from tandem.core.clock import SystemClock
from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import SetPolling, TransportPeer
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVGroup, KVLayout
from tandem.transfer.interface import Transport
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.peer_layout import join_ranks
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.tcp_transport import TcpTransport
from tandem.transfer.transfer_thread import TransferThread
from tandem.worker.main import prepare_process

if TYPE_CHECKING:
    from tandem.runtime.kv_cache import KVCache

MIB = 1 << 20
WIRES = ("shm", "ucx_tcp", "tcp", "local")
"""NIXL as it chooses on one host, NIXL over TCP, and our own transports: over TCP, and within a host."""
OVER_TCP = ("ucx_tcp", "tcp")
LAYOUTS = {
    "SmolLM2": KVLayout(16, (KVGroup(30, 3, 64, "float32"),)),
    "small": KVLayout(16, (KVGroup(8, 2, 32, "float32"),)),
    "Llama-8B": KVLayout(16, (KVGroup(32, 8, 128, "float16"),)),
}
WORD = np.uint64(0x9E3779B97F4A7C15)
"""An odd number, so that no two words of the offered KV are equal."""
COLD_BYTES = 64 * MIB
"""Written before each read: more than the caches hold, so that neither kind finds what the other one left."""
NUM_CONTACTS = 200
"""Number of small reads before the first measured one: a connection finds its fastest path only while both ends poll.
"""
PRODUCER = WorkerRef(WorkerId("producer"), Incarnation(1), "127.0.0.1:1")


@dataclass(frozen=True, slots=True)
class TransferCase:
    """One measured combination: a pair of processes with their transport, block layout and number of ranks.

    `aged`: blocks are in the order of pools that have served before, last ones first. `ranks`: ranks of the producer.
    """

    wire: str
    layout: str
    ranks: int
    sizes: tuple[int, ...]
    rounds: int
    aged: bool

    @property
    def num_blocks(self) -> int:
        return max(self.sizes) // LAYOUTS[self.layout].block_bytes + 1


@dataclass(frozen=True, slots=True)
class TransferRow:
    """Results for one payload size: medians in seconds.

    `busy_s`: part of a pull in which a read was in flight, digests included. `ratio`: time of the bare read divided by
    that of the pull. `best_ratio`: the same ratio of their shortest times, because on shared cores either may run on
    the slower core for a while.
    """

    wire: str
    layout: str
    ranks: int
    num_blocks: int
    num_bytes: int
    bare_s: float
    pull_s: float
    busy_s: float
    ratio: float
    best_ratio: float


# ---- both processes


def _open_cache(case: TransferCase, rank: int = 0, num_ranks: int = 1) -> tuple[KVCache, MemoryPool]:
    """Return a rank's cache and pool, with every page touched."""
    from tandem.runtime.kv_cache import KVCache
    from tandem_kernels import reference
    from tandem_kernels.native import library
    from tandem_kernels.native.build import NativeUnavailable

    digest = library.block_digest
    try:
        library.load()
    except NativeUnavailable as reason:
        sys.stderr.write(f"digests by the reference, {reason}\n")
        digest = reference.block_digest
    whole = LAYOUTS[case.layout]
    share = whole.group.heads // num_ranks
    cache = KVCache(whole, case.num_blocks + 1, digest, heads=range(rank * share, (rank + 1) * share))
    cache.pool.fill_(1.0)
    return cache, MemoryPool(cache.region, whole, keepalive=cache)


def _open_transport(case: TransferCase, pool: MemoryPool, agent: str) -> Transport:
    if case.wire == "tcp":
        return TcpTransport(pool, agent)
    return _open_bare(case, pool, agent)


def _open_bare(case: TransferCase, pool: MemoryPool, agent: str) -> Transport:
    return ProcessVmTransport(pool, agent) if case.wire == "local" else NixlTransport(pool, agent)


@dataclass(frozen=True, slots=True)
class TransferOffer:
    """What the producer process sends to the consumer process: transports for pulls and bare reads, and its blocks in
    prompt order."""

    peer: TransportPeer
    bare: TransportPeer
    pid: int
    blocks: tuple[BlockDigest, ...]


# ---- the producer's process


def give(case: TransferCase, pipe: Connection) -> None:
    """Run the producer process: offer random KV and serve reads.

    A message `True` starts, and `False` stops, polling of bare reads without a pause.
    """
    prepare_process()
    cache, pool = _open_cache(case)
    np.multiply(
        np.arange(cache.pool.nbytes // 8, dtype=np.uint64), WORD, out=cache.pool.view(-1).numpy().view(np.uint64)
    )
    ids = range(case.num_blocks)
    blocks = [BlockId(i) for i in (reversed(ids) if case.aged else ids)]
    digests = cache.digest(blocks, range(len(blocks)))
    bare = _open_bare(case, pool, "bare.1")
    parts = [_give_rank(case, cache, pool, rank) for rank in range(case.ranks)]
    offered = tuple(BlockDigest(block, heads) for block, heads in zip(blocks, digests, strict=True))
    pipe.send(TransferOffer(join_ranks([part for part, _ in parts]), bare.describe(PRODUCER), os.getpid(), offered))
    try:
        while _poll_until_stopped(bare, pipe, is_bare=pipe.recv()):
            pass
    except EOFError:
        for _, transfer in parts:
            transfer.stop(GUARD_S)


def _give_rank(
    case: TransferCase, whole: KVCache, whole_pool: MemoryPool, rank: int
) -> tuple[TransportPeer, TransferThread]:
    """Return one rank's peer and the thread that polls for its readers. One of several has a copy of its heads."""
    cache, pool = whole, whole_pool
    if case.ranks > 1:
        cache, pool = _open_cache(case, rank, case.ranks)
        cache.pool.copy_(whole.pool[:, pool.heads.start : pool.heads.stop])
    transport = _open_transport(case, pool, f"producer.1.{rank}")
    transfer = TransferThread(transport, cache.digest, lambda event: None, SystemClock())
    transfer.start()
    transfer.send(SetPolling(True))
    return transport.describe(PRODUCER), transfer


def _poll_until_stopped(bare: Transport, pipe: Connection, *, is_bare: bool) -> bool:
    pipe.send(is_bare)
    while is_bare and not pipe.poll(0):
        for _ in range(100):
            bare.progress()
    return True


# ---- the consumer's process


def take(case: TransferCase, pipe: Connection, producer: Connection) -> None:
    """Run the consumer process: measure against a running producer, and send the rows through `pipe`."""
    prepare_process()
    offer: TransferOffer = producer.recv()
    cache, pool = _open_cache(case)
    consumer = ConsumerHarness(cache, _open_transport(case, pool, "consumer.1"))
    is_local = case.wire == "local"
    bare = bare_local(pool, offer.bare, offer.pid) if is_local else bare_nixl(pool, offer.bare)
    consumer.start(offer.peer)
    consumer.pull(offer.blocks[:1])
    with _polling(producer):
        for _ in range(NUM_CONTACTS):
            bare(consumer.copies)
    try:
        pipe.send([_measure(case, size, consumer, bare, offer, producer) for size in case.sizes])
    finally:
        consumer.stop()


def _measure(
    case: TransferCase, size: int, consumer: ConsumerHarness, bare: Bare, offer: TransferOffer, producer: Connection
) -> TransferRow:
    block_bytes = LAYOUTS[case.layout].block_bytes
    offered = offer.blocks[: max(1, round(size / block_bytes))]
    pulls: list[tuple[float, float, float]] = []
    cold = np.zeros(COLD_BYTES, np.uint8)
    for _ in range(case.rounds + 1):
        cold += 1
        seconds, pulled = consumer.pull(offered)
        if pulled.num_blocks != len(offered):
            raise RuntimeError(f"{pulled.num_blocks} blocks were read instead of {len(offered)}")
        cold += 1
        # Shared memory needs the producer only for the first contacts; later its polling would take a core.
        with _polling(producer) if case.wire in OVER_TCP else nullcontext():
            pulls.append((seconds, pulled.busy_s, bare(consumer.copies)))
    # The first round meets cold paths on both sides.
    pull_s, busy_s, bare_s = (statistics.median(column) for column in zip(*pulls[1:], strict=True))
    ratio = statistics.median(alone / whole for whole, _, alone in pulls[1:])
    shortest_pull, _, shortest_bare = (min(column) for column in zip(*pulls[1:], strict=True))
    num_bytes, best_ratio = len(offered) * block_bytes, shortest_bare / shortest_pull
    return TransferRow(
        case.wire, case.layout, case.ranks, len(offered), num_bytes, bare_s, pull_s, busy_s, ratio, best_ratio
    )


@contextmanager
def _polling(producer: Connection) -> Iterator[None]:
    """Make the producer poll bare reads without a pause inside the context."""
    producer.send(True)
    producer.recv()
    yield
    producer.send(False)
    producer.recv()


# ---- the program


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    rows: list[TransferRow] = []
    sizes = tuple(int(float(part) * MIB) for part in args.mib.split(","))
    for wire, layout, ranks in product(args.wires.split(","), args.layouts.split(","), args.ranks.split(",")):
        heads = LAYOUTS[layout].group.heads
        if heads % int(ranks):
            raise SystemExit(f"loadtest.kv.transfer: {ranks} ranks cannot share the {heads} heads of {layout}")
        sys.stderr.write(f"{wire}, {ranks} ranks, blocks of {LAYOUTS[layout].block_bytes >> 10} KiB ...\n")
        rows += _run(TransferCase(wire, layout, int(ranks), sizes, args.rounds, args.order == "aged"))
    sys.stdout.write(_table(rows) + "\n")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode([asdict(row) for row in rows])))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest.kv.transfer", description="Measure pulls of KV against bare reads.")
    parser.add_argument("--wires", default=",".join(WIRES), help=f"of {', '.join(WIRES)} (default: %(default)s)")
    parser.add_argument("--layouts", default="SmolLM2,small", help=f"of {', '.join(LAYOUTS)} (default: %(default)s)")
    parser.add_argument("--ranks", default="1", metavar="N,N,...", help="of the producer, which share its heads")
    parser.add_argument("--mib", default="1,16,64,256", metavar="N,N,...", help="to move (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of each size (default: %(default)s)")
    parser.add_argument("--order", choices=("aged", "fresh"), default="aged", help="of the producer's blocks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians there too")
    return parser


def _run(case: TransferCase) -> list[TransferRow]:
    """Run a case in two fresh processes, because UCX reads its settings once."""
    if case.wire in OVER_TCP:
        os.environ["UCX_TLS"] = "tcp"
    else:
        os.environ.pop("UCX_TLS", None)
    context = get_context("spawn")
    producer_end, consumer_end = context.Pipe()
    result, sender = context.Pipe(duplex=False)
    with ExitStack() as stack:
        for target, *pipes in ((give, producer_end), (take, sender, consumer_end)):
            process = context.Process(target=target, args=(case, *pipes), daemon=True)
            process.start()
            stack.callback(process.join)
            for pipe in pipes:
                pipe.close()
        try:
            rows: list[TransferRow] = result.recv()
        except EOFError:
            raise SystemExit("loadtest.kv.transfer: a process failed, see above") from None
        return rows


def _table(rows: Sequence[TransferRow]) -> str:
    """Return the rows as a Markdown table."""
    heads = (
        "wire",
        "ranks",
        "block",
        "blocks",
        "MiB",
        "bare read",
        "GB/s",
        "pull",
        "GB/s",
        "of it reading",
        "bare / pull",
        "of the best",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---:|" * len(heads)]
    for row in rows:
        cells = (
            row.wire,
            f"{row.ranks}",
            f"{LAYOUTS[row.layout].block_bytes >> 10} KiB",
            f"{row.num_blocks}",
            f"{row.num_bytes / MIB:.1f}",
            f"{row.bare_s * 1e3:.2f} ms",
            f"{row.num_bytes / row.bare_s / 1e9:.2f}",
            f"{row.pull_s * 1e3:.2f} ms",
            f"{row.num_bytes / row.pull_s / 1e9:.2f}",
            f"{row.busy_s * 1e3:.2f} ms",
            f"{row.ratio:.0%}",
            f"{row.best_ratio:.0%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

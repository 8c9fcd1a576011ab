"""Measure NIXL reads between two processes on one device, compared with plain copies of the same blocks in a loop.

    python -m loadtest gpu-transfer [--kib 64,2048,8192] [--mib 64,256,1024] [--mps] [--busy] [--json FILE]

No model and no engine runs. The loop copies block by block with the driver's own asynchronous copy over a handle
between processes, and waits once. Blocks are in random order on both sides. The KV of 8,192 tokens of an 8B model in
bf16 has 1,024 MiB, that of 2,048 tokens 256, a chunk of 512 tokens 64, and a block of 16, 64 or 128 tokens 2,048, 8,192
or 16,384 KiB. The time of the last chunk is what a hand-off adds where the rest is read while the prompt is computed;
the time of the whole is the most that it can add. `--busy` lets the producer compute without a pause, as a worker that
goes on with other prompts does. `--device cpu` does the same in the host's memory, with process_vm_readv in the loop.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from loadtest.common.tables import table
from loadtest.kv.device_memory import DeviceMemory, open_memory
from loadtest.processes.mps import MpsUnavailable, multi_process_service
from tandem.core.clock import SystemClock
from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.transfer.interface import BlockCopy, ReadState
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.process_memory import CopySpan

KIB, MIB = 1 << 10, 1 << 20
PRODUCER = WorkerRef(WorkerId("producer"), Incarnation(1), "127.0.0.1:1")
_BLOCK_TOKENS, _HEAD_DIM = 16, 128
_LAYER_KIB = 2 * _BLOCK_TOKENS * _HEAD_DIM * 2 // KIB
"""KiB of one layer and head, keys and values in bf16."""
_POLL_S = 0.0005
"""Poll interval of a worker while a read is open, in seconds."""
_GUARD_S = 120.0
_CONTACTS = 50
"""Number of small reads before the first measured one: a connection finds its fastest path only while both ends poll.
"""
_SEED = 5


class Broken(Exception):
    """Raised when wrong data arrived or a read failed."""


@dataclass(frozen=True, slots=True)
class GpuTransferCase:
    """Describe one pair of processes to measure, with the shape of their pools. `sizes`: payloads in bytes."""

    device: str
    block_kib: int
    sizes: tuple[int, ...]
    rounds: int
    is_busy: bool

    @property
    def layout(self) -> KVLayout:
        return KVLayout(_BLOCK_TOKENS, (KVGroup(self.block_kib // _LAYER_KIB, 1, _HEAD_DIM, "bfloat16"),))

    @property
    def num_blocks(self) -> int:
        return max(self.blocks_of(size) for size in self.sizes)

    def blocks_of(self, size: int) -> int:
        return max(1, size // (self.block_kib * KIB))


@dataclass(frozen=True, slots=True)
class GpuOffer:
    """Carry what the consumer process needs of the producer: its transport, and its memory for plain copies."""

    peer: TransportPeer
    shared: bytes


@dataclass(frozen=True, slots=True)
class GpuTransferRow:
    """Read times of one payload size: medians and least times in seconds."""

    block_kib: int
    num_blocks: int
    num_bytes: int
    nixl_s: float
    loop_s: float
    best_nixl_s: float
    best_loop_s: float
    is_busy: bool
    is_mps: bool

    @property
    def ratio(self) -> float:
        """Return the bandwidth of NIXL's read as a share of the copy loop's."""
        return self.loop_s / self.nixl_s


def address_of(pool: MemoryPool, block: int) -> int:
    return pool.region.address + block * pool.region.block_bytes


def content_of(block: int, num_bytes: int) -> bytes:
    """Return the content of the producer's block number `block`; no two words of one block are equal, and no two
    blocks."""
    words = np.arange(block << 32, (block << 32) + num_bytes // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15)).tobytes()


# ---- the producer's process


def give(case: GpuTransferCase, pipe: Connection) -> None:
    """Run the producer process: offer a pool of known content and serve reads until the other end sends a message."""
    memory = open_memory(case.device)
    pool = _open_pool(case, memory)
    for block in range(case.num_blocks):
        memory.write(address_of(pool, block), content_of(block, pool.region.block_bytes))
    transport = NixlTransport(pool, "producer.1")
    with _computing(case.device) if case.is_busy else nullcontext():
        pipe.send(GpuOffer(transport.describe(PRODUCER), memory.share(pool.region.address)))
        while not pipe.poll(_POLL_S):
            transport.progress()


@contextmanager
def _computing(device: str) -> Iterator[None]:
    """Run matrix products without a pause on a thread of their own."""
    ended = threading.Event()
    thread = threading.Thread(target=_multiply, args=(device, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_GUARD_S)


def _multiply(device: str, ended: threading.Event) -> None:
    import torch

    size = 256 if device == "cpu" else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    while not ended.is_set():
        left @ right
        if device != "cpu":
            torch.cuda.synchronize()


def _open_pool(case: GpuTransferCase, memory: DeviceMemory) -> MemoryPool:
    num_bytes = case.num_blocks * case.block_kib * KIB
    address, layout = memory.allocate(num_bytes), case.layout
    region = KVRegion(address, case.num_blocks, layout.block_bytes, 0, layout.group.heads, memory.device)
    return MemoryPool(region, layout)


# ---- the consumer's process


class Consumer:
    """Read the producer's blocks with NIXL and with the copy loop, and check them."""

    def __init__(self, case: GpuTransferCase, offer: GpuOffer) -> None:
        self._memory = open_memory(case.device)
        self._pool = _open_pool(case, self._memory)
        self._transport = NixlTransport(self._pool, "consumer.1")
        self._peer = offer.peer
        self._transport.connect(offer.peer)
        self._remote = self._memory.open(offer.shared)
        self._clock = SystemClock()

    def nixl(self, copies: Sequence[BlockCopy]) -> float:
        """Read blocks with NIXL; return the seconds from the call to its completion. Raises Broken."""
        began = self._clock.now()
        read = self._transport.post_read(self._peer, copies)
        while (state := read.poll()) is ReadState.PENDING:
            if self._clock.now() - began > _GUARD_S:
                raise Broken(f"a read of {len(copies)} blocks does not end")
        if state is not ReadState.DONE:
            raise Broken(f"a read of {len(copies)} blocks failed")
        return self._clock.now() - began

    def loop(self, copies: Sequence[BlockCopy]) -> float:
        """Read blocks with plain copies; return the seconds."""
        size = self._pool.region.block_bytes
        spans = [CopySpan(self._remote + c.remote * size, address_of(self._pool, c.local), size) for c in copies]
        began = self._clock.now()
        self._memory.copy(spans)
        return self._clock.now() - began

    def spoil(self, copies: Sequence[BlockCopy]) -> None:
        """Overwrite the target blocks, so that a later check sees only data that arrived afterwards."""
        for copy in copies:
            self._memory.write(address_of(self._pool, copy.local), bytes(self._pool.region.block_bytes))

    def check(self, copies: Sequence[BlockCopy]) -> None:
        """Check the content of the target blocks. Raises Broken."""
        size = self._pool.region.block_bytes
        for copy in copies:
            if self._memory.read(address_of(self._pool, copy.local), size) != content_of(copy.remote, size):
                raise Broken(f"block {copy.remote} has not arrived")


def take(case: GpuTransferCase, result: Connection, producer: Connection) -> None:
    """Run the consumer process: measure against a running producer, and send rows, or the error as text, through
    `result`."""
    try:
        consumer = Consumer(case, producer.recv())
        one = copies_of(case, 1)
        for _ in range(_CONTACTS):
            consumer.nixl(one)
        result.send([measure(case, size, consumer) for size in case.sizes])
    except Exception:
        result.send(traceback.format_exc())
    finally:
        producer.send("done")


def copies_of(case: GpuTransferCase, count: int) -> list[BlockCopy]:
    """Return `count` block copies, in random order on both sides."""
    source = random.Random(_SEED)
    theirs, ours = (source.sample(range(case.num_blocks), count) for _ in range(2))
    return [BlockCopy(BlockId(a), BlockId(b)) for a, b in zip(theirs, ours, strict=True)]


def measure(case: GpuTransferCase, size: int, consumer: Consumer) -> GpuTransferRow:
    """Measure both methods in turn for one payload size, and return the times.

    The data is checked once for each method, before the rounds that count. Raises Broken.
    """
    copies = copies_of(case, case.blocks_of(size))
    sampled = copies[:: max(1, len(copies) // 3)]
    for read in (consumer.nixl, consumer.loop):
        consumer.spoil(sampled)
        read(copies)
        consumer.check(sampled)
    seconds = [(consumer.nixl(copies), consumer.loop(copies)) for _ in range(case.rounds)]
    nixl, loop = zip(*seconds, strict=True)
    return GpuTransferRow(
        block_kib=case.block_kib,
        num_blocks=len(copies),
        num_bytes=len(copies) * case.block_kib * KIB,
        nixl_s=statistics.median(nixl),
        loop_s=statistics.median(loop),
        best_nixl_s=min(nixl),
        best_loop_s=min(loop),
        is_busy=case.is_busy,
        is_mps=False,
    )


# ---- the program


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.mps and args.device == "cpu":
        parser.error("--mps is of GPUs")
    if any(kib % _LAYER_KIB or kib < _LAYER_KIB for kib in args.kib):
        parser.error(f"--kib: blocks have multiples of {_LAYER_KIB} KiB")
    sizes = tuple(int(mib * MIB) for mib in args.mib)
    rows: list[GpuTransferRow] = []
    try:
        with multi_process_service() if args.mps else nullcontext():
            for kib in args.kib:
                for row in run(GpuTransferCase(args.device, kib, sizes, args.rounds, args.busy)):
                    rows.append(GpuTransferRow(**asdict(row) | {"is_mps": args.mps}))
    except (MpsUnavailable, Broken) as error:
        sys.stderr.write(f"loadtest gpu-transfer: {error}\n")
        return 1
    if args.json:
        outcome = [asdict(row) | {"ratio": row.ratio, "device": args.device} for row in rows]
        args.json.write_text(json.dumps(outcome, indent=1), encoding="utf-8")
    sys.stdout.write(markdown(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest gpu-transfer", description="Measure reads between two processes.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kib", type=_integers, default=[64, 2048, 8192, 16384], help="of a block")
    parser.add_argument("--mib", type=_numbers, default=[8.0, 64.0, 256.0, 1024.0], help="of a read")
    parser.add_argument("--rounds", type=int, default=20, help="of each size (default: %(default)s)")
    parser.add_argument("--busy", action="store_true", help="the producer computes meanwhile")
    parser.add_argument("--mps", action="store_true", help="under a multi-process service of its own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def run(case: GpuTransferCase) -> list[GpuTransferRow]:
    """Run a case in two new processes and return its rows. Raises Broken when one of them fails."""
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
            outcome: list[GpuTransferRow] | str = result.recv()
        except EOFError:
            raise Broken("a process ended without a word, see above") from None
    if isinstance(outcome, str):
        raise Broken(f"the consumer failed:\n{outcome}")
    return outcome


def markdown(rows: Sequence[GpuTransferRow]) -> str:
    heads = ("block", "blocks", "MiB", "NIXL ms", "GB/s", "loop ms", "GB/s", "NIXL of the loop", "producer", "MPS")
    cells = [
        (
            f"{row.block_kib} KiB",
            f"{row.num_blocks}",
            f"{row.num_bytes / MIB:,.0f}",
            f"{row.nixl_s * 1e3:.3f}",
            f"{row.num_bytes / row.nixl_s / 1e9:,.1f}",
            f"{row.loop_s * 1e3:.3f}",
            f"{row.num_bytes / row.loop_s / 1e9:,.1f}",
            f"{row.ratio:.0%}",
            "computes" if row.is_busy else "idle",
            "yes" if row.is_mps else "no",
        )
        for row in rows
    ]
    return table(heads, cells)


if __name__ == "__main__":
    sys.exit(main())

"""Simulate block files in one directory that all workers mount."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

from tandem.core.ids import BlockHash, WorkerRef
from tandem.engine.effects import Effect, ReadFiles, WriteFiles
from tandem.engine.engine import Engine
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.kernel.event_queue import SimEventQueue

BATCH_BLOCKS = 32
"""Blocks of a read that arrive together, as in `worker.kv.file_cache`."""
SCAN_S = 30.0
"""Seconds until the other workers notice a file, as in `worker.kv.file_cache`."""


class SimFiles:
    """Carry out the workers' reads and writes of block files, and notify workers of new and deleted files.

    The reads of a worker are carried out one after the other, as are its writes, each at the `file_bandwidth` of its
    spec. When all files together exceed `engine.file_cache_size`, the least recently used are deleted.

    `workers`: the workers that are notified of each other's files; the caller changes this mapping while the simulation
    runs.
    """

    def __init__(self, agenda: SimEventQueue, workers: Mapping[WorkerRef, SimWorker]) -> None:
        self._agenda = agenda
        self._workers = workers
        self._held: OrderedDict[BlockHash, None] = OrderedDict()
        self._reads_free_at: dict[WorkerRef, float] = {}
        self._writes_free_at: dict[WorkerRef, float] = {}
        self._added: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def add(self, worker: SimWorker) -> None:
        """Report the files that exist already to the engine of a new worker."""
        if self._held:
            worker.engine.files_changed(self._held, ())

    def carry_out(self, worker: SimWorker, effect: ReadFiles | WriteFiles) -> None:
        if isinstance(effect, ReadFiles):
            self._read(worker, effect, 0)
            return
        at = self._transfer(self._writes_free_at, worker, len(effect.writes))
        self._agenda.at(at, "", partial(self._written, worker, effect), by=worker.party)

    def _transfer(self, free_at: dict[WorkerRef, float], worker: SimWorker, num_blocks: int) -> float:
        """Return when the blocks have been transferred, behind all earlier ones of the worker."""
        seconds = num_blocks * worker.spec.layout.block_bytes / worker.spec.file_bandwidth
        free_at[worker.ref] = max(self._agenda.now, free_at.get(worker.ref, 0.0)) + seconds
        return free_at[worker.ref]

    def _read(self, worker: SimWorker, order: ReadFiles, first: int) -> None:
        """Schedule the arrival of the batch of blocks that begins at `first`, and then of the batches after it."""
        batch, began = order.hashes[first : first + BATCH_BLOCKS], self._agenda.now
        at = self._transfer(self._reads_free_at, worker, len(batch))

        def arrive() -> None:
            num = next((i for i, block_hash in enumerate(batch) if block_hash not in self._held), len(batch))
            is_over = num < len(batch) or first + num == len(order.hashes)
            seconds = self._agenda.now - began
            worker.post(lambda engine, now: engine.files_read(order.read, num, seconds, now, is_over=is_over))
            if not is_over:
                self._read(worker, order, first + num)
                return
            for block_hash in reversed((*order.before, *order.hashes[: first + num])):
                if block_hash in self._held:
                    self._held.move_to_end(block_hash)

        self._agenda.at(at, "", arrive, by=worker.party)

    def _written(self, worker: SimWorker, order: WriteFiles) -> None:
        for _, block_hash in order.writes:
            self._held[block_hash] = None
            self._held.move_to_end(block_hash)
            self._removed.pop(block_hash, None)
            self._added[block_hash] = None
        most_files = worker.spec.config.engine.file_cache_size // worker.spec.layout.block_bytes
        while len(self._held) > most_files:
            block_hash, _ = self._held.popitem(last=False)
            self._added.pop(block_hash, None)
            self._removed[block_hash] = None

        def report(engine: Engine, now: float) -> Sequence[Effect]:
            return [
                effect
                for slot, block_hash in order.writes
                for effect in engine.file_written(slot, block_hash, now, is_done=True)
            ]

        worker.post(report)
        # With each write, because the writer may end before.
        self._agenda.after(SCAN_S, "", self._announce, by=worker.party)

    def _announce(self) -> None:
        """Let all workers know what has changed."""
        added, removed = tuple(self._added), tuple(self._removed)
        self._added.clear()
        self._removed.clear()
        if not added and not removed:
            return

        def changed(engine: Engine, _now: float) -> Sequence[Effect]:
            engine.files_changed(added, removed)
            return ()

        for worker in self._workers.values():
            if not worker.party.is_gone:
                worker.post(changed)

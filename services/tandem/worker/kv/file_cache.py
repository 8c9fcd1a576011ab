"""Carry out the engine's reads and writes of block files on threads of their own, and scan the directory of the files
from time to time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from tandem.core.clock import Clock
from tandem.core.ids import BlockHash, HostSlot
from tandem.engine.effects import Effect, ReadFiles, WriteFiles
from tandem.engine.engine import Engine
from tandem.engine.ports import HostBlocks
from tandem.worker.engine.driver import Command
from tandem.worker.kv.block_files import BlockFiles, FileChanges

BATCH_BLOCKS = 32
"""Blocks that are read, checked and reported together. A job that stops waiting for its files uses the batches that
were reported."""
NUM_READERS = 4
"""Blocks read at the same time, for disks and file systems that answer late."""
SCAN_S = 30.0
"""Least seconds between two scans of the directory, in which other workers may write and delete files too."""
SCAN_SHARE = 0.02
"""Largest share of the writing thread's time that scans may take; where they take long, they become rarer."""

_log = logging.getLogger(__name__)


_Digests = tuple[int, ...]


class FileCache:
    """Read and write the block files of one worker on threads of its own. One thread takes the engine's read orders and
    has `NUM_READERS` further threads read the single blocks; another thread writes files and scans the directory.

    `files`: the directory of block files. `host`: the host memory that blocks are read into and written from. `post`:
    queues a command for the engine, by which results are reported. `submit` may be called on any thread and does not
    block. All threads are daemons: a file system that does not answer does not keep the process from ending.
    """

    def __init__(self, files: BlockFiles, host: HostBlocks, post: Callable[[Command], None], clock: Clock) -> None:
        self._files = files
        self._host = host
        self._post = post
        self._clock = clock
        self._reads: queue.SimpleQueue[ReadFiles | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[WriteFiles | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[tuple[int, BlockHash, HostSlot] | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[int, _Digests | None]] = queue.SimpleQueue()
        self._has_stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._read_all, name="tandem-file-reads", daemon=True),
            threading.Thread(target=self._write_all, name="tandem-file-writes", daemon=True),
            *(
                threading.Thread(target=self._read_blocks, name=f"tandem-file-reader-{i}", daemon=True)
                for i in range(NUM_READERS)
            ),
        ]
        self._has_complained = False

    def __repr__(self) -> str:
        return f"FileCache({self._files!r})"

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, effect: ReadFiles | WriteFiles) -> None:
        if isinstance(effect, ReadFiles):
            self._reads.put(effect)
        else:
            self._writes.put(effect)

    def stop(self, timeout_s: float) -> bool:
        """End each thread after the block that it is reading or writing, and wait up to `timeout_s` seconds for each.
        Returns False when one of them has not ended by then, as on a file system that does not answer."""
        self._has_stopped.set()
        self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    # ---- reads

    def _read_all(self) -> None:
        try:
            while (order := self._reads.get()) is not None:
                self._read_order(order)
        finally:
            # Only here no block of a batch can be queued after it.
            for _ in range(NUM_READERS):
                self._to_read.put(None)

    def _read_order(self, order: ReadFiles) -> None:
        num_read = 0
        try:
            for batch in _batches(order):
                began = self._clock.now()
                num_good = 0 if self._has_stopped.is_set() else self._read_batch(batch)
                num_read += num_good
                self._report_read(order.read, num_good, self._clock.now() - began)
                if num_good < len(batch):
                    break
        except Exception:
            _log.exception("a read of %s failed", self._files.directory)
        self._report_read(order.read, 0, 0.0, is_over=True)
        if not self._has_stopped.is_set():
            # Nobody waits for this.
            self._files.touch([*order.before, *order.hashes[:num_read]])
            self._changed(self._files.forget_missing(order.hashes[num_read:]))

    def _read_batch(self, batch: Sequence[tuple[BlockHash, HostSlot]]) -> int:
        """Read the blocks of a batch into their host slots. Return how many of them, counted from the first up to the
        first failure, have arrived and match their digests."""
        for index, (block_hash, slot) in enumerate(batch):
            self._to_read.put((index, block_hash, slot))
        # All have ended before any slot is given back.
        results = dict(self._found.get() for _ in batch)
        expected = [*takewhile(lambda digests: digests is not None, (results[index] for index in range(len(batch))))]
        actual = self._host.digest_host([slot for _, slot in batch[: len(expected)]]) if expected else []
        for index, digests in enumerate(actual):
            if digests != expected[index]:
                _log.warning("a file in %s has changed since it was written, and is deleted", self._files.directory)
                self._changed(self._files.discard(batch[index][0]))
                return index
        if len(actual) < len(batch):
            self._changed(self._files.forget([batch[len(actual)][0]]))
        return len(actual)

    def _report_read(self, read: int, num_blocks: int, seconds: float, *, is_over: bool = False) -> None:
        self._post(lambda engine, now: engine.files_read(read, num_blocks, seconds, now, is_over=is_over))

    def _read_blocks(self) -> None:
        while (block := self._to_read.get()) is not None:
            index, block_hash, slot = block
            digests: _Digests | None = None
            try:
                digests = self._files.read(block_hash, self._host.host_view(slot))
            except OSError as error:
                self._complain("read a block from", error)
            except Exception:
                _log.exception("a block of %s could not be read", self._files.directory)
            self._found.put((index, digests))

    # ---- writes

    def _write_all(self) -> None:
        next_scan = self._scan()
        while not self._has_stopped.is_set():
            if self._clock.now() >= next_scan:
                next_scan = self._scan()
            try:
                order = self._writes.get(timeout=max(0.0, next_scan - self._clock.now()))
            except queue.Empty:
                continue
            has_failed = False
            for slot, block_hash in order.writes if order is not None else ():
                has_failed = has_failed or self._has_stopped.is_set() or not self._write(slot, block_hash)
                self._report_write(slot, block_hash, is_done=not has_failed)

    def _report_write(self, slot: HostSlot, block_hash: BlockHash, *, is_done: bool) -> None:
        self._post(lambda engine, now: engine.file_written(slot, block_hash, now, is_done=is_done))

    def _write(self, slot: HostSlot, block_hash: BlockHash) -> bool:
        try:
            (digests,) = self._host.digest_host([slot])
            self._changed(self._files.write(block_hash, self._host.host_view(slot), digests))
        except OSError as error:
            self._complain("write a block to", error)
            return False
        except Exception:
            _log.exception("a block could not be written to %s", self._files.directory)
            return False
        self._has_complained = False
        return True

    def _scan(self) -> float:
        """Scan the directory, report what has changed to the engine, and return the time of the next scan."""
        began = self._clock.now()
        try:
            self._changed(self._files.scan())
        except OSError as error:
            self._complain("list", error)
        now = self._clock.now()
        return now + max(SCAN_S, (now - began) / SCAN_SHARE)

    def _complain(self, what: str, error: OSError) -> None:
        """Log a warning for an error, unless another error was logged since the last successful write."""
        if not self._has_complained:
            self._has_complained = True
            _log.warning("cannot %s %s, and goes on without: %s", what, self._files.directory, error)

    def _changed(self, changes: FileChanges) -> None:
        if changes.added or changes.removed:
            self._post(_report_changes(changes))


def _batches(order: ReadFiles) -> Iterator[list[tuple[BlockHash, HostSlot]]]:
    blocks = list(zip(order.hashes, order.slots, strict=True))
    return (blocks[first : first + BATCH_BLOCKS] for first in range(0, len(blocks), BATCH_BLOCKS))


def _report_changes(changes: FileChanges) -> Command:
    def report(engine: Engine, _now: float) -> list[Effect]:
        engine.files_changed(changes.added, changes.removed)
        return []

    return report

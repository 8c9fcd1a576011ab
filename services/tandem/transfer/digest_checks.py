"""Compute the digests of received parts, on the transfer thread or on its helper thread.

Every method but `help` is called on the transfer thread. Each check is done once, by one of the two threads. What a
wrong digest means for the read is decided by the transfer engine.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

from tandem.core.ids import BlockId
from tandem.transfer.read_task import ReadPart, ReadTask

Digest = Callable[[Sequence[BlockId], Sequence[int]], Sequence[tuple[int, ...]]]
"""`digest(blocks, logical)`: digests of blocks of the own pool, `blocks[i]` being block `logical[i]` of the prompt.

One tuple per block, with one 64-bit number per KV head of the pool.
"""


Check = tuple[ReadTask, ReadPart]
"""A received part whose digests are to be compared with those that the producer computed."""


class DigestChecks:
    """Own the digest checks of one transfer engine: those that wait, run, and are done.

    `heads`: the KV heads of the model that `digest` covers, a rank's part of the producer's digests.
    """

    def __init__(self, digest: Digest, heads: range) -> None:
        self._digest = digest
        self._heads = slice(heads.start, heads.stop)
        self._waiting: queue.SimpleQueue[Check | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Check] = queue.SimpleQueue()
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Count the checks that were shared or begun and whose result `take` has not returned yet."""
        return self._num_open

    @property
    def may_work(self) -> bool:
        return not self._waiting.empty()

    def share(self, check: Check) -> None:
        """Queue a check for the helper thread, or for `work`."""
        self._num_open += 1
        self._waiting.put(check)

    def do(self, check: Check) -> None:
        """Do a check on the calling thread. Waking the helper may take longer than a small check."""
        self._num_open += 1
        self._do(check)

    def work(self) -> None:
        """Do the oldest queued check, if there is one."""
        try:
            check = self._waiting.get_nowait()
        except queue.Empty:
            return
        if check is not None:
            self._do(check)

    def help(self, on_done: Callable[[], None]) -> None:
        """Run the helper thread: do queued checks until `close`, and call `on_done` after each."""
        while (check := self._waiting.get()) is not None:
            self._do(check)
            on_done()

    def close(self) -> None:
        """Make the helper thread return from `help`."""
        self._waiting.put(None)

    def take(self) -> list[Check]:
        """Return the checks that were done since the last call. Raises the `defect` of a part."""
        done: list[Check] = []
        while not self._done.empty():
            check = self._done.get()
            self._num_open -= 1
            _, part = check
            if part.defect is not None:
                raise part.defect
            done.append(check)
        return done

    def _do(self, check: Check) -> None:
        task, part = check
        try:
            if task.failure is None:
                part.wrong = self._find_wrong(task, part)
        except Exception as defect:
            # Raised again by `take` on the transfer thread, which fails with it.
            part.defect = defect
        self._done.put(check)

    def _find_wrong(self, task: ReadTask, part: ReadPart) -> int | None:
        places, read = task.places(part), task.read
        positions = [read.positions[place] for place in places]
        digests_here = self._digest([read.local[place] for place in places], positions)
        for place, digest_here in zip(places, digests_here, strict=True):
            if digest_here != read.offered[place].heads[self._heads]:
                return place
        return None

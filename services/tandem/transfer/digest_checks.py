"""Digests of parts that arrived, computed by whichever thread has time; never decides what a wrong one means.

All but `help` belongs to the carrier's thread. Each check is done once, by the carrier or its helper.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.ids import BlockId
from tandem.transfer.read_task import ReadPart, ReadTask

Digest = Callable[[Sequence[BlockId], Sequence[int]], Sequence[tuple[int, ...]]]
"""`digest(blocks, logical)`: of our own blocks, at these positions of the prompt; one number per head there."""


@dataclass(slots=True)
class DigestCheck:
    """`wrong` is set when it is done: the index in the order of a block that is another one. So is `defect`."""

    reading: ReadTask
    part: ReadPart
    wrong: int | None = None
    defect: Exception | None = None


class Checks:
    """Waiting, being worked on, done. `heads` are those of the model's KV heads that `digest` sees."""

    def __init__(self, digest: Digest, heads: range) -> None:
        self._digest = digest
        self._heads = slice(heads.start, heads.stop)
        self._waiting: queue.SimpleQueue[DigestCheck | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[DigestCheck] = queue.SimpleQueue()
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Checks that were begun or shared and not taken yet."""
        return self._num_open

    @property
    def may_work(self) -> bool:
        return not self._waiting.empty()

    def share(self, check: DigestCheck) -> None:
        """Leave a check to the helper, or to `work`."""
        self._num_open += 1
        self._waiting.put(check)

    def do(self, check: DigestCheck) -> None:
        """Do a check at once. Waking the helper for it may take longer than a small one takes."""
        self._num_open += 1
        self._do(check)

    def work(self) -> None:
        """Do the oldest shared check that nobody does, if there is one."""
        try:
            check = self._waiting.get_nowait()
        except queue.Empty:
            return
        if check is not None:
            self._do(check)

    def help(self, on_done: Callable[[], None]) -> None:
        """Do checks as they come until `close`; `on_done` after each."""
        while (check := self._waiting.get()) is not None:
            self._do(check)
            on_done()

    def close(self) -> None:
        """Send the helper home."""
        self._waiting.put(None)

    def take(self) -> list[DigestCheck]:
        """What has been done since the last call. Raises what a digest raised."""
        done: list[DigestCheck] = []
        while not self._done.empty():
            check = self._done.get()
            self._num_open -= 1
            if check.defect is not None:
                raise check.defect
            done.append(check)
        return done

    def _do(self, check: DigestCheck) -> None:
        try:
            if check.reading.failure is None:
                check.wrong = self._find_wrong(check.reading, check.part)
        except Exception as defect:
            # It belongs to the carrier's thread, which fails with it.
            check.defect = defect
        self._done.put(check)

    def _find_wrong(self, reading: ReadTask, part: ReadPart) -> int | None:
        expected = reading.order.digests
        assert expected is not None
        places = reading.places(part)
        copies, logical = reading.order.copies, reading.order.logical
        found = self._digest([copies[place].local for place in places], [logical[place] for place in places])
        for place, mine in zip(places, found, strict=True):
            if mine != expected[place][self._heads]:
                return place
        return None

"""Which running sequences may go on at another worker, and how far each of them is; never moves KV or ends a job."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain, takewhile

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, JobKey
from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.sequence import MigrationState, Sequence
from tandem.sched.state.sequence_queue import OrderedQueue


@dataclass(frozen=True, slots=True)
class MigrationProgress:
    """A sequence between two steps. `fresh` are its blocks after those that were readable before, as far as nobody will
    write them any more: complete ones, or all where it `has_stopped` and draws no more here."""

    fresh: tuple[BlockDigest, ...]
    num_computed: int
    num_cached: int
    has_stopped: bool


class MigrationTracker:
    """The only writer of `Sequence.migration_state` but for the plan that freezes. Reads the scheduler's queues."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        waiting: OrderedQueue,
        running: OrderedQueue,
        pulling: Mapping[JobKey, Sequence],
        by_key: Mapping[JobKey, Sequence],
    ) -> None:
        self._pool = pool
        self._has_digests = limits.digest_handoffs
        self._waiting = waiting
        self._running = running
        self._pulling = pulling
        self._by_key = by_key

    def movable(self) -> list[JobKey]:
        """Sequences that run and are to draw more, one for each choice. A prefill hands over by itself."""
        return [seq.key for seq in self._running if _may_move(seq)]

    def not_worth_moving(self) -> list[JobKey]:
        """Choices of which nothing is here that would be worth moving: those that wait, and those whose own KV is still
        to come from elsewhere."""
        return [key for seq in chain(self._waiting, self._pulling.values()) for key in seq.keys]

    def in_the_way(self) -> JobKey | None:
        """Where nothing can be planned: the youngest sequence that others read and that would have to draw once more to
        be gone. None where one has stopped, whose blocks come back."""
        if any(seq.migration_state is MigrationState.FROZEN for seq in self._running):
            return None
        held = (seq.key for seq in reversed(self._running) if seq.migration_state is not MigrationState.NONE)
        return next(held, None)

    def follow(self, key: JobKey) -> MigrationProgress:
        """Another worker is to read its blocks: from now on it is digested, and gives way to nobody."""
        seq = self._by_key[key]
        assert seq.migration_state is MigrationState.NONE, f"{seq!r} is {seq.migration_state}"
        seq.migration_state = MigrationState.STREAMING
        seq.num_digested = 0
        return self.standing(key, 0, ())

    def leave(self, key: JobKey) -> None:
        """Let the next draw be its last here."""
        seq = self._by_key[key]
        if seq.migration_state is MigrationState.STREAMING:
            seq.migration_state = MigrationState.FINALIZING

    def stay(self, key: JobKey) -> None:
        """Nobody reads its blocks any more: it goes on as before."""
        self._by_key[key].migration_state = MigrationState.NONE

    def standing(self, key: JobKey, num_readable: int, digests: Many[BlockDigest]) -> MigrationProgress:
        """`num_readable` leading blocks were readable before; `digests` came with the step that is done. They may be of
        blocks that were digested for somebody who is gone."""
        seq, size = self._by_key[key], self._pool.block_size
        has_stopped = self.has_stopped(key)
        num_whole = -(-seq.num_computed // size) if has_stopped else seq.num_computed // size
        blocks = seq.table.ids(num_whole)
        if not self._has_digests:
            fresh = tuple(BlockDigest(block, ()) for block in blocks[num_readable:])
        else:
            known = {digest.block: digest for digest in digests}
            fresh = tuple(known[block] for block in takewhile(known.__contains__, blocks[num_readable:]))
        return MigrationProgress(fresh, seq.num_computed, seq.num_cached, has_stopped)

    def has_stopped(self, key: JobKey) -> bool:
        """It is here, draws no more, and no plan that names it is open."""
        seq = self._by_key.get(key)
        return seq is not None and seq.migration_state is MigrationState.FROZEN and seq.num_open_plans == 0

    def last_tokens(self, key: JobKey, num_known: int) -> tuple[SampledToken, ...]:
        """Output tokens after the first `num_known`, the last one in any case."""
        seq = self._by_key[key]
        return seq.output_from(min(num_known, seq.num_output - 1))

    def make_room(self, key: JobKey, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Blocks for KV that is to come from elsewhere, more than was promised; None when there are not as many."""
        seq = self._pulling[key]
        return seq.table.ids() if self._pool.grow(seq.table, num_blocks) else None


def _may_move(seq: Sequence) -> bool:
    draws = seq.job.request.sampling.max_tokens > 0 and not seq.is_undivided
    return draws and not isinstance(seq.job, PrefillJob)

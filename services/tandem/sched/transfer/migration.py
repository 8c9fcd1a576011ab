"""Track which running sequences may migrate to another worker, and the progress of each migration.

KV is moved and jobs are ended in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain, takewhile

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, JobKey
from tandem.core.request import PrefillJob
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import MigrationState, Sequence


@dataclass(frozen=True, slots=True)
class MigrationProgress:
    """State of a migrating sequence between two steps.

    `fresh` are the blocks that became final since the last report: complete blocks, or all blocks once the sequence
    `has_stopped` and samples no more tokens here.
    """

    fresh: tuple[BlockDigest, ...]
    num_computed: int
    num_cached: int
    has_stopped: bool


class MigrationTracker:
    """Own `Sequence.migration_state`, which otherwise only the plan that freezes a sequence writes."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def movable(self) -> list[JobKey]:
        """Return the running sequences that can migrate, one key per choice. A prefill is handed over anyway and is
        left out."""
        return [seq.key for seq in self._state.running if _may_move(seq)]

    def not_worth_moving(self) -> list[JobKey]:
        """Return the choices without KV worth moving: those that wait, and those whose own KV is still being pulled."""
        return [key for seq in chain(self._state.waiting, self._state.pulling.values()) for key in seq.keys]

    def blocking_migration(self) -> JobKey | None:
        """Return a migration to cancel when nothing can be planned: the youngest sequence whose blocks are being read
        and that still has to sample a token before its migration can end. None where a sequence has stopped, since its
        blocks come free."""
        if any(seq.migration_state is MigrationState.FROZEN for seq in self._state.running):
            return None
        held = (seq.key for seq in reversed(self._state.running) if seq.migration_state is not MigrationState.NONE)
        return next(held, None)

    def start(self, key: JobKey) -> MigrationProgress:
        """Start a migration: another worker is to read the blocks, so they are digested and the sequence is not
        preempted."""
        seq = self._state.by_key[key]
        assert seq.migration_state is MigrationState.NONE, f"{seq!r} is {seq.migration_state}"
        seq.migration_state = MigrationState.STREAMING
        seq.num_digested = 0
        return self.progress(key, 0, ())

    def finalize(self, key: JobKey) -> None:
        """Make the next sampled token the last one here."""
        seq = self._state.by_key[key]
        if seq.migration_state is MigrationState.STREAMING:
            seq.migration_state = MigrationState.FINALIZING

    def cancel(self, key: JobKey) -> None:
        """Cancel a migration: the sequence goes on here."""
        self._state.by_key[key].migration_state = MigrationState.NONE

    def progress(self, key: JobKey, num_readable: int, digests: Many[BlockDigest]) -> MigrationProgress:
        """Return the progress of a migration after a step.

        `num_readable` leading blocks were readable before; `digests` are those of the finished step, and may contain
        blocks that were digested for a consumer that has disconnected.
        """
        seq = self._state.by_key[key]
        size = self._state.pool.block_size
        has_stopped = self.has_stopped(key)
        num_whole = -(-seq.num_computed // size) if has_stopped else seq.num_computed // size
        blocks = seq.table.ids(num_whole)
        if not self._state.limits.digest_handoffs:
            fresh = tuple(BlockDigest(block, ()) for block in blocks[num_readable:])
        else:
            known = {digest.block: digest for digest in digests}
            fresh = tuple(known[block] for block in takewhile(known.__contains__, blocks[num_readable:]))
        return MigrationProgress(fresh, seq.num_computed, seq.num_cached, has_stopped)

    def has_stopped(self, key: JobKey) -> bool:
        """Return whether the sequence is here, samples no more tokens, and no open plan names it."""
        seq = self._state.by_key.get(key)
        return seq is not None and seq.migration_state is MigrationState.FROZEN and seq.num_open_plans == 0

    def last_tokens(self, key: JobKey, num_known: int) -> tuple[SampledToken, ...]:
        """Return the output tokens after the first `num_known`, and at least the last one."""
        seq = self._state.by_key[key]
        return seq.output_from(min(num_known, seq.num_output - 1))

    def make_room(self, key: JobKey, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Grow the table of a pull to `num_blocks` blocks, more than were reserved, and return its blocks; None when
        there are too few."""
        seq = self._state.pulling[key]
        return seq.table.ids() if self._state.pool.grow(seq.table, num_blocks) else None


def _may_move(seq: Sequence) -> bool:
    samples = seq.job.request.sampling.max_tokens > 0 and not seq.is_unforked
    return samples and not isinstance(seq.job, PrefillJob)

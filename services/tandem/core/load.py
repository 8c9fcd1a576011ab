"""What a worker says of how full it is; never computed here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a router needs. `num_free_blocks` counts blocks without a holder, cached ones included.

    `num_queued_tokens`: known tokens accepted and not computed yet. `num_drafted_tokens` were guessed and
    `num_accepted_tokens` of them guessed right, since the start. `num_steps_over_target`: steps since the start that
    could not be planned to end within the latency target of those they decode for.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_leased_blocks: int = 0
    num_promised_blocks: int = 0
    draining: bool = False
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps_over_target: int = 0

    def may_take_more_than(self, before: Load) -> bool:
        """Whether there may be room for what had none before."""
        return (
            self.num_running < before.num_running
            or self.num_waiting < before.num_waiting
            or self.num_queued_tokens < before.num_queued_tokens
            or self.num_free_blocks > before.num_free_blocks
            or self.num_leased_blocks < before.num_leased_blocks
            or self.num_promised_blocks < before.num_promised_blocks
            or self.num_blocks > before.num_blocks
            or self.draining < before.draining
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Every count of a worker's books; when idle all are zero but the first three."""

    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_table_blocks: int = 0
    num_leased_blocks: int = 0
    num_reading_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_sequences: int = 0
    num_leases: int = 0
    num_pulls: int = 0

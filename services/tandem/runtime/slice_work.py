"""Prepare the slices of a step plan, and keep the last sampled token of each sequence between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.ids import BlockId, SeqId
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult

FAILURES = (RuntimeError, ValueError, IndexError, MemoryError, OverflowError)
"""Exceptions that fail only the slice that raised them; the other slices of the step go on."""
NO_TOKEN = "no token is known to continue from"


@dataclass(frozen=True, slots=True)
class PreparedSlice:
    """A checked slice of a step plan with its token ids.

    `piece`: the slice as planned. `tokens`: ids at the slice's positions; a placeholder if `source` is set. `source`:
    None if the ids are known. If the id of a chained slice's one token is a sample of the previous step that is still
    only on the device, `source` is the index of this sample among the previous step's device samples."""

    piece: ScheduledSlice
    tokens: tuple[int, ...]
    source: int | None = None


class LastTokens:
    """Keep the last sampled token of each sequence, from which a chained slice continues.

    Only sequences in one of the last two step results are kept; `get` returns None for all other sequences, and for one
    whose last slice failed.
    """

    def __init__(self) -> None:
        self._last: dict[SeqId, int] = {}
        self._previous: frozenset[SeqId] = frozenset()

    def get(self, seq: SeqId) -> int | None:
        return self._last.get(seq)

    def remember(self, results: Sequence[SliceResult]) -> frozenset[SeqId]:
        """Store the last token of each result of a step; a failed slice removes its sequence's token.

        Returns the sequences of this step and the previous one, because only these may be continued by a later plan.
        """
        named = frozenset(result.seq for result in results)
        recent = self._previous | named
        self._last = {seq: token for seq, token in self._last.items() if seq in recent}
        for result in results:
            if result.error is not None:
                self._last.pop(result.seq, None)
            elif result.tokens:
                self._last[result.seq] = result.tokens[-1].id
        self._previous = named
        return recent


def partly_filled(piece: ScheduledSlice, block_size: int) -> tuple[BlockId, ...]:
    """Return the block that the slice `piece` is the first to write to and leaves partly empty.

    The result is a tuple of one block, or an empty tuple if there is none."""
    index = piece.stop // block_size
    is_fresh = index * block_size >= piece.start
    return (piece.blocks[index],) if piece.stop % block_size and is_fresh else ()


def blocks_to_digest(piece: ScheduledSlice) -> list[tuple[BlockId, int]]:
    """List the blocks of a slice that must be digested for a handoff, each with its index in the prompt."""
    if not piece.digest_blocks:
        return []
    index_of = {block: i for i, block in enumerate(piece.blocks)}
    return [(block, index_of[block]) for block in piece.digest_blocks]


def failed(seq: SeqId, error: BaseException) -> SliceResult:
    """Build the result of a slice of sequence `seq` that failed with `error`."""
    return SliceResult(seq, error=f"{type(error).__name__}: {error}")

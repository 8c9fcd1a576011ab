"""Execute step plans synchronously on a decoder and its KV pool.

A slice that cannot be computed yields an error and leaves the other slices alone: slices are checked before the step,
and when a whole step fails its slices run one by one. Running a slice again is harmless, since it writes the same KV to
the same slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, SeqId
from tandem.kv.handoff import BlockDigest
from tandem.runtime.base_executor import BaseExecutor
from tandem.runtime.host_sampling import sample_slice
from tandem.runtime.input_batch import build_batch
from tandem.runtime.sampler import LogitRows
from tandem.runtime.slice_work import FAILURES, PreparedSlice, blocks_to_digest, failed, partly_filled
from tandem.sched.state.step_plan import SliceResult, StepPlan, StepResult


class TorchExecutor(BaseExecutor):
    """Synchronous executor of step plans on one device, the reference for `AsyncExecutor`.

    Implements `engine.ports.Executor`. Its arguments are those of `BaseExecutor`."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step plan to its end and return the results of its slices, in the plan's order.

        A slice that cannot be computed has an error as its result and does not affect the others."""
        results: dict[SeqId, SliceResult] = {}
        self.cache.offload(plan.spills)
        self.cache.onload(plan.fills)
        self.cache.copy(plan.copies)
        digests = self._digest(plan.digests)
        results.update(self._run(self._prepare(plan, results)))
        ordered = tuple(results[piece.seq] for piece in plan.slices)
        self._logits_processor.retain(self._last.remember(ordered))
        return StepResult(plan.number, ordered, digests)

    def _run(self, slices: Sequence[PreparedSlice]) -> dict[SeqId, SliceResult]:
        """Compute the slices together, or one by one if that fails, and return a result for each."""
        if not slices:
            return {}
        try:
            hidden, sampled_rows = self._forward(slices)
            # Scored before sampling, because a later call of `logits` may overwrite the logits of an earlier one.
            scores = self._score(slices, hidden)
            # Sampled rows are ascending and unique, so an equal count means all rows.
            rows = hidden if len(sampled_rows) == len(hidden) else hidden[sampled_rows]
            return self._finish(slices, rows, scores)
        except FAILURES as error:
            if len(slices) == 1:
                seq = slices[0].piece.seq
                return {seq: failed(seq, error)}
        results: dict[SeqId, SliceResult] = {}
        for prepared in slices:
            results.update(self._run([prepared]))
        return results

    def _forward(self, slices: Sequence[PreparedSlice]) -> tuple[torch.Tensor, list[int]]:
        """Return hidden rows `[T, hidden]` and the indices of the rows to sample from, see `Batch.sampled_rows`."""
        block_size = self.layout.block_size
        pieces = [prepared.piece for prepared in slices]
        self.cache.clear([block for piece in pieces for block in partly_filled(piece, block_size)])
        batch = build_batch(pieces, [prepared.tokens for prepared in slices], block_size)
        hidden = self.model.forward(batch, self.cache)
        return hidden, batch.sampled_rows

    def _finish(
        self,
        slices: Sequence[PreparedSlice],
        sampled_rows: torch.Tensor,
        scores: Mapping[SeqId, tuple[SampledToken, ...]],
    ) -> dict[SeqId, SliceResult]:
        """Sample tokens and digest blocks. `sampled_rows` `[rows, hidden]` are the rows to sample from, in order."""
        logits = LogitRows(self.model.logits(sampled_rows)) if len(sampled_rows) else None
        results: dict[SeqId, SliceResult] = {}
        row = 0
        for prepared in slices:
            piece = prepared.piece
            digests = self._digest(blocks_to_digest(piece))
            results[piece.seq] = sample_slice(
                prepared, logits, row, self._logits_processor, digests, scores.get(piece.seq, ())
            )
            row += 0 if piece.sampling is None else 1 + piece.num_drafted
        return results

    def _digest(self, places: Sequence[tuple[BlockId, int]]) -> tuple[BlockDigest, ...]:
        """Digest blocks, given with their indices in their prompts."""
        if not places:
            return ()
        blocks = [block for block, _ in places]
        heads = self.cache.digest(blocks, [index for _, index in places])
        return tuple(BlockDigest(block, words) for block, words in zip(blocks, heads, strict=True))

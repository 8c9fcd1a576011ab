"""Execute step plans synchronously on a decoder and its KV pool, and define what all executors share.

A slice that cannot be computed yields an error and leaves the other slices alone: slices are checked before the step,
and when a whole step fails its slices run one by one. Running a slice again is harmless, since it writes the same KV to
the same slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tandem.core.errors import TandemError
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, SeqId
from tandem.kv.handoff import BlockDigest
from tandem.runtime.input_batch import BatchBuilder
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.logits_processor import LogitsProcessor
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.prompt_logprobs import compute_prompt_logprobs
from tandem.runtime.sampler import LogitRows
from tandem.runtime.slice_work import (
    FAILURES,
    NO_TOKEN,
    LastTokens,
    PreparedSlice,
    blocks_to_digest,
    failed,
    partly_filled,
)
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult, StepPlan, StepResult

if TYPE_CHECKING:
    from tandem.runtime.grammar_engine import LlguidanceMasks


class BaseExecutor:
    """Base class of both executors: it checks the slices of a step plan, samples on the host and computes prompt log
    probabilities.

    A slice is what a plan computes of one sequence. An executor stores the KV cache, and for the sequences of the last
    two steps their last sampled token; it knows nothing else of sequences. `max_model_len`: longest sequence in tokens;
    a slice beyond it yields an error. Without `grammars` a slice whose sampling has a grammar yields an error.
    """

    def __init__(
        self, model: CausalModel, cache: KVCache, max_model_len: int, grammars: LlguidanceMasks | None = None
    ) -> None:
        self.cache = cache
        self.max_model_len = max_model_len
        self.model = model
        self._logits_processor = LogitsProcessor(grammars)
        self.layout = cache.layout
        self.num_blocks = cache.num_blocks
        self.num_host_slots = cache.num_host_slots
        self.vocab_size = model.config.vocab_size
        self._last = LastTokens()

    def why_refused(self, piece: ScheduledSlice, tokens: tuple[int, ...]) -> str | None:
        """Return why the slice `piece` with these token ids cannot be computed; None if it can."""
        if piece.start < 0 or piece.num_tokens < 1 or len(tokens) != piece.num_tokens:
            return f"{len(tokens)} tokens for positions [{piece.start}, {piece.stop})"
        if piece.num_drafted < 0 or piece.num_certain < 1 or (piece.num_drafted and piece.sampling is None):
            return f"{piece.num_drafted} draft tokens in a slice of {piece.num_tokens} tokens that samples nothing"
        if piece.stop > self.max_model_len:
            return f"position {piece.stop - 1} is beyond the model's {self.max_model_len} tokens"
        if len(piece.blocks) < -(-piece.stop // self.layout.block_size):
            return f"{len(piece.blocks)} blocks cannot hold {piece.stop} tokens"
        if min(piece.blocks) < 0 or max(piece.blocks) >= self.num_blocks:
            return f"a block is outside the pool of {self.num_blocks}"
        if piece.digest_blocks and not set(piece.digest_blocks) <= set(piece.blocks):
            return "a block to be digested is not among the slice's blocks"
        known = (*tokens, *piece.scored) if piece.scored else tokens
        if min(known) < 0 or max(known) >= self.vocab_size:
            return "a token id is outside the vocabulary"
        if len(piece.scored) > piece.num_certain:
            return f"{len(piece.scored)} tokens to be scored by {piece.num_certain} rows"
        return None

    def _prepare(self, plan: StepPlan, results: dict[SeqId, SliceResult]) -> list[PreparedSlice]:
        """Return the slices of a plan that can be computed; put an error for each of the others into `results`."""
        slices: list[PreparedSlice] = []
        for piece in plan.slices:
            prepared = self._chained(piece) if piece.chained else PreparedSlice(piece, piece.tokens)
            if isinstance(prepared, PreparedSlice):
                prepared = self.why_refused(piece, prepared.tokens) or prepared
            if isinstance(prepared, str):
                results[piece.seq] = SliceResult(piece.seq, error=prepared)
            else:
                slices.append(prepared)
        return slices

    def _chained(self, piece: ScheduledSlice) -> PreparedSlice | str:
        """Return a chained slice with its sequence's last token, or why there is none."""
        last = self._last.get(piece.seq)
        return NO_TOKEN if last is None else PreparedSlice(piece, (last,))

    def _score(self, slices: Sequence[PreparedSlice], hidden: torch.Tensor) -> dict[SeqId, tuple[SampledToken, ...]]:
        """Compute prompt log probabilities of the slices that request them, by sequence; waits for the device.

        `hidden` `[T, hidden]` holds the rows of all slices. Raises ValueError when logits are not finite."""
        scores: dict[SeqId, tuple[SampledToken, ...]] = {}
        first = 0
        for piece in (prepared.piece for prepared in slices):
            if piece.scored:
                rows = hidden[first : first + len(piece.scored)]
                scores[piece.seq] = compute_prompt_logprobs(
                    self._host_logits, rows, piece.scored, piece.num_top, self.vocab_size
                )
            first += piece.num_tokens
        return scores

    def _host_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden).cpu()

    def _sample_on_host(
        self,
        prepared: PreparedSlice,
        logits: LogitRows | None,
        row: int,
        digests: tuple[BlockDigest, ...],
        scores: tuple[SampledToken, ...],
    ) -> SliceResult:
        """Sample the tokens of one slice on the host and return the slice's result. If sampling fails, the result holds
        the error.

        `prepared`: the slice and its token ids. `logits`: all rows of the step that the host samples from; None if
        there are none. `row`: index in `logits` of the slice's first row; ignored if the slice samples nothing.
        `digests`: digests of the slice's blocks. `scores`: log probabilities of its prompt tokens. Both are copied to
        the result."""
        piece = prepared.piece
        try:
            tokens: tuple[SampledToken, ...] = ()
            is_complete = False
            if logits is not None and piece.sampling is not None:
                drafted = prepared.tokens[piece.num_certain :]
                adjust = self._logits_processor.adjust(piece.seq, piece.sampling)
                for sampling in piece.sampling.per_choice():
                    sampled, is_complete = logits.sample_and_verify(row, sampling, drafted, adjust)
                    tokens += sampled
            return SliceResult(piece.seq, tokens, digests, scores=scores, is_complete=is_complete)
        except TandemError as error:
            return SliceResult(piece.seq, error=error.message, error_kind=error.kind)
        except FAILURES as error:
            return failed(piece.seq, error)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model.config.model_type} on {self.cache.pool.device}, {self.cache!r})"


class TorchExecutor(BaseExecutor):
    """Synchronous executor of step plans on one device, the reference for `AsyncExecutor`.

    Implements `engine.ports.Executor`. Its arguments are those of `BaseExecutor`."""

    def __init__(
        self, model: CausalModel, cache: KVCache, max_model_len: int, grammars: LlguidanceMasks | None = None
    ) -> None:
        super().__init__(model, cache, max_model_len, grammars)
        self._batches = BatchBuilder(self.layout.block_size)

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step plan to its end and return the results of its slices, in the plan's order.

        A slice that cannot be computed has an error as its result and does not affect the others."""
        results: dict[SeqId, SliceResult] = {}
        self.cache.copy(plan.spills, plan.fills, plan.copies)
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
            rows = hidden if len(sampled_rows) == hidden.shape[0] else hidden[sampled_rows]
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
        pieces = [prepared.piece for prepared in slices]
        self.cache.clear([block for piece in pieces for block in partly_filled(piece, self.layout.block_size)])
        batch = self._batches.build(pieces, [prepared.tokens for prepared in slices])
        hidden = self.model.forward(batch, self.cache)
        return hidden, batch.sampled_rows

    def _finish(
        self,
        slices: Sequence[PreparedSlice],
        sampled_rows: torch.Tensor,
        scores: Mapping[SeqId, tuple[SampledToken, ...]],
    ) -> dict[SeqId, SliceResult]:
        """Sample tokens and digest blocks. `sampled_rows` `[rows, hidden]` are the rows to sample from, in order."""
        logits = LogitRows(self.model.logits(sampled_rows)) if sampled_rows.shape[0] else None
        results: dict[SeqId, SliceResult] = {}
        row = 0
        for prepared in slices:
            piece = prepared.piece
            digests = self._digest(blocks_to_digest(piece))
            results[piece.seq] = self._sample_on_host(prepared, logits, row, digests, scores.get(piece.seq, ()))
            row += 0 if piece.sampling is None else 1 + piece.num_drafted
        return results

    def _digest(self, places: Sequence[tuple[BlockId, int]]) -> tuple[BlockDigest, ...]:
        """Digest blocks, given with their indices in their prompts."""
        if not places:
            return ()
        blocks = [block for block, _ in places]
        heads = self.cache.digest(blocks, [index for _, index in places])
        return tuple(BlockDigest(block, words) for block, words in zip(blocks, heads, strict=True))

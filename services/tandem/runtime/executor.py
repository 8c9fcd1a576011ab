"""Runs plans on a decoder and its KV pool; never keeps a sequence, only the last token of those just planned.

A slice that cannot be computed reports an error and leaves the others alone: what a slice asks for is checked before
the step, and when a whole step fails its slices run one by one. Running a slice again is harmless, since it writes the
same KV to the same slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, SeqId
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVLayout
from tandem.runtime.grammar_masks import GrammarMasks
from tandem.runtime.host_sampling import sample_slice
from tandem.runtime.input_batch import build_batch
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
    SliceLimits,
    digest_places,
    failed,
    partly_filled,
)
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult, StepPlan, StepResult


class TorchExecutor:
    """An `engine.ports.Executor`. `max_model_len` bounds positions, in tokens. Without `grammars` a slice that draws by
    a grammar reports an error."""

    def __init__(
        self, model: CausalModel, cache: KVCache, max_model_len: int, grammars: GrammarMasks | None = None
    ) -> None:
        self.cache = cache
        self.max_model_len = max_model_len
        self.model = model
        self._adjuster = LogitsProcessor(grammars)
        self._bounds = SliceLimits(model.config.vocab_size, max_model_len, cache.num_blocks, cache.layout.block_size)
        self._last = LastTokens()

    @property
    def layout(self) -> KVLayout:
        return self.cache.layout

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def num_host_slots(self) -> int:
        return self.cache.num_host_slots

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. Results are in the order of its slices."""
        results: dict[SeqId, SliceResult] = {}
        works: list[PreparedSlice] = []
        self.cache.offload(plan.spills)
        self.cache.onload(plan.fills)
        self.cache.copy(plan.copies)
        digests = self._digest(plan.digests)
        for piece in plan.slices:
            checked = self._check(piece)
            if isinstance(checked, str):
                results[piece.seq] = SliceResult(piece.seq, error=checked)
            else:
                works.append(checked)
        results.update(self._run(works))
        ordered = tuple(results[piece.seq] for piece in plan.slices)
        self._adjuster.retain(self._last.remember(ordered))
        return StepResult(plan.number, ordered, digests)

    @torch.inference_mode()
    def logits(self, piece: ScheduledSlice) -> torch.Tensor:
        """Compute one slice and yield the logits of all its rows, `[num_tokens, vocab]`; for tests and scoring.

        Raises ValueError when the slice cannot be computed.
        """
        checked = self._check(piece)
        if isinstance(checked, str):
            raise ValueError(checked)
        return self.model.logits(self._forward([checked])[0]).clone()

    def _check(self, piece: ScheduledSlice) -> PreparedSlice | str:
        """The slice made ready, or why it cannot be computed."""
        tokens = piece.tokens
        if piece.chained:
            last = self._last.of(piece.seq)
            if last is None:
                return NO_TOKEN
            tokens = (last,)
        return self._bounds.check(piece, tokens) or PreparedSlice(piece, tokens)

    def _run(self, works: Sequence[PreparedSlice]) -> dict[SeqId, SliceResult]:
        if not works:
            return {}
        try:
            hidden, sampled_rows = self._forward(works)
            # Before anything is drawn, because logits of another call may write over those that are drawn from.
            scores = self._score(works, hidden)
            # They are in order and differ, so as many as there are rows means all of them.
            rows = hidden if len(sampled_rows) == len(hidden) else hidden[sampled_rows]
            return self._finish(works, rows, scores)
        except FAILURES as error:
            if len(works) == 1:
                seq = works[0].piece.seq
                return {seq: failed(seq, error)}
        results: dict[SeqId, SliceResult] = {}
        for work in works:
            results.update(self._run([work]))
        return results

    def _forward(self, works: Sequence[PreparedSlice]) -> tuple[torch.Tensor, list[int]]:
        """Hidden rows `[T, hidden]` and the indices of those to draw from; see `Batch.sampled_rows`."""
        block_size = self.layout.block_size
        pieces = [work.piece for work in works]
        self.cache.clear([block for piece in pieces for block in partly_filled(piece, block_size)])
        batch = build_batch(pieces, [work.tokens for work in works], block_size)
        hidden = self.model.forward(batch, self.cache)
        return hidden, batch.sampled_rows

    def _score(self, works: Sequence[PreparedSlice], hidden: torch.Tensor) -> dict[SeqId, tuple[SampledToken, ...]]:
        """Of the slices that ask for it; `hidden` are all their rows. Raises ValueError when a row is not finite."""
        scores: dict[SeqId, tuple[SampledToken, ...]] = {}
        first = 0
        for piece in (work.piece for work in works):
            if piece.scored:
                rows = hidden[first : first + len(piece.scored)]
                scores[piece.seq] = compute_prompt_logprobs(
                    self.model.logits, rows, piece.scored, piece.num_top, self.vocab_size
                )
            first += piece.num_tokens
        return scores

    def _finish(
        self,
        works: Sequence[PreparedSlice],
        sampled_rows: torch.Tensor,
        scores: Mapping[SeqId, tuple[SampledToken, ...]],
    ) -> dict[SeqId, SliceResult]:
        """Sample and digest; `sampled_rows` is `[rows, hidden]`. Logits exist only for rows that are drawn from."""
        logits = LogitRows(self.model.logits(sampled_rows)) if len(sampled_rows) else None
        results: dict[SeqId, SliceResult] = {}
        row = 0
        for work in works:
            piece = work.piece
            digests = self._digest(digest_places(piece))
            results[piece.seq] = sample_slice(work, logits, row, self._adjuster, digests, scores.get(piece.seq, ()))
            row += 0 if piece.sampling is None else 1 + piece.num_drafted
        return results

    def _digest(self, places: Sequence[tuple[BlockId, int]]) -> tuple[BlockDigest, ...]:
        """Of blocks with their places in their prompts."""
        if not places:
            return ()
        blocks = [block for block, _ in places]
        heads = self.cache.digest(blocks, [index for _, index in places])
        return tuple(BlockDigest(block, words) for block, words in zip(blocks, heads, strict=True))

    def __repr__(self) -> str:
        return f"TorchExecutor({self.model.config.model_type}, {self.cache!r})"

"""Implement what the synchronous and the asynchronous executor share: model, cache, checks of slices, prompt scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.core.events import SampledToken
from tandem.core.ids import SeqId
from tandem.runtime.grammar_masks import GrammarMasks
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.logits_processor import LogitsProcessor
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.prompt_logprobs import compute_prompt_logprobs
from tandem.runtime.slice_work import NO_TOKEN, LastTokens, PreparedSlice, SliceLimits
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult, StepPlan


class BaseExecutor:
    """Base class of both executors: it checks the slices of a step plan and computes prompt log probabilities.

    A slice is what a plan computes of one sequence. An executor stores the KV cache, and for the sequences of the last
    two steps their last sampled token; it knows nothing else of sequences. `max_model_len`: longest sequence in tokens;
    a slice beyond it yields an error. Without `grammars` a slice whose sampling has a grammar yields an error.
    """

    def __init__(
        self, model: CausalModel, cache: KVCache, max_model_len: int, grammars: GrammarMasks | None = None
    ) -> None:
        self.cache = cache
        self.max_model_len = max_model_len
        self.model = model
        self._logits_processor = LogitsProcessor(grammars)
        self.layout = cache.layout
        self.num_blocks = cache.num_blocks
        self.num_host_slots = cache.num_host_slots
        self.vocab_size = model.config.vocab_size
        self._limits = SliceLimits(self.vocab_size, max_model_len, self.num_blocks, self.layout.block_size)
        self._last = LastTokens()

    def _prepare(self, plan: StepPlan, results: dict[SeqId, SliceResult]) -> list[PreparedSlice]:
        """Return the slices of a plan that can be computed; put an error for each of the others into `results`."""
        slices: list[PreparedSlice] = []
        for piece in plan.slices:
            prepared = self._chained(piece) if piece.chained else PreparedSlice(piece, piece.tokens)
            if isinstance(prepared, PreparedSlice):
                prepared = self._limits.check(piece, prepared.tokens) or prepared
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model.config.model_type} on {self.cache.pool.device}, {self.cache!r})"

"""Runs plans on a decoder and its KV pool; never keeps a sequence, only the last token of those just planned.

A slice that cannot be computed reports an error and leaves the others alone: what a slice asks for is checked before
the step, and when a whole step fails its slices run one by one. Running a slice again is harmless, since it writes the
same KV to the same slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.core.errors import TandemError
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, SeqId
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVLayout
from tandem.runtime.adjuster import Adjuster
from tandem.runtime.batch import build_batch
from tandem.runtime.cache import KVCache
from tandem.runtime.grammar_masks import GrammarMasks
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.sampler import LogitRows
from tandem.runtime.scorer import score
from tandem.sched.plan import Slice, SliceResult, StepPlan, StepResult

_FAILURES = (RuntimeError, ValueError, IndexError, MemoryError, OverflowError)


@dataclass(frozen=True, slots=True)
class _Work:
    """A checked slice with its token ids, chained or not."""

    piece: Slice
    tokens: tuple[int, ...]


class TorchExecutor:
    """An `engine.ports.Executor`. `max_model_len` bounds positions, in tokens. Without `grammars` a slice that draws by
    a grammar reports an error."""

    def __init__(
        self, model: CausalModel, cache: KVCache, max_model_len: int, grammars: GrammarMasks | None = None
    ) -> None:
        self.cache = cache
        self.max_model_len = max_model_len
        self.model = model
        self._adjuster = Adjuster(grammars)
        # The token sampled last for each sequence that one of the last two plans named.
        self._last: dict[SeqId, int] = {}
        self._previous: frozenset[SeqId] = frozenset()

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
        works: list[_Work] = []
        self.cache.spill(plan.spills)
        self.cache.fill(plan.fills)
        self.cache.copy(plan.copies)
        digests = self._digest(plan.digests) if plan.digests else ()
        for piece in plan.slices:
            checked = self._check(piece)
            if isinstance(checked, str):
                results[piece.seq] = SliceResult(piece.seq, error=checked)
            else:
                works.append(checked)
        results.update(self._run(works))
        ordered = tuple(results[piece.seq] for piece in plan.slices)
        self._remember(ordered)
        return StepResult(plan.number, ordered, digests)

    @torch.inference_mode()
    def logits(self, piece: Slice) -> torch.Tensor:
        """Compute one slice and yield the logits of all its rows, `[num_tokens, vocab]`; for tests and scoring.

        Raises ValueError when the slice cannot be computed.
        """
        checked = self._check(piece)
        if isinstance(checked, str):
            raise ValueError(checked)
        return self.model.logits(self._forward([checked])[0]).clone()

    def _check(self, piece: Slice) -> _Work | str:
        """The slice made ready, or why it cannot be computed."""
        tokens = piece.tokens
        if piece.chained:
            last = self._last.get(piece.seq)
            if last is None:
                return "no token is known to continue from"
            tokens = (last,)
        if piece.start < 0 or piece.num_tokens < 1 or len(tokens) != piece.num_tokens:
            return f"{len(tokens)} tokens for positions [{piece.start}, {piece.stop})"
        if piece.num_drafted < 0 or piece.num_certain < 1 or (piece.num_drafted and piece.sampling is None):
            return f"{piece.num_drafted} guesses in a slice of {piece.num_tokens} tokens, without a draw before them"
        if piece.stop > self.max_model_len:
            return f"position {piece.stop - 1} is beyond the model's {self.max_model_len} tokens"
        if len(piece.blocks) < self.layout.num_blocks_for(piece.stop):
            return f"{len(piece.blocks)} blocks cannot hold {piece.stop} tokens"
        if min(piece.blocks) < 0 or max(piece.blocks) >= self.num_blocks:
            return f"a block is outside the pool of {self.num_blocks}"
        if piece.digest_blocks and not set(piece.digest_blocks) <= set(piece.blocks):
            return "a block to be digested is not among the slice's blocks"
        return _wrong_tokens(piece, tokens, self.vocab_size) or _Work(piece, tokens)

    def _run(self, works: Sequence[_Work]) -> dict[SeqId, SliceResult]:
        if not works:
            return {}
        try:
            hidden, drawn_rows = self._forward(works)
            # Before anything is drawn, because logits of another call may write over those that are drawn from.
            scores = self._score(works, hidden)
            # They are in order and differ, so as many as there are rows means all of them.
            rows = hidden if len(drawn_rows) == len(hidden) else hidden[drawn_rows]
            return self._finish(works, rows, scores)
        except _FAILURES as error:
            if len(works) == 1:
                seq = works[0].piece.seq
                return {seq: SliceResult(seq, error=f"{type(error).__name__}: {error}")}
        results: dict[SeqId, SliceResult] = {}
        for work in works:
            results.update(self._run([work]))
        return results

    def _forward(self, works: Sequence[_Work]) -> tuple[torch.Tensor, list[int]]:
        """Hidden rows `[T, hidden]` and the indices of those to draw from; see `Batch.drawn_rows`."""
        block_size = self.layout.block_size
        pieces = [work.piece for work in works]
        self.cache.clear([block for piece in pieces for block in _partly_filled(piece, block_size)])
        batch = build_batch(pieces, [work.tokens for work in works], block_size)
        hidden = self.model.forward(batch, self.cache)
        return hidden, batch.drawn_rows

    def _score(self, works: Sequence[_Work], hidden: torch.Tensor) -> dict[SeqId, tuple[SampledToken, ...]]:
        """Of the slices that ask for it; `hidden` are all their rows. Raises ValueError when a row is not finite."""
        scores: dict[SeqId, tuple[SampledToken, ...]] = {}
        first = 0
        for piece in (work.piece for work in works):
            if piece.scored:
                rows = hidden[first : first + len(piece.scored)]
                scores[piece.seq] = score(self.model.logits, rows, piece.scored, piece.num_top, self.vocab_size)
            first += piece.num_tokens
        return scores

    def _finish(
        self, works: Sequence[_Work], drawn_rows: torch.Tensor, scores: Mapping[SeqId, tuple[SampledToken, ...]]
    ) -> dict[SeqId, SliceResult]:
        """Sample and digest; `drawn_rows` is `[rows, hidden]`. Logits exist only for rows that are drawn from."""
        logits = LogitRows(self.model.logits(drawn_rows)) if len(drawn_rows) else None
        results: dict[SeqId, SliceResult] = {}
        row = 0
        for work in works:
            results[work.piece.seq] = self._result(work, logits, row, scores.get(work.piece.seq, ()))
            row += 0 if work.piece.sampling is None else 1 + work.piece.num_drafted
        return results

    def _result(self, work: _Work, logits: LogitRows | None, row: int, scores: tuple[SampledToken, ...]) -> SliceResult:
        """`row` is the first one that the slice draws from, if it does."""
        piece = work.piece
        try:
            tokens: tuple[SampledToken, ...] = ()
            is_complete = False
            if logits is not None and piece.sampling is not None:
                guesses, adjust = work.tokens[piece.num_certain :], self._adjuster.adjust(piece.seq, piece.sampling)
                for draw in piece.sampling.each():
                    drawn, is_complete = logits.sample_while_guessed(row, draw, guesses, adjust)
                    tokens += drawn
            return SliceResult(piece.seq, tokens, self._digests(piece), scores=scores, is_complete=is_complete)
        except TandemError as error:
            return SliceResult(piece.seq, error=error.message, error_kind=error.kind)
        except _FAILURES as error:
            return SliceResult(piece.seq, error=f"{type(error).__name__}: {error}")

    def _digests(self, piece: Slice) -> tuple[BlockDigest, ...]:
        if not piece.digest_blocks:
            return ()
        index_of = {block: i for i, block in enumerate(piece.blocks)}
        return self._digest([(block, index_of[block]) for block in piece.digest_blocks])

    def _digest(self, places: Sequence[tuple[BlockId, int]]) -> tuple[BlockDigest, ...]:
        """Of blocks with their places in their prompts."""
        blocks = [block for block, _ in places]
        heads = self.cache.digest(blocks, [index for _, index in places])
        return tuple(BlockDigest(block, words) for block, words in zip(blocks, heads, strict=True))

    def _remember(self, results: Sequence[SliceResult]) -> None:
        named = frozenset(result.seq for result in results)
        self._last = {seq: token for seq, token in self._last.items() if seq in named or seq in self._previous}
        for result in results:
            if result.error is not None:
                self._last.pop(result.seq, None)
            elif result.tokens:
                self._last[result.seq] = result.tokens[-1].id
        self._adjuster.retain(self._previous | named)
        self._previous = named

    def __repr__(self) -> str:
        return f"TorchExecutor({self.model.config.model_type}, {self.cache!r})"


def _wrong_tokens(piece: Slice, tokens: tuple[int, ...], vocab_size: int) -> str | None:
    """What is wrong with a slice's tokens and with those that it scores."""
    known = (*tokens, *piece.scored) if piece.scored else tokens
    if min(known) < 0 or max(known) >= vocab_size:
        return "a token id is outside the vocabulary"
    if len(piece.scored) > piece.num_certain:
        return f"{len(piece.scored)} tokens to be scored by {piece.num_certain} rows"
    return None


def _partly_filled(piece: Slice, block_size: int) -> tuple[BlockId, ...]:
    """The block that this slice is the first to write to and does not fill, if there is one."""
    index = piece.stop // block_size
    is_fresh = index * block_size >= piece.start
    return (piece.blocks[index],) if piece.stop % block_size and is_fresh else ()

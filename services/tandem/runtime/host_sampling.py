"""Draws the tokens of slices from logits in host memory, whatever their draws ask for; never runs a model."""

from __future__ import annotations

from tandem.core.errors import TandemError
from tandem.core.events import SampledToken
from tandem.kv.handoff import BlockDigest
from tandem.runtime.logits_processor import LogitsProcessor
from tandem.runtime.sampler import LogitRows
from tandem.runtime.slice_work import FAILURES, PreparedSlice, failed
from tandem.sched.state.step_plan import SliceResult


def sample_slice(
    work: PreparedSlice,
    logits: LogitRows | None,
    row: int,
    adjuster: LogitsProcessor,
    digests: tuple[BlockDigest, ...],
    scores: tuple[SampledToken, ...],
) -> SliceResult:
    """The result of one slice. `row` is the first one of `logits` that it draws from, if it does. An error is the
    slice's own."""
    piece = work.piece
    try:
        tokens: tuple[SampledToken, ...] = ()
        is_complete = False
        if logits is not None and piece.sampling is not None:
            guesses, adjust = work.tokens[piece.num_certain :], adjuster.adjust(piece.seq, piece.sampling)
            for draw in piece.sampling.per_choice():
                drawn, is_complete = logits.sample_while_guessed(row, draw, guesses, adjust)
                tokens += drawn
        return SliceResult(piece.seq, tokens, digests, scores=scores, is_complete=is_complete)
    except TandemError as error:
        return SliceResult(piece.seq, error=error.message, error_kind=error.kind)
    except FAILURES as error:
        return failed(piece.seq, error)

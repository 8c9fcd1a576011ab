"""Sample the tokens of a slice on the host, with all sampling parameters."""

from __future__ import annotations

from tandem.core.errors import TandemError
from tandem.core.events import SampledToken
from tandem.kv.handoff import BlockDigest
from tandem.runtime.logits_processor import LogitsProcessor
from tandem.runtime.sampler import LogitRows
from tandem.runtime.slice_work import FAILURES, PreparedSlice, failed
from tandem.sched.state.step_plan import SliceResult


def sample_slice(
    prepared: PreparedSlice,
    logits: LogitRows | None,
    row: int,
    processor: LogitsProcessor,
    digests: tuple[BlockDigest, ...],
    scores: tuple[SampledToken, ...],
) -> SliceResult:
    """Sample the tokens of one slice on the host and return the slice's result. If sampling fails, the result holds the
    error.

    `prepared`: the slice and its token ids. `logits`: all rows of the step that the host samples from; None if there
    are none. `row`: index in `logits` of the slice's first row; ignored if the slice samples nothing. `processor`
    changes the logits by penalties, biases and grammar. `digests`: digests of the slice's blocks. `scores`: log
    probabilities of its prompt tokens. Both are copied to the result."""
    piece = prepared.piece
    try:
        tokens: tuple[SampledToken, ...] = ()
        is_complete = False
        if logits is not None and piece.sampling is not None:
            drafted, adjust = prepared.tokens[piece.num_certain :], processor.adjust(piece.seq, piece.sampling)
            for sampling in piece.sampling.per_choice():
                sampled, is_complete = logits.sample_and_verify(row, sampling, drafted, adjust)
                tokens += sampled
        return SliceResult(piece.seq, tokens, digests, scores=scores, is_complete=is_complete)
    except TandemError as error:
        return SliceResult(piece.seq, error=error.message, error_kind=error.kind)
    except FAILURES as error:
        return failed(piece.seq, error)

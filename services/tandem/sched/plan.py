"""What one step computes and what came of it, all frozen; never holds a Sequence or a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.kv.handoff import BlockDigest


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draw one token from the logits of the slice's last row.

    `index` is the drawn token's index among the choice's output tokens, which with `params.seed` and `choice`
    names the random numbers of the draw.
    """

    params: SamplingParams
    choice: int
    index: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Compute KV for positions `[start, start + num_tokens)` of one sequence.

    `tokens` are the ids at those positions. When `chained`, `tokens` is empty, `num_tokens` is 1, and the id is the
    one that the most recent earlier plan naming this sequence samples. `blocks` covers `[0, start + num_tokens)`.
    `digest_blocks` are those of `blocks` that are complete after this slice and are to be digested for a hand-off.
    """

    seq: SeqId
    start: int
    num_tokens: int
    tokens: tuple[int, ...]
    blocks: tuple[BlockId, ...]
    sampling: Sampling | None
    chained: bool = False
    digest_blocks: tuple[BlockId, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. `number` rises by one per plan; `slices` holds a sequence at most once, decodes first."""

    number: int
    slices: tuple[Slice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.slices)

    def __str__(self) -> str:
        parts = ", ".join(f"{s.seq}[{s.start}:{s.stop}){'*' if s.sampling else ''}" for s in self.slices)
        return f"plan {self.number}: {parts}"


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What one slice yielded: 0..n tokens in order (n > 1 only under speculation)."""

    seq: SeqId
    tokens: tuple[SampledToken, ...] = ()
    digests: tuple[BlockDigest, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per slice of the plan, in the plan's order."""

    number: int
    slices: tuple[SliceResult, ...] = field(default=())

"""What one step computes and what came of it, all frozen; never holds a Sequence or a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tandem.core.errors import ErrorKind
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HostSlot, SeqId
from tandem.core.request import SamplingParams
from tandem.kv.handoff import BlockDigest
from tandem.kv.host_offload import Offload, Onload


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draw one token from the logits of the slice's last certain row, and of each guessed row after it whose token is
    the one just drawn.

    `index` is the first drawn token's index among the choice's output tokens, which with `params.seed` and `choice`
    names the random numbers of the draw; each further token has the next index. `prompt` and `output` are all tokens
    before the first drawn one, given where `params.needs_history`. With `num_choices` more than one, one token is drawn
    from the same row for each of the choices from `choice` on, and nothing was guessed.
    """

    params: SamplingParams
    choice: int
    index: int
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    num_choices: int = 1

    def each(self) -> tuple[Sampling, ...]:
        """The draw of each choice."""
        if self.num_choices == 1:
            return (self,)
        return tuple(replace(self, choice=self.choice + i, num_choices=1) for i in range(self.num_choices))


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """Compute KV for positions `[start, start + num_tokens)` of one sequence.

    `tokens` are the ids at those positions. When `chained`, `tokens` is empty, `num_tokens` is 1, and the id is the
    one that the most recent earlier plan naming this sequence samples. `blocks` covers `[0, start + num_tokens)`.
    `digest_blocks` are those of `blocks` that are complete after this slice and are to be digested for a hand-off.
    The last `num_drafted` tokens are guesses: a slice draws one token more than it guessed right, and the KV of wrong
    guesses is stale, to be written over by the slices that come after.
    `scored` are the known tokens at positions `[start + 1, start + 1 + len(scored))`, to be scored by the slice's first
    rows with `num_top` alternatives each.
    """

    seq: SeqId
    start: int
    num_tokens: int
    tokens: tuple[int, ...]
    blocks: tuple[BlockId, ...]
    sampling: Sampling | None
    chained: bool = False
    digest_blocks: tuple[BlockId, ...] = ()
    num_drafted: int = 0
    scored: tuple[int, ...] = ()
    num_top: int = 0

    @property
    def num_certain(self) -> int:
        """Tokens that are known, not guessed."""
        return self.num_tokens - self.num_drafted

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. `number` rises by one per plan; `slices` holds a sequence at most once, decodes first.
    `digests` are blocks with their places in their prompts, to be digested once copies are made; no slice writes them.

    Before anything is computed whole blocks are copied: `spills` (block, host slot) out of the pool, then `fills` (host
    slot, block) into it, then `copies` (from, to) within it. A plan may do no more than that, and have no slices. No
    slot is in two of its spills, no block in two of its fills; both may name one block or slot."""

    number: int
    slices: tuple[ScheduledSlice, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    spills: tuple[Offload, ...] = ()
    fills: tuple[Onload, ...] = ()
    digests: tuple[tuple[BlockId, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.slices)

    @property
    def num_drafted(self) -> int:
        return sum(s.num_drafted for s in self.slices)

    @property
    def num_host_copies(self) -> int:
        """Blocks that are copied to host memory or back."""
        return len(self.spills) + len(self.fills)

    @property
    def host_copied_blocks(self) -> tuple[BlockId, ...]:
        """Of each copy to host memory or back the block of the pool."""
        return (*(block for block, _ in self.spills), *(block for _, block in self.fills))

    @property
    def host_slots(self) -> tuple[HostSlot, ...]:
        """Of each such copy the slot."""
        return (*(slot for _, slot in self.spills), *(slot for slot, _ in self.fills))

    def __str__(self) -> str:
        parts = ", ".join(f"{s.seq}[{s.start}:{s.stop}){'*' if s.sampling else ''}" for s in self.slices)
        return f"plan {self.number}: {parts}"


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What one slice yielded: its drawn tokens in order, at most `1 + num_drafted`, all but the last of them guessed;
    or one for each choice. `scores` are those of `ScheduledSlice.scored`. `is_complete`: by its grammar nothing may
    follow these tokens, and there is no token that says so. `error_kind` says whose fault an `error` is."""

    seq: SeqId
    tokens: tuple[SampledToken, ...] = ()
    digests: tuple[BlockDigest, ...] = ()
    error: str | None = None
    scores: tuple[SampledToken, ...] = ()
    is_complete: bool = False
    error_kind: ErrorKind = ErrorKind.INTERNAL


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per slice of the plan, in the plan's order, and the plan's digests; none of them where it failed."""

    number: int
    slices: tuple[SliceResult, ...] = field(default=())
    digests: tuple[BlockDigest, ...] = ()

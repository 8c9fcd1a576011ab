"""Define what one step computes (`StepPlan`) and what came out of the computation (`StepResult`).

All values are frozen and hold plain ids and numbers, no `Sequence` and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tandem.core.errors import ErrorKind
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HostSlot, SeqId
from tandem.core.request import SamplingParams
from tandem.kv.handoff import BlockDigest
from tandem.kv.host_offload import Offload, Onload

PrefixBlock = tuple[BlockId, int]
"""A block of a prefix that is served to another worker, and its index in the prompt."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sample one token from the logits of a slice's last certain row, and one from each guessed row after it whose
    token equals the token just sampled.

    `index` is the position of the first sampled token among the choice's output tokens; with `params.seed` and `choice`
    it names the random numbers to use, and each further token has the next index. `prompt` and `output` are all tokens
    before the first sampled one, filled in only where `params.needs_history`. With `num_choices` above one, one token
    is sampled from the same row for each choice in `[choice, choice + num_choices)`, and the slice has no guesses.
    """

    params: SamplingParams
    choice: int
    index: int
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    num_choices: int = 1

    def per_choice(self) -> tuple[Sampling, ...]:
        """Return the sampling of each choice."""
        if self.num_choices == 1:
            return (self,)
        return tuple(replace(self, choice=self.choice + i, num_choices=1) for i in range(self.num_choices))


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """Compute KV for positions `[start, start + num_tokens)` of one sequence.

    `tokens` are the ids at those positions. When `chained`, `tokens` is empty, `num_tokens` is 1, and the id is the one
    that the most recent earlier plan naming this sequence samples. `blocks` covers `[0, start + num_tokens)`.
    `digest_blocks` are those of `blocks` that are complete after this slice and are to be digested for a hand-off. The
    last `num_drafted` tokens are guesses: a slice samples one token more than it guessed right, and the KV of wrong
    guesses is stale until later slices overwrite it. `scored` are the known tokens at positions `[start + 1, start + 1
    + len(scored))`, to be scored by the slice's first rows with `num_top` alternatives each.
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
        """Count the tokens that are known, not guessed."""
        return self.num_tokens - self.num_drafted

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of one forward pass.

    `number` rises by one per plan. `slices` contains a sequence at most once, decodes first. Before anything is
    computed, whole blocks are copied: `spills` (block, host slot) from the pool to host memory, then `fills` (host
    slot, block) back, then `copies` (source, target) within the pool. `digests` are (block, index in its prompt),
    digested after the copies; no slice writes them. A plan may consist of copies and digests only. No slot is in two of
    a plan's spills and no block in two of its fills, but a spill and a fill may name the same block or slot.
    """

    number: int
    slices: tuple[ScheduledSlice, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    spills: tuple[Offload, ...] = ()
    fills: tuple[Onload, ...] = ()
    digests: tuple[PrefixBlock, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.slices)

    @property
    def num_drafted(self) -> int:
        return sum(s.num_drafted for s in self.slices)

    @property
    def num_host_copies(self) -> int:
        """Count the blocks that are copied to host memory or back."""
        return len(self.spills) + len(self.fills)

    @property
    def host_slots(self) -> tuple[HostSlot, ...]:
        """Return the host slot of each copy to host memory or back."""
        return (*(slot for _, slot in self.spills), *(slot for slot, _ in self.fills))

    def __str__(self) -> str:
        parts = ", ".join(f"{s.seq}[{s.start}:{s.stop}){'*' if s.sampling else ''}" for s in self.slices)
        return f"plan {self.number}: {parts}"


@dataclass(frozen=True, slots=True)
class SliceResult:
    """Outcome of one slice.

    `tokens` are the sampled tokens in order, at most `1 + num_drafted`, where all but the last one confirm a guess; or
    one token per choice. `scores` belong to the tokens of `ScheduledSlice.scored`. `is_complete`: the grammar allows no
    further token after these, and they do not include an end-of-sequence token. `error_kind` classifies `error`.
    """

    seq: SeqId
    tokens: tuple[SampledToken, ...] = ()
    digests: tuple[BlockDigest, ...] = ()
    error: str | None = None
    scores: tuple[SampledToken, ...] = ()
    is_complete: bool = False
    error_kind: ErrorKind = ErrorKind.INTERNAL


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one plan: a result per slice in the plan's order, and the plan's digests (none if the step failed)."""

    number: int
    slices: tuple[SliceResult, ...] = field(default=())
    digests: tuple[BlockDigest, ...] = ()

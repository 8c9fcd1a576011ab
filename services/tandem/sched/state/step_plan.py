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
    """Define how a slice samples. The next token of a choice is sampled from the logits of the slice's last known
    token, further tokens from the logits of the guesses (draft tokens of speculative decoding) after it.

    - A guess whose token equals the token just sampled is right, and one more token is sampled after it; sampling ends
      at the first wrong guess.
    - `index`: position of the first sampled token in the choice's output. With `params.seed` and `choice` it determines
      the random numbers; each further token has the next index.
    - `prompt`, `output`: all tokens before the first sampled one, set only where `params.needs_history`.
    - `num_choices`: if above 1, one token is sampled from the same logits for each choice in `[choice, choice +
      num_choices)`, and the slice has no guesses.
    """

    params: SamplingParams
    choice: int
    index: int
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    num_choices: int = 1

    def per_choice(self) -> tuple[Sampling, ...]:
        if self.num_choices == 1:
            return (self,)
        return tuple(replace(self, choice=self.choice + i, num_choices=1) for i in range(self.num_choices))


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """The part of one sequence in a step: compute KV for its positions `[start, start + num_tokens)`.

    - `tokens`: the ids at these positions. `chained`: the id at `start` is not known yet, because the most recent
      earlier plan with this sequence samples it; `tokens` is then empty and `num_tokens` is 1.
    - `blocks`: the KV blocks of positions `[0, start + num_tokens)`. `digest_blocks`: the blocks among them whose
      checksums are to be computed, because other workers read them and their content is final after this slice.
    - `sampling`: how to sample from the result; None: no token is sampled.
    - `num_drafted`: the last `num_drafted` tokens are guesses (draft tokens of speculative decoding). The number of
      sampled tokens is one more than the number of right guesses. The KV of wrong guesses is stale until later slices
      overwrite it.
    - `scored`: the prompt tokens at positions `[start + 1, start + 1 + len(scored))`, whose log probabilities are to be
      returned with `num_top` alternatives each.
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
        """Count the slice's tokens without its draft tokens (`num_drafted`)."""
        return self.num_tokens - self.num_drafted

    @property
    def stop(self) -> int:
        """Return the position after the slice's last token, draft tokens included."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Define everything that one step of the executor does: copies of blocks, a forward pass, and digests.

    - `number`: rises by one per plan. `slices`: the tokens to compute, decodes first, with at most one slice per
      sequence.
    - Before anything is computed, whole blocks are copied in this order: `spills` from the pool to host memory, as
      pairs (block, host slot); `fills` from host memory back to the pool, as pairs (host slot, block); `copies` within
      the pool, as pairs (source, target). No slot is in two spills and no block in two fills of a plan, but a spill and
      a fill may name the same block or slot.
    - `digests`: pairs (block, its index in the prompt). The checksums of these blocks are computed after the copies; no
      slice writes to them.

    A plan may consist of copies and digests only.
    """

    number: int
    slices: tuple[ScheduledSlice, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    spills: tuple[Offload, ...] = ()
    fills: tuple[Onload, ...] = ()
    digests: tuple[PrefixBlock, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Count the tokens that the step computes in all slices, draft tokens of speculative decoding included."""
        return sum(s.num_tokens for s in self.slices)

    @property
    def num_drafted(self) -> int:
        """Count the draft tokens of speculative decoding in all slices."""
        return sum(s.num_drafted for s in self.slices)

    @property
    def num_host_copies(self) -> int:
        """Count the blocks that are copied to host memory or back."""
        return len(self.spills) + len(self.fills)

    @property
    def host_slots(self) -> tuple[HostSlot, ...]:
        """Return the host slot of each copy to or from host memory, once per copy."""
        return (*(slot for _, slot in self.spills), *(slot for slot, _ in self.fills))

    def __str__(self) -> str:
        parts = ", ".join(f"{s.seq}[{s.start}:{s.stop}){'*' if s.sampling else ''}" for s in self.slices)
        return f"plan {self.number}: {parts}"


@dataclass(frozen=True, slots=True)
class SliceResult:
    """Outcome of one slice.

    - `tokens`: the sampled tokens in order. There are at most `1 + num_drafted` of them, and all but the last equal the
      slice's draft tokens. Where `Sampling.num_choices` is above 1, there is one per choice instead.
    - `digests`: checksums of the slice's `digest_blocks`; `scores`: log probabilities of its `scored` tokens.
    - `error`: why the slice could not be computed; None if it was computed. `error_kind`: kind of this error.
    - `is_complete`: whether the output ends with these tokens because the request's grammar allows no further token. No
      end-of-sequence token was sampled then.
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
    """Outcome of the plan with number `number`.

    `slices`: one result per slice, in the order of the plan. `digests`: the checksums of the blocks in
    `StepPlan.digests`; empty if the step failed.
    """

    number: int
    slices: tuple[SliceResult, ...] = field(default=())
    digests: tuple[BlockDigest, ...] = ()

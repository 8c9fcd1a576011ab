"""One choice of one request inside the engine, or several until their first tokens are drawn; only the Scheduler writes
it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from tandem.core.events import FinishReason, SampledToken
from tandem.core.ids import BlockHash, JobKey, SeqId
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.kv.block_pool import BlockTable
from tandem.kv.hashing import chain_hashes, prompt_hashes
from tandem.sched.state.draft_length import AdaptiveDraft
from tandem.sched.state.step_plan import Sampling

Order = tuple[int, int, int]
"""Lane, priority, arrival: the less runs first."""


class Status(Enum):
    """WAITING holds no blocks. PULLING holds blocks that only the transfer writes. CLOSING has ended, but an open
    plan still names it, so its blocks are not given back yet."""

    WAITING = "waiting"
    PULLING = "pulling"
    RUNNING = "running"
    CLOSING = "closing"


class MigrationState(Enum):
    """How far a sequence is on its way to another worker, which reads its blocks from FOLLOWED on. LEAVING: the next
    draw is to be the last here. FROZEN: that draw is planned or made."""

    NONE = "none"
    STREAMING = "followed"
    FINALIZING = "leaving"
    FROZEN = "frozen"


class Sequence:
    """Prompt and output as one list of tokens; KV is complete for `[0, num_computed)` and planned for
    `[num_computed, num_computed + num_in_flight)`. `num_pending` tokens are to be drawn by open plans, for certain;
    `num_drafted` more, whose KV is planned too, only if an open plan's guesses are right. `choices` are those of its
    job that nobody has ended; with the first draw each becomes a sequence of its own."""

    def __init__(self, seq_id: SeqId, job: Job, root: BlockHash, arrival: int, arrived_at: float = 0.0) -> None:
        self.id = seq_id
        self.job = job
        self.key = job.key
        self.choices = list(range(job.choice, job.choice + job.num_choices))
        self.lane = job.request.lane
        self.order: Order = (self.lane, job.request.priority, arrival)
        self.arrived_at = arrived_at
        self.tokens: list[int] = [*job.request.prompt_tokens, *job.output_tokens]
        self.num_prompt = len(job.request.prompt_tokens)
        self.status = Status.WAITING
        self.table = BlockTable()
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_pending = 0
        self.num_drafted = 0
        self.num_open_plans = 0
        self.num_cached = 0
        self.num_digested = 0
        self.migration_state = MigrationState.NONE
        # What was drawn here, where clients want to know its log probabilities: whoever takes it over tells them again.
        self.drawn: list[SampledToken] = []
        # Prompt tokens from the second on whose scores are known.
        self.num_scored = 0
        # Leading blocks that were in the prefix cache when it was last looked at; only ever a guess.
        self.num_hits_seen = 0
        self.was_started = False
        # A Resume waits for its source until the pull may begin, and others for a prefix that another worker has.
        self.may_start = not isinstance(job, ResumeJob)
        # Leading blocks that will be in the prefix cache then; 0: nothing is to be read.
        self.num_remote_prefix_blocks = 0
        # How it guesses ahead, from its first guess on.
        self.drafter: AdaptiveDraft | None = None
        self._root = root
        self._hashes: list[BlockHash] = []

    @property
    def is_pull(self) -> bool:
        """Its KV is to come from elsewhere; a Resume that was preempted computes it here."""
        return isinstance(self.job, ResumeJob) and not self.was_started

    @property
    def keys(self) -> tuple[JobKey, ...]:
        """Of the choices that it stands for."""
        return (
            (self.key,)
            if len(self.job.keys) == 1
            else tuple(self.job.for_choice(choice).key for choice in self.choices)
        )

    @property
    def is_undivided(self) -> bool:
        """It stands for a job of several choices, none of which has a token yet."""
        return self.job.num_choices > 1

    @property
    def num_planned(self) -> int:
        return self.num_computed + self.num_in_flight

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is neither computed nor planned, drawn ones included."""
        return len(self.tokens) + self.num_pending - self.num_computed - self.num_in_flight

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_schedulable(self) -> bool:
        """There is more to plan: more tokens may be drawn than are drawn or planned to be, or the prompt alone is
        wanted. While guesses are open nobody knows where the next begins, and while a draw is open that is more than
        its filters nobody knows its token: devices leave it to their host."""
        sampling = self.job.request.sampling
        is_host_drawing = self.num_pending > 0 and not sampling.is_plain_at(self.num_output + self.num_pending - 1)
        if self.migration_state is MigrationState.FROZEN or self.num_drafted or is_host_drawing:
            return False
        if sampling.max_tokens == 0:
            return self.num_remaining > 0
        limit = sampling.max_tokens
        if isinstance(self.job, PrefillJob) or self.is_undivided:
            limit = min(limit, len(self.job.output_tokens) + 1)
        return self.num_output + self.num_pending < limit

    def sampling_at(self, stop: int) -> Sampling | None:
        """The draw that follows position `stop - 1`, or None while known tokens follow it or none is wanted."""
        sampling = self.job.request.sampling
        if stop < len(self.tokens) + self.num_pending or sampling.max_tokens == 0:
            return None
        job = self.job
        if not sampling.needs_history:
            return Sampling(sampling, job.choice, stop - self.num_prompt, num_choices=job.num_choices)
        output = tuple(self.tokens[self.num_prompt :])
        return Sampling(sampling, job.choice, len(output), job.request.prompt_tokens, output, job.num_choices)

    def take(self, token: SampledToken) -> None:
        """One more token was drawn."""
        self.tokens.append(token.id)
        if self.job.request.sampling.logprobs is not None:
            self.drawn.append(token)

    def output_from(self, index: int) -> tuple[SampledToken, ...]:
        """Output tokens from this index on."""
        if self.drawn:
            return tuple(self.drawn[index - self.num_output :])
        return tuple(SampledToken(token) for token in self.tokens[self.num_prompt + index :])

    def finish_reason(self) -> FinishReason | None:
        """Whether the last drawn token ends the choice, or the prompt where none is wanted."""
        sampling = self.job.request.sampling
        if self.num_output and self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output >= sampling.max_tokens else None

    @property
    def num_to_score(self) -> int:
        """Prompt tokens whose scores are wanted of this job; the first token has none. A Resume's source scores."""
        if self.job.request.prompt_logprobs is None or isinstance(self.job, ResumeJob):
            return 0
        return self.num_prompt - 1

    def scored_in(self, start: int, stop: int) -> tuple[int, ...]:
        """Prompt tokens that are scored by computing `[start, stop)`: those that come after them."""
        if self.num_scored >= self.num_to_score:
            return ()
        return self.job.request.prompt_tokens[start + 1 : stop + 1]

    def become(self, branch: Sequence) -> None:
        """Stand for this one of its branches alone from now on, with all that it holds."""
        self.job, self.key = branch.job, branch.key
        self.choices, self.tokens, self.drawn = branch.choices, branch.tokens, branch.drawn

    def branch(self, choice: int, drawn: Iterable[SampledToken]) -> Sequence:
        """A sequence for one choice of an undivided one, of which these tokens were drawn. It waits, holds nothing, and
        comes right after the choices before it."""
        offset = choice - self.job.choice
        arrival = self.order[-1] + offset
        seq = Sequence(SeqId(self.id + offset), self.job.for_choice(choice), self._root, arrival, self.arrived_at)
        for token in drawn:
            seq.take(token)
        seq.num_cached, seq.num_scored = self.num_cached, self.num_scored
        seq.was_started = seq.may_start = True
        seq.num_hits_seen = self.table.num_published
        seq._hashes += self._hashes
        return seq

    def hashes(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Names of the first `num_blocks` full blocks of the known tokens."""
        if num_blocks and not self._hashes:
            self._hashes += prompt_hashes(self._root, self.job.request, block_size)
        num_hashed = len(self._hashes)
        if num_hashed < num_blocks:
            parent = self._hashes[-1] if self._hashes else self._root
            fresh = self.tokens[num_hashed * block_size : num_blocks * block_size]
            self._hashes += chain_hashes(parent, fresh, block_size)
        return self._hashes[:num_blocks]

    def reusable(self, block_size: int) -> list[BlockHash]:
        """Hashes that a prefix hit may use: at least one token is left to compute, so that a draw has logits, and all
        from whose logits a score is still to come."""
        hashes = self.hashes((len(self.tokens) - 1) // block_size, block_size)
        return hashes if self.num_scored >= self.num_to_score else hashes[: self.num_scored // block_size]

    def __repr__(self) -> str:
        kind = {GenerateJob: "generate", PrefillJob: "prefill", ResumeJob: "resume"}[type(self.job)]
        return (
            f"<seq {self.id} {self.key} {kind} {self.status.value} {len(self.tokens)} tokens, "
            f"{self.num_computed}+{self.num_in_flight} computed, {len(self.table)} blocks>"
        )

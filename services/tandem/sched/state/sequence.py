"""Represent one choice of a request inside the engine, or all choices of a job until their first tokens are sampled.

Only the scheduler, its phases and `engine.migration` change a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from tandem.core.events import FinishReason, LaneYield, Pauses, Preemption, SampledToken, merged_yields
from tandem.core.ids import BlockHash, JobKey, SeqId
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.request_stages import WaitCause
from tandem.kv.block_pool import BlockTable
from tandem.kv.hashing import chain_hashes, prompt_hashes
from tandem.sched.state.draft_length import AdaptiveDraft
from tandem.sched.state.schedule_result import WaitSpan
from tandem.sched.state.step_plan import Sampling

Order = tuple[int, int, int]
"""Lane, priority, arrival number: the sequence with the smallest tuple runs first."""


FIRST_PRIORITY = -(1 << 62)
"""Priority of promoted sequences, which is before all priorities that requests may have."""


MAX_WAITS = 16
"""Most waits that are recorded of a sequence; the last recorded one counts until the sequence starts."""


class Status(Enum):
    """State of a sequence.

    - WAITING: waits in the queue and holds no blocks.
    - PULLING: holds blocks that only the KV transfer writes.
    - RUNNING: holds blocks and is computed on this worker.
    - CLOSING: has ended, but its blocks are not released yet, because they are in a plan whose result is not applied
      yet.
    """

    WAITING = "waiting"
    PULLING = "pulling"
    RUNNING = "running"
    CLOSING = "closing"


class MigrationState(Enum):
    """Progress of the migration of a sequence to another worker.

    - NONE: there is no migration, or the sequence is offered and no other worker has taken up the offer yet.
    - STREAMING: the other worker reads the blocks while the sequence goes on here.
    - FINALIZING: the sequence stops here after its next token, or after a later one if too many of its blocks have no
      digest (checksum) yet.
    - FROZEN: the sequence does not go on here, because its last token is planned or sampled, or because it was
      preempted and is not started again.
    """

    NONE = "none"
    STREAMING = "streaming"
    FINALIZING = "finalizing"
    FROZEN = "frozen"


class Sequence:
    """Hold prompt and output of a job as one list of tokens, with the progress of its computation on this worker.

    Until their first tokens are sampled, one sequence stands for all choices of a job; then it is forked into one
    sequence per choice. A plan is open until its result is applied.

    - `tokens`: ids of the prompt and output tokens, the first `num_prompt` of which are the prompt. `choices`: indices
      of the choices that the sequence stands for and that have not ended.
    - `num_computed`: number of leading tokens whose KV is complete. `num_in_flight`: number of further tokens whose KV
      open plans compute, not counting draft tokens.
    - `num_pending`: number of tokens that open plans sample for certain. `num_drafted`: number of draft tokens
      (guesses) in open plans. Their KV is computed too, but they count only if they turn out right.
    - `num_cached`: number of tokens that were prefix-cache hits when the sequence first started. `num_digested`: number
      of leading blocks whose checksums are computed or planned.
    - `order`: position in the queues; a promoted sequence is before all others, whatever its `lane`.
    - `table`: the KV blocks of the sequence. `num_open_plans`: number of open plans that contain the sequence.
    - `may_start`: False while the sequence has to stay in the queue: a `ResumeJob` until its producer offers KV, any
      other job while a prefix is fetched for it, and a preempted sequence that another worker takes over.
    """

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
        # Times that it yielded its seat to a sequence of a more urgent lane.
        self.num_yields = 0
        # Pauses, and sequences that yielded to this one, that no update has reported yet.
        self.preemption: Preemption | None = None
        # Prompt tokens to compute before its own when it arrived.
        self.num_tokens_ahead = 0
        # What it has waited for until its first start, each with the time from which on.
        self._waits: list[tuple[WaitCause, float]] = []
        self.num_cached = 0
        self.num_digested = 0
        self.migration_state = MigrationState.NONE
        # Tokens sampled here, kept only where the request wants log probabilities: a worker that takes the sequence
        # over repeats them to the client.
        self.sampled: list[SampledToken] = []
        # Number of prompt tokens, from the second one on, whose scores are known.
        self.num_scored = 0
        # Leading blocks that were in the prefix cache at the last lookup; an estimate, since blocks may be evicted.
        self.num_hits_seen = 0
        self.was_started = False
        # False while a ResumeJob waits for its producer, and while any other job waits for a prefix.
        self.may_start = not isinstance(job, ResumeJob)
        # Leading blocks that will be in the prefix cache once a prefix was fetched; 0: nothing to fetch.
        self.num_awaited_blocks = 0
        # State of speculation, created with the first guess.
        self.adaptive_draft: AdaptiveDraft | None = None
        self._root = root
        self._hashes: list[BlockHash] = []

    @property
    def served_lane(self) -> int:
        """Return the lane in whose place the sequence is served: INTERACTIVE for a promoted sequence, else its own
        `lane`."""
        return self.order[0]

    @property
    def is_promoted(self) -> bool:
        """Return whether the sequence is served before all that are not promoted. It is promoted when it has waited for
        `max_lane_pause_s` seconds after a preemption, or after a fork that left it without a seat."""
        return self.order[1] == FIRST_PRIORITY

    @property
    def is_pull(self) -> bool:
        """Return whether the KV of this sequence is still to be pulled from a producer, and no blocks are allocated for
        it yet.

        A `ResumeJob` that was preempted after its start recomputes its KV here instead.
        """
        return isinstance(self.job, ResumeJob) and not self.was_started

    @property
    def keys(self) -> tuple[JobKey, ...]:
        """Return the job key of each choice that has not ended."""
        if not self.is_unforked:
            return (self.key,)
        return tuple(self.job.for_choice(choice).key for choice in self.choices)

    @property
    def is_unforked(self) -> bool:
        """Return whether the sequence still stands for all choices of a job with several choices, because their first
        tokens have not been sampled yet."""
        return self.job.num_choices > 1

    @property
    def num_planned(self) -> int:
        """Count the tokens whose KV is computed or planned, without guesses."""
        return self.num_computed + self.num_in_flight

    @property
    def num_remaining(self) -> int:
        """Count the tokens whose KV is neither computed nor planned, including tokens that open plans will sample. The
        number is 1 for a sequence that decodes."""
        return len(self.tokens) + self.num_pending - self.num_computed - self.num_in_flight

    @property
    def num_output(self) -> int:
        """Count the output tokens, including those of earlier attempts."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_schedulable(self) -> bool:
        """Return whether the next plan may contain this sequence.

        True if tokens are left to sample or, with `max_tokens=0`, to compute. False while guesses are in open plans
        (the position of the next token is unknown), while an open plan samples a token that the host chooses from the
        logits (its id does not exist on the device), and after the last token before a migration.
        """
        sampling = self.job.request.sampling
        is_host_sampling = self.num_pending > 0 and not sampling.is_plain_at(self.num_output + self.num_pending - 1)
        if self.migration_state is MigrationState.FROZEN or self.num_drafted or is_host_sampling:
            return False
        if sampling.max_tokens == 0:
            return self.num_remaining > 0
        limit = sampling.max_tokens
        if isinstance(self.job, PrefillJob) or self.is_unforked:
            limit = min(limit, len(self.job.output_tokens) + 1)
        return self.num_output + self.num_pending < limit

    def sampling_at(self, stop: int) -> Sampling | None:
        """Return how to sample the token at position `stop` of the sequence; None where it must not be sampled.

        It must not be sampled if it is known already, if an open plan samples it, or if the request has `max_tokens=0`.
        """
        sampling = self.job.request.sampling
        if stop < len(self.tokens) + self.num_pending or sampling.max_tokens == 0:
            return None
        job = self.job
        if not sampling.needs_history:
            return Sampling(sampling, job.choice, stop - self.num_prompt, num_choices=job.num_choices)
        output = tuple(self.tokens[self.num_prompt :])
        return Sampling(sampling, job.choice, len(output), job.request.prompt_tokens, output, job.num_choices)

    def add_pause(self, seconds: float) -> None:
        """Record that the sequence was paused for `seconds` seconds and goes on now. Its next update reports it."""
        before = self.preemption or Preemption()
        self.preemption = before._replace(pauses=Pauses.sum((before.pauses, Pauses(1, seconds))))

    def add_yield(self, victim: Sequence) -> None:
        """Record that the running sequence `victim` is preempted so that this sequence gets its seat and blocks. The
        next update of this sequence reports it."""
        before = self.preemption or Preemption()
        given_up = LaneYield(victim.lane, 1, victim.num_computed, len(victim.table))
        self.preemption = before._replace(yields=merged_yields((*before.yields, given_up)))

    def take_preemption(self) -> Preemption | None:
        """Return and forget what `add_pause` and `add_yield` have recorded since the last call; None if they recorded
        nothing."""
        preemption, self.preemption = self.preemption, None
        return preemption

    def wait_for(self, cause: WaitCause, now: float) -> None:
        """Record that the sequence waits for `cause` from `now` on, in seconds of the caller's clock.

        Does nothing for a sequence that was started before, for the cause that was recorded last, and after MAX_WAITS
        records.
        """
        waits = self._waits
        if not self.was_started and not (waits and waits[-1][0] is cause) and len(waits) < MAX_WAITS:
            waits.append((cause, now))

    def take_waits(self, now: float) -> tuple[WaitSpan, ...]:
        """Return and forget the recorded waits, in order: each ends when the next one begins, the last one at `now`.

        Empty where nothing was recorded, and after the first call, because only waits before the first start are
        recorded.
        """
        if not self._waits:
            return ()
        waits, self._waits = self._waits, []
        ends = [begin for _, begin in waits[1:]] + [now]
        return tuple(
            WaitSpan(cause, begin, end, self.num_tokens_ahead if cause is WaitCause.PROMPTS_AHEAD else 0)
            for (cause, begin), end in zip(waits, ends, strict=True)
        )

    def append(self, token: SampledToken) -> None:
        self.tokens.append(token.id)
        if self.job.request.sampling.logprobs is not None:
            self.sampled.append(token)

    def output_from(self, index: int) -> tuple[SampledToken, ...]:
        """Return the output tokens from output position `index` on, with log probabilities where the request asks for
        them."""
        if self.sampled:
            return tuple(self.sampled[index - self.num_output :])
        return tuple(SampledToken(token) for token in self.tokens[self.num_prompt + index :])

    def finish_reason(self) -> FinishReason | None:
        """Return why the choice ends with its last token; None if it has not ended. With `max_tokens=0` it ends with
        the prompt."""
        sampling = self.job.request.sampling
        if self.num_output and self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output >= sampling.max_tokens else None

    @property
    def num_to_score(self) -> int:
        """Count the prompt tokens whose log probabilities this job has to compute: all but the first one, or 0 where
        the request has no `prompt_logprobs`. It is 0 for a `ResumeJob` too, because its producer computes them."""
        if self.job.request.prompt_logprobs is None or isinstance(self.job, ResumeJob):
            return 0
        return self.num_prompt - 1

    def scored_in(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the ids of the prompt tokens whose log probabilities follow from computing positions `[start, stop)`.

        These are the tokens at positions `[start + 1, stop + 1)`, because the logits of a position predict the next
        token. The result is empty if the request asks for no log probabilities of its prompt, or if all are known.
        """
        if self.num_scored >= self.num_to_score:
            return ()
        return self.job.request.prompt_tokens[start + 1 : stop + 1]

    def narrow_to(self, branch: Sequence) -> None:
        """Reduce this sequence, which stands for several choices, to the choice of the sequence `branch`, with the
        tokens of `branch`. The blocks and the progress of this sequence stay."""
        self.job = branch.job
        self.key = branch.key
        self.choices = branch.choices
        self.tokens = branch.tokens
        self.sampled = branch.sampled

    def fork_choice(self, choice: int, sampled: Iterable[SampledToken]) -> Sequence:
        """Return a new sequence for one choice of this sequence, with `sampled` as its first output tokens.

        The new sequence is WAITING and holds no blocks. In the order of service it comes directly after the choices
        with smaller indices.
        """
        offset = choice - self.job.choice
        arrival = self.order[-1] + offset
        seq = Sequence(SeqId(self.id + offset), self.job.for_choice(choice), self._root, arrival, self.arrived_at)
        for token in sampled:
            seq.append(token)
        seq.num_cached = self.num_cached
        seq.num_yields = self.num_yields
        seq.order = (*self.order[:2], seq.order[2])
        seq.num_scored = self.num_scored
        seq.was_started = True
        seq.may_start = True
        seq.num_hits_seen = self.table.num_published
        seq._hashes += self._hashes
        return seq

    def hashes(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Return the hashes of the first `num_blocks` full blocks of the sequence; each hash covers all tokens up to
        the end of its block."""
        if num_blocks and not self._hashes:
            self._hashes += prompt_hashes(self._root, self.job.request, block_size)
        num_hashed = len(self._hashes)
        if num_hashed < num_blocks:
            parent = self._hashes[-1] if self._hashes else self._root
            fresh = self.tokens[num_hashed * block_size : num_blocks * block_size]
            self._hashes += chain_hashes(parent, fresh, block_size)
        return self._hashes[:num_blocks]

    def reusable(self, block_size: int) -> list[BlockHash]:
        """Return the hashes of the leading blocks that may be taken from the prefix cache instead of being computed.

        At least the last token is always computed, since sampling needs its logits, and so are all tokens whose
        logits are still needed for prompt log probabilities.
        """
        hashes = self.hashes((len(self.tokens) - 1) // block_size, block_size)
        return hashes if self.num_scored >= self.num_to_score else hashes[: self.num_scored // block_size]

    def __repr__(self) -> str:
        kind = {GenerateJob: "generate", PrefillJob: "prefill", ResumeJob: "resume"}[type(self.job)]
        return (
            f"<seq {self.id} {self.key} {kind} {self.status.value} {len(self.tokens)} tokens, "
            f"{self.num_computed}+{self.num_in_flight} computed, {len(self.table)} blocks>"
        )

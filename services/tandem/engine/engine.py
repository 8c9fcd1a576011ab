"""One worker's step: scheduler, leases and pulls joined into begin and finish; never does I/O or reads a clock.

Whatever comes in (jobs, messages of peers, results, time) is a method; whatever is to be done comes out as effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, KVFact, PromptScored, Token, Tokens
from tandem.core.ids import HandoffKey, JobKey, WorkerRef
from tandem.core.load import Books, Load
from tandem.core.request import Job, Prefill, Resume
from tandem.engine.accounts import books, load, pulled_event
from tandem.engine.effects import Effect, Emit, Follow, Renew, Unfollow
from tandem.engine.giver import Giver
from tandem.engine.job_table import JobTable
from tandem.kv.handoff import Announcement
from tandem.kv.pool import BlockPool, Holder
from tandem.kv.pull_book import Arrived, Lost, Pull, PullBook, PullOutcome, ReadEnded, StartRead, Teardown
from tandem.sched.outcome import Progress
from tandem.sched.pacer import Pacer
from tandem.sched.plan import StepPlan, StepResult
from tandem.sched.policy import SchedulerLimits
from tandem.sched.run import DecodeRun
from tandem.sched.scheduler import Scheduler
from tandem.sched.speculate import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffLimits:
    """Seconds; see `HandoffConfig`. `block_bytes` only turns blocks into bytes in reports."""

    lease_s: float = 10.0
    pull_timeout_s: float = 30.0
    drain_timeout_s: float = 10.0
    block_bytes: int = 0


class Engine:
    """All of one worker that decides. `begin` and `finish` alternate, with up to `plan_depth` plans open.

    `num_preempted` counts sequences that had to give their blocks up, since the start. Without `speculation` a step
    draws at most one token of a sequence.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        handoff: HandoffLimits,
        model_fingerprint: str,
        *,
        plan_depth: int = 1,
        speculation: Speculation | None = None,
    ) -> None:
        self._pool = pool
        self._scheduler = Scheduler(pool, limits, model_fingerprint, speculation)
        self._giver = Giver(pool, handoff.lease_s)
        self._pulls = PullBook(pull_timeout_s=handoff.pull_timeout_s, drain_timeout_s=handoff.drain_timeout_s)
        self._jobs = JobTable()
        self._handoff = handoff
        self._plan_depth = plan_depth
        self._next_renewal = 0.0
        self.draining = False
        self.num_preempted = 0

    # ---- jobs

    def submit(self, job: Job, now: float) -> list[Effect]:
        """Accept a job, or raise TandemError and keep nothing of it. The same job again is accepted and changes
        nothing; a newer attempt ends the older one, and choices that were cancelled before they came end at once."""
        met = self._jobs.examine(job)
        if met is None:
            return []
        fenced, forbidden = met
        if self.draining:
            raise TandemError(ErrorKind.DRAINING, "this worker takes no new work", retry_after_s=1.0)
        if isinstance(job, Resume) and self._pulls.find(job.offer) is not None:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"another job pulls {job.offer} already")
        self._jobs.forget(now)
        self._scheduler.add(job, now)
        effects = self._promise(job, now) if isinstance(job, Prefill) else []
        effects += [effect for older in fenced for effect in self.cancel(older, now)]
        self._jobs.add(job)
        if isinstance(job, Resume):
            if not len(self._pulls):
                self._next_renewal = max(self._next_renewal, now + self._handoff.lease_s / 3)
            self._pulls.open(job.offer, job.key, job.source, now)
            effects.append(Follow(job.source, job.offer))
        return effects + [effect for key in forbidden for effect in self.cancel(key, now)]

    def cancel(self, key: JobKey, now: float) -> list[Effect]:
        """End one choice of a job, with the last one the job; what is not here is refused should it come."""
        job = self._jobs.find(key)
        if job is None:
            if not self._jobs.is_known(key):
                self._jobs.forbid(key, now)
            return []
        if self._jobs.live_keys(job.key) == [key]:
            return [*self._stop(job, now, ErrorKind.CANCELLED, "cancelled"), Emit(Cancelled(key))]
        self._drop([key], now)
        return [Emit(Cancelled(key))]

    # ---- the step

    def begin(self, now: float) -> tuple[StepPlan | None, list[Effect]]:
        """Plan the next step; None when there is nothing to compute or enough plans are open."""
        if self._scheduler.num_open_plans >= self._plan_depth:
            return None, []
        planned = self._scheduler.plan(now)
        self.num_preempted += planned.num_preempted
        effects: list[Effect] = []
        for offer in planned.offers:
            job = self._jobs.named(offer.key)
            assert isinstance(job, Prefill)
            self._giver.start(job, offer.blocks)
        for grant in planned.pulls:
            effects += self._carry_out(
                self._pulls.granted(grant.key, grant.blocks, grant.num_hit_blocks, grant.num_known_blocks, now), now
            )
        return planned.step, effects

    def finish(self, result: StepResult, now: float) -> list[Effect]:
        """Take in what a plan yielded; plans finish in the order in which they began."""
        effects: list[Effect] = []
        for progress in self._scheduler.commit(result):
            if progress.scores:
                name = (self._jobs.live_keys(progress.key) or [progress.key])[0]
                effects.append(Emit(PromptScored(name, progress.first_scored, progress.scores)))
            for part in progress.parts:
                effects += _tokens(part)
            if isinstance(progress.job, Prefill):
                effects += self._giver.offer(progress.job, progress, now)
            effects += self._settle(progress, now)
        return effects

    def run(self, limit: int) -> DecodeRun | None:
        """What `begin` would plan next, as far as that is the same decodes over and over; changes nothing."""
        return self._scheduler.run(limit)

    def finish_run(self, run: DecodeRun, drawn: Sequence[Sequence[int]]) -> list[Tokens]:
        """Take in a run's first steps: as many tokens of each of its sequences, in its order. No sequence ends."""
        return self._scheduler.commit_run(run, drawn)

    # ---- the giver's side of hand-offs

    def follow(self, key: HandoffKey, taker: WorkerRef, now: float) -> list[Effect]:
        """A taker wants a hand-off's announcements, from the first on."""
        return self._giver.follow(key, taker, now)

    def renew(self, keys: Iterable[HandoffKey], taker: WorkerRef, now: float) -> list[Effect]:
        """A taker needs more time; `now` is the moment of the answer."""
        return self._giver.renew(keys, taker, now)

    def release(self, key: HandoffKey, now: float) -> list[Effect]:
        """A taker or gateway needs the KV no more; a prefill that is still running for it ends."""
        name = self._giver.release(key, now)
        return [] if name is None else self._cancel_all(name, now)

    # ---- the taker's side

    def announced(self, message: Announcement, now: float) -> list[Effect]:
        """The source completed blocks. The token that it drew goes out at once; it never waits for the KV."""
        pull = self._pulls.find(message.key)
        if pull is None:
            return []
        job = self._jobs.named(pull.job)
        assert isinstance(job, Resume)
        num_drawn, keys = len(message.first_tokens), self._jobs.live_keys(job.key)
        if num_drawn not in (0, job.num_choices):
            reason = f"the source drew {num_drawn} first tokens for {job.num_choices} choices"
            return self._carry_out(self._pulls.abandon(pull.job, ErrorKind.KV_LOST, reason, now), now)
        self._scheduler.may_pull(keys[0])
        effects = _first_tokens(job, keys, message) if not pull.first_tokens else []
        return effects + self._carry_out(self._pulls.announced(message, now), now)

    def handoff_ended(self, key: HandoffKey, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        """The source ended a hand-off before it was taken. CANCELLED says that nothing is left to be taken."""
        pull = self._pulls.find(key)
        return [] if pull is None else self._carry_out(self._pulls.abandon(pull.job, kind, message, now), now)

    def renewed(self, keys: tuple[HandoffKey, ...], sent_at: float, lease_s: float) -> None:
        """The source answered a Follow or Renew that was sent at `sent_at`."""
        self._pulls.renewed(keys, sent_at, lease_s)

    def read_done(self, read: int, now: float) -> list[Effect]:
        return self._carry_out(self._pulls.read_done(read, now), now)

    def read_failed(self, read: int, reason: str, *, drained: bool, now: float) -> list[Effect]:
        return self._carry_out(self._pulls.read_failed(read, reason, drained=drained, now=now), now)

    def source_lost(self, source: WorkerRef, reason: str, now: float) -> list[Effect]:
        """A source cannot be reached at all; reads under way go on until the transport says otherwise."""
        return self._carry_out(self._pulls.source_lost(source, reason, now), now)

    def peer_lost(self, source: WorkerRef, reason: str, *, proven: bool, now: float) -> list[Effect]:
        """The transport gave a peer up; `proven`: none of its reads can still write."""
        return self._carry_out(self._pulls.peer_lost(source, reason, proven=proven, now=now), now)

    def take_facts(self) -> list[KVFact]:
        """As `BlockPool.take_facts`."""
        return self._pool.take_facts()

    # ---- time

    def tick(self, now: float) -> list[Effect]:
        """Enforce deadlines; to be called several times per second whether or not there is work."""
        lapsed, effects = self._giver.lapse(now)
        for job in (job for key in lapsed if (job := self._jobs.named(key)) is not None):
            effects += self._fail(job, ErrorKind.KV_LOST, "nobody renewed the lease of this prefill", now)
        effects += self._carry_out(self._pulls.tick(now), now)
        if now >= self._next_renewal:
            self._next_renewal = now + self._handoff.lease_s / 3
            effects += _renewals(self._pulls.live())
        self._jobs.forget(now)
        return effects

    def next_deadline(self) -> float:
        """Before it `tick` has nothing to do, if nothing comes. In the past: it is to look each time."""
        due = min(self._giver.next_lapse(), self._pulls.next_deadline())
        return min(due, self._next_renewal) if len(self._pulls) else due

    # ---- books

    @property
    def pacer(self) -> Pacer:
        """Drivers tell it how long steps took; the sizes of later steps follow from that."""
        return self._scheduler.pacer

    @property
    def is_idle(self) -> bool:
        """Nothing is running, offered or being read."""
        return not (len(self._jobs) or self._scheduler.num_sequences or len(self._giver) or self._pulls.num_reads)

    @property
    def num_live(self) -> int:
        """Jobs and leases that a drain waits for."""
        return len(self._jobs) + len(self._giver)

    @property
    def is_moving(self) -> bool:
        """A lease or a read is open, so the transport must be polled often."""
        return len(self._giver) > 0 or len(self._pulls) > 0 or self._pulls.num_reads > 0

    def live_jobs(self) -> list[JobKey]:
        """Every choice that has not ended."""
        return self._jobs.keys()

    def load(self) -> Load:
        return load(self._scheduler, self._pool, self.draining)

    def books(self) -> Books:
        return books(self._pool, self._scheduler, self._giver, self._pulls)

    def check(self) -> None:
        """Re-add all books. Raises AssertionError naming what is off."""
        self._scheduler.check()
        tables, copied = self._scheduler.tables(), self._scheduler.copied_blocks()
        pinned = self._scheduler.copied_slots()
        self._pool.check(tables, self._giver.blocks(), self._pulls.blocks(), copied, pinned)
        keys = {job.key for job in self._jobs}
        for lease in self._giver:
            assert len(lease.blocks) or lease.job in keys, f"{lease!r} has neither blocks nor a job"
        for pull in self._pulls.live():
            assert pull.job in keys, f"{pull!r} has no job"

    def __repr__(self) -> str:
        return f"<engine {len(self._jobs)} jobs, {len(self._giver)} leases, {self._scheduler!r}, {self._pool!r}>"

    # ---- inside

    def _settle(self, progress: Progress, now: float) -> list[Effect]:
        ended = [part for part in progress.parts if part.has_ended]
        for part in ended:
            self._jobs.end(part.key, now)
        return [Emit(_ending(part)) for part in ended]

    def _carry_out(self, outcomes: Sequence[PullOutcome], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for outcome in outcomes:
            match outcome:
                case StartRead():
                    self._pool.retain(outcome.local, Holder.READ)
                    effects.append(outcome)
                case ReadEnded():
                    self._pool.drop(outcome.blocks, Holder.READ)
                case Arrived():
                    effects += self._take_in(outcome, now)
                case Lost():
                    effects += self._lose(outcome, now)
                case Teardown():
                    effects.append(outcome)
        return effects

    def _take_in(self, arrived: Arrived, now: float) -> list[Effect]:
        progress = self._scheduler.kv_arrived(arrived.job, arrived.first_tokens, arrived.num_cached)
        pulled = pulled_event(progress.parts[0].key, arrived, self._pool.block_size, self._handoff.block_bytes)
        return [Unfollow(arrived.source, arrived.key), Emit(pulled), *self._settle(progress, now)]

    def _lose(self, lost: Lost, now: float) -> list[Effect]:
        job = self._jobs.named(lost.job)
        assert job is not None, f"{lost.job} pulled without a job"
        keys = self._jobs.live_keys(job.key)
        self._drop(keys, now)
        return [Unfollow(lost.source, lost.key), *(Emit(_loss(key, job, lost)) for key in keys)]

    def _stop(self, job: Job, now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        """End a job and its hand-off without a word to its gateway."""
        effects: list[Effect] = []
        if isinstance(job, Resume) and self._pulls.of_job(job.key) is not None:
            self._pulls.abandon(job.key, kind, reason, now)
            effects.append(Unfollow(job.source, job.offer))
        if isinstance(job, Prefill):
            effects += self._giver.withdraw(job.offer, kind, reason, now)
        self._drop(self._jobs.live_keys(job.key), now)
        return effects

    def _drop(self, keys: Iterable[JobKey], now: float) -> None:
        for key in keys:
            self._scheduler.cancel(key)
            self._jobs.end(key, now)

    def _cancel_all(self, name: JobKey, now: float) -> list[Effect]:
        return [effect for key in self._jobs.live_keys(name) for effect in self.cancel(key, now)]

    def _fail(self, job: Job, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        keys = self._jobs.live_keys(job.key)
        return [*self._stop(job, now, kind, message), *(Emit(Failed(key, kind, message)) for key in keys)]

    def _promise(self, job: Prefill, now: float) -> list[Effect]:
        """Open the lease of a job that the scheduler has taken; one whose hand-off it fences ends."""
        try:
            older, effects = self._giver.promise(job, now)
        except TandemError:
            for key in job.keys:
                self._scheduler.cancel(key)
            raise
        return effects if older is None else [*effects, *self._cancel_all(older, now)]


def _tokens(part: Progress) -> list[Effect]:
    first = part.first_index
    told = part.num_cached if first == len(part.job.output_tokens) else None
    return [Emit(Token(part.key, first + i, token, None if i else told)) for i, token in enumerate(part.tokens)]


def _ending(part: Progress) -> Finished | Failed:
    if part.error is not None:
        return Failed(part.key, part.error_kind, part.error)
    return Finished(part.key, part.finish, part.num_output, part.num_cached)


def _loss(key: JobKey, job: Job, lost: Lost) -> Finished | Failed:
    """The end of a job whose KV does not come. Where the source has nothing left to hand over, its own word to the
    gateway ends the request; ours may come first, so it must not be an error."""
    if lost.kind is ErrorKind.CANCELLED:
        return Finished(key, None, len(job.output_tokens), 0)
    return Failed(key, lost.kind, lost.message)


def _first_tokens(job: Job, keys: Iterable[JobKey], message: Announcement) -> list[Effect]:
    """Those of the choices that are live, where the source has drawn."""
    index = len(job.output_tokens)
    drawn = dict(enumerate(message.first_tokens, job.choice))
    return [Emit(Token(key, index, drawn[key.choice], message.num_cached)) for key in keys if drawn]


def _renewals(pulls: Iterable[Pull]) -> list[Effect]:
    """One Renew per source, for all that is pulled from it."""
    keys: dict[WorkerRef, list[HandoffKey]] = {}
    for pull in pulls:
        keys.setdefault(pull.source, []).append(pull.key)
    return [Renew(source, tuple(mine)) for source, mine in keys.items()]

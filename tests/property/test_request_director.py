"""Test the request director under random requests, reports, failures, losses, cancellations and time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.admission.tenant import Tenant
from tandem.core.config import Disaggregation, GatewayConfig, Pool
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import (
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    JobEvent,
    KVReceived,
    MigrationOffered,
    Preempted,
    SampledToken,
    Token,
)
from tandem.core.ids import HandoffId, HandoffKey, Incarnation, JobKey, RequestId, TenantId, WorkerId, WorkerRef
from tandem.core.lane import ALL_LANES, Lane
from tandem.core.request import Job, PrefillJob, Request, ResumeJob, SamplingParams
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration.commands import CancelJob, Command, EndRequest, OfferMigration, SubmitJob
from tandem.orchestration.director import KV_PERIOD_S, OpenRequest, RequestDirector
from tandem.orchestration.job_group import JobGroupPhase
from tandem.routing.placement import Placement
from tandem.routing.worker_view import WorkerView
from tests.effort import effort
from tests.unit.orchestration.known_workers import BookedWorkers

_POOLS: tuple[Pool, ...] = ("prefill", "decode", "mixed")
_LANES = (ALL_LANES, ALL_LANES, frozenset({Lane.BATCH}), frozenset({Lane.INTERACTIVE, Lane.STANDARD}))
_KINDS = st.tuples(st.sampled_from(_POOLS), st.sampled_from(_LANES))
CONFIG = GatewayConfig(
    max_queued=4, max_retries=2, progress_timeout_s=5.0, queue_timeout_s=8.0, no_worker_wait_s=3.0,
    early_rejection="on", kv_time_tokens=100.0, rebalance="on", rebalance_max_moves=50,
)  # fmt: skip
REFUSALS = (ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.WORKER_LOST, ErrorKind.CONTEXT_LENGTH)
FAILURES = (ErrorKind.KV_LOST, ErrorKind.INTERNAL, ErrorKind.DRAINING, ErrorKind.CONTEXT_LENGTH)


def token_of(request: RequestId, choice: int, index: int) -> int:
    """Return the one token that a choice may have at an index, whoever samples it."""
    return (hash((request, choice)) + 31 * index) % 50_000


@dataclass(eq=False)
class _RunningJob:
    """A job at a worker. `next_index`: of each choice that has not ended there; `is_accepted`: its worker has
    answered."""

    worker: WorkerRef
    job: Job
    next_index: dict[int, int] = field(default_factory=dict)
    is_accepted: bool = False
    has_kv: bool = True


class DirectorMachine(RuleBasedStateMachine):
    @initialize(num_workers=st.integers(1, 5), wake_timeout_s=st.sampled_from([0.0, 5.0]), data=st.data())
    def start(self, num_workers: int, wake_timeout_s: float, data: st.DataObject) -> None:
        self.now = 0.0
        self.num_lives = 0
        self.num_requests = 0
        self.workers = BookedWorkers([self.new_view(data.draw(_KINDS)) for _ in range(num_workers)])
        config = replace(CONFIG, wake_timeout_s=wake_timeout_s)
        self.director = RequestDirector(self.workers, config, lambda request: HandoffId(f"h{request}"))
        self.jobs: list[_RunningJob] = []
        self.ordered: list[tuple[WorkerRef, JobKey]] = []  # choices that their worker is to offer
        self.offered: set[HandoffKey] = set()  # KV that a source has computed for a consumer
        self.open: dict[RequestId, OpenRequest] = {}
        self.reserved: dict[RequestId, int] = {}
        self.settled: dict[RequestId, int] = {}
        self.tokens: dict[tuple[RequestId, int], list[int]] = defaultdict(list)
        self.choice_ends: set[tuple[RequestId, int]] = set()
        self.worker_s: dict[RequestId, float] = defaultdict(float)

    def new_view(self, kind: tuple[Pool, frozenset[Lane]]) -> WorkerView:
        self.num_lives += 1
        name = f"w{self.num_lives}"
        load = WorkerLoad(num_blocks=100, num_free_blocks=100)
        ref = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")
        cost = StepCost(0.01, 0.001, 0.001, 0.0, 0.0)
        return WorkerView(
            ref, kind[0], "m", "f", load, step_cost=cost, block_size=4, block_bytes=64, lanes=kind[1], max_num_seqs=4
        )  # fmt: skip

    # ---- requests

    @rule(
        num_prompt=st.integers(1, 40),
        max_tokens=st.sampled_from([1, 2, 6, 60, 60]),
        num_choices=st.sampled_from([1, 1, 2, 3]),
        lane=st.sampled_from(list(Lane)),
        tenant=st.sampled_from(["a", "b"]),
        timeout_s=st.sampled_from([None, None, 0.5, 4.0]),
        policy=st.sampled_from([None, "off", "prefer", "strict"]),
    )
    def submit(
        self, num_prompt: int, max_tokens: int, num_choices: int, lane: Lane, tenant: str, timeout_s: float | None,
        policy: Disaggregation | None,
    ) -> None:  # fmt: skip
        self.num_requests += 1
        request = Request(
            id=RequestId(f"r{self.num_requests}"), model="m", prompt_tokens=tuple(range(num_prompt)), lane=lane,
            tenant=TenantId(tenant), sampling=SamplingParams(max_tokens=max_tokens), num_choices=num_choices,
        )  # fmt: skip
        owner = Tenant(id=TenantId(tenant), disaggregation=policy)
        self.reserved[request.id] = num_prompt
        try:
            admitted = self.director.submit(request, self.now, owner, timeout_s=timeout_s)
        except TandemError:
            self.settled[request.id] = self.reserved[request.id]
            return
        self.open[request.id] = admitted.open_request
        self.execute(admitted.commands)

    @rule(data=st.data())
    @precondition(lambda self: len(self.workers.views) > 1)
    def probe(self, data: st.DataObject) -> None:
        pair = data.draw(st.permutations(sorted(self.workers.views)))[:2]
        self.num_requests += 1
        request = Request(
            id=RequestId(f"probe{self.num_requests}"),
            model="m",
            prompt_tokens=(0,),
            sampling=SamplingParams(max_tokens=2),
        )
        admitted = self.director.probe(request, Placement(*pair), self.now)
        self.open[request.id] = admitted.open_request
        self.reserved[request.id] = 1
        self.execute(admitted.commands)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.open)))
        self.execute(self.director.cancel(request, self.now))
        assert request not in self.open

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def finish_choice(self, data: st.DataObject) -> None:
        request = self.open[data.draw(st.sampled_from(sorted(self.open)))].state.request
        choice = data.draw(st.integers(0, request.num_choices - 1))
        self.choice_ends.add((request.id, choice))  # its client takes nothing more of it
        self.execute(self.director.finish(request.id, choice, self.now))

    # ---- workers

    @rule(data=st.data(), refusal=st.sampled_from([None, None, None, *REFUSALS]))
    @precondition(lambda self: any(not job.is_accepted for job in self.jobs))
    def answer(self, data: st.DataObject, refusal: ErrorKind | None) -> None:
        submitted = data.draw(st.sampled_from([job for job in self.jobs if not job.is_accepted]))
        error = None if refusal is None else TandemError(refusal, "refused")
        submitted.is_accepted = True
        if refusal is not None and refusal is not ErrorKind.WORKER_LOST:
            self.jobs.remove(submitted)
        self.execute(self.director.on_submit_result(submitted.worker, submitted.job.key, error, self.now))

    @rule(data=st.data(), num_tokens=st.integers(1, 3), repeats=st.booleans())
    @precondition(lambda self: any(job.next_index and job.has_kv for job in self.jobs))
    def sample(self, data: st.DataObject, num_tokens: int, repeats: bool) -> None:
        """A job samples tokens, perhaps its last ones; a message may be repeated after a stream was opened anew."""
        job = data.draw(st.sampled_from([job for job in self.jobs if job.next_index and job.has_kv]))
        choice = data.draw(st.sampled_from(sorted(job.next_index)))
        key, request = job.job.key._replace(choice=choice), job.job.request
        first, most = job.next_index[choice], request.sampling.max_tokens
        last = min(first + (1 if isinstance(job.job, PrefillJob) else num_tokens), most)
        events: list[JobEvent] = [
            Token(key, i, SampledToken(token_of(request.id, choice, i)), num_cached_tokens=0 if i == first else None)
            for i in range(first, last)
        ]
        job.next_index[choice] = last
        if isinstance(job.job, PrefillJob):
            self.offered.add(job.job.offer)
        if isinstance(job.job, PrefillJob) or last == most:
            reason = FinishReason.LENGTH if last == most and not isinstance(job.job, PrefillJob) else None
            events.append(Finished(key, reason, last, 0))
            self.leave(job, choice)
        for _ in range(1 + repeats):
            self.execute(self.director.on_worker_events(job.worker, events, self.now))

    @rule(data=st.data(), kind=st.sampled_from([None, *FAILURES]))
    @precondition(lambda self: any(job.next_index for job in self.jobs))
    def fail(self, data: st.DataObject, kind: ErrorKind | None) -> None:
        job = data.draw(st.sampled_from([job for job in self.jobs if job.next_index]))
        choice = data.draw(st.sampled_from(sorted(job.next_index)))
        key = job.job.key._replace(choice=choice)
        self.leave(job, choice)
        event: JobEvent = Cancelled(key) if kind is None else Failed(key, kind, "failed")
        self.execute(self.director.on_worker_events(job.worker, [event], self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.pullable())
    def pull(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.pullable()))
        job.has_kv = True
        event = KVReceived(job.job.key, 1, 64, 0, 64, 0.1, 0.1, 0.1)
        self.execute(self.director.on_worker_events(job.worker, [event], self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.movable())
    def offer_migration(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.movable()))
        choice = data.draw(st.sampled_from(sorted(job.next_index)))
        offer = HandoffKey(HandoffId(f"m{job.job.request.id}/{choice}"), job.job.attempt)
        self.offered.add(offer)
        event = MigrationOffered(job.job.key._replace(choice=choice), offer)
        self.execute(self.director.on_worker_events(job.worker, [event], self.now))

    @rule(data=st.data(), number=st.integers(0, 999))
    @precondition(lambda self: self.ordered)
    def offer_as_ordered(self, data: st.DataObject, number: int) -> None:
        """A worker offers a choice that is to move, unless it has ended there meanwhile."""
        worker, key = self.ordered.pop(data.draw(st.integers(0, len(self.ordered) - 1)))
        jobs = [job for job in self.movable() if job.worker == worker and job.job.attempt == key.attempt]
        if any(job.job.request.id == key.request and key.choice in job.next_index for job in jobs):
            offer = HandoffKey(HandoffId(f"m{key.request}/{key.choice}/{number}"), key.attempt)
            self.offered.add(offer)
            self.execute(
                self.director.on_worker_events(worker, [MigrationOffered(key, offer, is_requested=True)], self.now)
            )

    @rule(data=st.data())
    @precondition(lambda self: len(self.workers.views) > 1 and self.crowded())
    def crowd(self, data: st.DataObject) -> None:
        """A worker reports many running sequences and the others none, until one of the sequences should move."""
        crowded = data.draw(st.sampled_from(self.crowded()))
        for ref, view in self.workers.views.items():
            load = replace(view.load, num_running=50 if ref == crowded else 0)
            self.workers.views[ref] = replace(view, load=load)
        for seconds in (0.05, 1.0):
            self.wait(seconds)

    @rule(data=st.data(), num_ahead=st.integers(0, 1), seconds=st.sampled_from([0.0, 0.5]))
    @precondition(lambda self: self.movable())
    def preempt(self, data: st.DataObject, num_ahead: int, seconds: float) -> None:
        """A worker preempts a choice; its report may overtake the last token, or be repeated."""
        job = data.draw(st.sampled_from(self.movable()))
        choice = data.draw(st.sampled_from(sorted(job.next_index)))
        event = Preempted(job.job.key._replace(choice=choice), job.next_index[choice] + num_ahead)
        self.execute(self.director.on_worker_events(job.worker, [event], self.now))
        self.wait(seconds)

    @rule(data=st.data())
    @precondition(lambda self: self.workers.views)
    def lose(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers.views)))
        self.workers.remove(worker)
        self.jobs = [job for job in self.jobs if job.worker != worker]
        self.execute(self.director.on_worker_lost(worker, "it died", self.now))
        assert not self.director.positions(worker)

    @rule(kind=_KINDS)
    @precondition(lambda self: len(self.workers.views) < 5)
    def join(self, kind: tuple[Pool, frozenset[Lane]]) -> None:
        self.workers.add(self.new_view(kind))
        self.execute(self.director.place_queued(self.now))

    @rule(data=st.data(), num_free_blocks=st.integers(0, 100))
    @precondition(lambda self: self.workers.views)
    def report_load(self, data: st.DataObject, num_free_blocks: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers.views)))
        self.execute(self.director.on_capacity(self.workers.set_load(worker, num_free_blocks), self.now))

    # ---- time

    @rule(seconds=st.sampled_from([0.01, 0.05, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for request, open_request in self.open.items():
            if any(group.phase is not JobGroupPhase.QUEUED for group in open_request.state.attempts.job_groups):
                self.worker_s[request] += seconds
        overdue = set(self.director.overdue(self.now))
        self.execute(self.director.on_timer(self.now))
        self.execute(self.director.rebalance(self.now))
        # What was taken from its workers is queued now, where it may be overdue too.
        self.execute(self.director.on_timer(self.now))
        assert not overdue & set(self.director.overdue(self.now)), "what was overdue was not seen to"
        for open_request in self.open.values():
            assert abs(self.worker_s[open_request.id] - open_request.kv_charged_s) <= KV_PERIOD_S + 1e-9, open_request

    # ---- what must hold

    @invariant()
    def books_balance(self) -> None:
        self.director.check()
        assert {one.id for one in self.director.requests()} == self.open.keys()
        assert self.settled.keys() == self.reserved.keys() - self.open.keys()
        for job in self.jobs:
            known = {key for key, _ in self.director.positions(job.worker)}
            for choice in job.next_index:
                key = job.job.key._replace(choice=choice)
                assert key in known, f"nobody waits for {key}"

    def teardown(self) -> None:
        """All is quiet: time alone ends what is open."""
        if not hasattr(self, "director"):
            return
        for _ in range(400):
            if not self.open:
                break
            self.wait(1.0)
            for job in [job for job in self.jobs if not job.is_accepted]:
                job.is_accepted = True
                self.execute(self.director.on_submit_result(job.worker, job.job.key, None, self.now))
        assert not self.open, f"these never end: {self.director.requests()}"
        assert self.settled.keys() == self.reserved.keys() and not self.workers.inflight
        assert not [job for job in self.jobs if job.next_index], f"these run for nobody: {self.jobs}"

    def movable(self) -> list[_RunningJob]:
        """Return the jobs that a draining worker may offer to others."""
        return [job for job in self.jobs if job.next_index and job.has_kv and not isinstance(job.job, PrefillJob)]

    def crowded(self) -> list[WorkerRef]:
        """Return the workers with a sequence that may move."""
        states = [one.state for one in self.open.values()]
        return [ref for ref in sorted(self.workers.views) if any(state.movable(ref) for state in states)]

    def pullable(self) -> list[_RunningJob]:
        """Return the jobs whose KV lies ready at its source."""
        return [
            job
            for job in self.jobs
            if not job.has_kv and isinstance(job.job, ResumeJob) and job.job.offer in self.offered
        ]

    # ---- the driver

    def leave(self, job: _RunningJob, choice: int) -> None:
        job.next_index.pop(choice, None)
        if not job.next_index:
            self.jobs.remove(job)

    def execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case SubmitJob(worker, job):
                    self.submit_job(worker, job)
                case CancelJob(worker, keys):
                    for key in keys:
                        self.cancel_job(worker, key)
                case OfferMigration(worker, keys):
                    self.ordered += [(worker, key) for key in keys]
                case Token():
                    self.deliver(command)
                case Finished(key):
                    assert key.request in self.open and (key.request, key.choice) not in self.choice_ends
                    self.choice_ends.add((key.request, key.choice))
                case EndRequest(request, outcome):
                    self.end(request, outcome)

    def submit_job(self, worker: WorkerRef, job: Job) -> None:
        assert job.request.id in self.open, f"{job.key} is of a request that has ended"
        if worker not in self.workers.views:
            gone = TandemError(ErrorKind.WORKER_LOST, "it is gone")
            self.execute(self.director.on_submit_result(worker, job.key, gone, self.now))
            return
        is_probe = self.open[job.request.id].fixed_placement is not None
        assert is_probe or job.request.lane in self.workers.views[worker].lanes, f"{worker} does not serve {job}"
        choices = range(job.choice, job.choice + job.num_choices)
        next_index = dict.fromkeys(choices, len(job.output_tokens))
        self.jobs.append(_RunningJob(worker, job, next_index, has_kv=not isinstance(job, ResumeJob)))

    def cancel_job(self, worker: WorkerRef, key: JobKey) -> None:
        for job in [job for job in self.jobs if job.worker == worker and job.job.attempt == key.attempt]:
            if job.job.request.id == key.request and key.choice in job.next_index:
                self.leave(job, key.choice)

    def deliver(self, token: Token) -> None:
        request, choice = token.key.request, token.key.choice
        assert request in self.open, f"{token} after the end"
        delivered = self.tokens[request, choice]
        if (request, choice) not in self.choice_ends:
            assert token.index == len(delivered) and token.token.id == token_of(request, choice, token.index)
        delivered.append(token.token.id)

    def end(self, request: RequestId, outcome: Finished | TandemError) -> None:
        assert request in self.open, f"{request} ended twice"
        charged_s = self.open[request].kv_charged_s
        assert charged_s == pytest.approx(self.worker_s[request]), "each second at workers is charged once, others not"
        usage = self.open.pop(request).usage()
        assert request not in self.settled
        self.settled[request] = self.reserved[request]
        if isinstance(outcome, Finished):
            assert usage is not None and len(self.tokens[request, outcome.key.choice]) == outcome.num_output_tokens
        else:
            if outcome.__cause__ is not None:
                raise AssertionError(f"{request} was aborted") from outcome.__cause__


TestDirector = DirectorMachine.TestCase
TestDirector.settings = effort(60, 60)

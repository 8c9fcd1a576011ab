"""Engines on model executors, a gateway that follows `flow`, and a network between them; time is virtual, and whatever
happens is drawn from one seed. It checks every word of every engine and never knows how an engine decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, KVReceived, PromptLogprobs, SampledToken, Token
from tandem.core.ids import BlockHash, BlockId, HandoffId, HandoffKey, HostSlot, JobKey, RequestId, WorkerRef
from tandem.core.request import GenerateJob, Job, RemotePrefix, Request, ResumeJob
from tandem.engine.effects import (
    Effect,
    FollowHandoff,
    JobEnded,
    ReadFiles,
    ReleaseHandoff,
    RenewLeases,
    SendAnnouncement,
    SendHandoffEnded,
    SendRemainderRequest,
    StartRead,
    TearDownPeer,
    WriteFiles,
)
from tandem.kv.handoff import RemotePrefixRequest
from tandem.orchestration.commands import (
    CancelJob,
    EndRequest,
    FindConsumer,
    OfferMigration,
    ReleaseLease,
    ReportWorkerFailure,
    Requeue,
    StateCommand,
    SubmitJob,
    WorkerOrder,
)
from tandem.orchestration.job_group import JobGroupPhase
from tandem.orchestration.request_state import RequestState
from tandem.routing.placement import Placement
from tests.property.model import Cell, expected_output, expected_scores
from tests.property.workers import Action, Agenda, Knobs, Link, Worker

ROUND_S = 0.1


class Cluster:
    """`run` lets time pass with faults, `settle` without. What engines say is checked as they say it."""

    def __init__(self, seed: int, knobs: Knobs) -> None:
        self.random = Random(seed)
        self.knobs = knobs
        self.agenda = Agenda()
        self.workers = [Worker(i, 1, knobs) for i in range(len(knobs.num_blocks))]
        self.dead: list[Worker] = []
        self.links: dict[tuple[WorkerRef, WorkerRef], Link] = defaultdict(Link)
        self.lives: dict[RequestId, RequestState] = {}
        self.placements: dict[RequestId, tuple[int, int]] = {}
        self.expected: dict[tuple[RequestId, int], tuple[int, ...]] = {}
        self.delivered: dict[tuple[RequestId, int], list[int]] = {}
        self.scored: dict[RequestId, list[SampledToken]] = {}
        self.choice_ends: dict[tuple[RequestId, int], str] = {}
        self.outcomes: dict[RequestId, Finished | TandemError] = {}
        self.hung: list[tuple[Worker, StartRead]] = []
        self.failures: list[Failed] = []
        self.files: dict[BlockHash, list[Cell | None]] = {}
        self.num_file_hits = 0
        self.num_pulled = 0
        self.num_remote_hit = 0
        self.num_prefix_fetches = 0
        self.num_refused = 0
        self.num_given_up = 0
        self.num_moves = 0
        self.has_faults = True

    def chance(self, probability: float) -> bool:
        return self.has_faults and self.random.random() < probability

    # ---- the gateway

    def submit_request(self, request: Request, prefill: int, decode: int) -> None:
        life = RequestState(request, HandoffId(f"h-{request.id}"))
        self.lives[request.id] = life
        self.placements[request.id] = (prefill, decode)
        self.scored[request.id] = []
        for index in range(request.num_choices):
            alone = GenerateJob(request=request, attempt=1, choice=index)
            self.expected[request.id, index], _ = expected_output(alone)
            self.delivered[request.id, index] = []
        self.place(life)

    def place(self, life: RequestState) -> None:
        if life.phase is JobGroupPhase.QUEUED:
            prefill, decode = (self.workers[i].ref for i in self.placements[life.request.id])
            self.obey(life, life.placed(Placement(prefill, decode)))

    def obey(self, life: RequestState, commands: Sequence[StateCommand]) -> None:
        for command in commands:
            match command:
                case Requeue() | FindConsumer():
                    self.find_place(life, command)
                case SubmitJob() | CancelJob() | OfferMigration() | ReleaseLease():
                    self.send_to_worker(life, command)
                case PromptLogprobs() | Token() | Finished() | EndRequest():
                    self.send_to_client(life, command)
                case ReportWorkerFailure(workers):
                    assert workers, "nobody is to blame"

    def find_place(self, life: RequestState, command: Requeue | FindConsumer) -> None:
        if isinstance(command, FindConsumer):
            self.seek(life, command)
            return
        self.num_refused += 1
        if command.has_failed:
            self.placements[life.request.id] = (self.any_worker(), self.any_worker())
        self.agenda.after(self.random.uniform(0.1, 2.0), lambda: self.place(life))

    def send_to_worker(self, life: RequestState, command: SubmitJob | WorkerOrder) -> None:
        match command:
            case SubmitJob(worker, job):
                self.submit(life, worker, job)
            case CancelJob(worker, keys):
                self.call(worker, lambda w: self.cancel(w, keys))
            case OfferMigration(worker, keys):
                self.num_moves += 1
                self.call(worker, lambda w: self.effects(w, w.engine.offer_migration(keys, self.agenda.now)))
            case ReleaseLease(worker, handoff):
                self.call(worker, lambda w: self.effects(w, w.engine.revoke_lease(handoff, self.agenda.now)))

    def send_to_client(self, life: RequestState, command: PromptLogprobs | Token | Finished | EndRequest) -> None:
        match command:
            case PromptLogprobs():
                self.take_scores(life, command)
            case Token():
                assert (life.request.id, command.key.choice) not in self.choice_ends, f"{command} after its end"
                self.delivered[life.request.id, command.key.choice].append(command.token.id)
            case Finished():
                self.end_choice(life, command)
            case EndRequest(_, outcome):
                self.end(life, outcome)

    def any_worker(self) -> int:
        return self.random.randrange(len(self.workers))

    def seek(self, life: RequestState, seek: FindConsumer) -> None:
        """Mostly somebody takes over, and while nobody does, it is asked again."""
        consumer = self.workers[self.any_worker()].ref
        is_able = consumer != seek.source and consumer not in seek.excluded | seek.unfit
        self.obey(life, life.consumer_found(seek.choice, consumer if is_able else None))
        if not is_able:
            self.agenda.after(0.3, lambda: [self.seek(life, again) for again in life.seeks()])

    def cancel(self, worker: Worker, keys: Sequence[JobKey]) -> None:
        for key in keys:
            self.effects(worker, worker.engine.cancel(key, self.agenda.now))

    def take_scores(self, life: RequestState, scores: PromptLogprobs) -> None:
        earlier = self.scored[life.request.id]
        assert scores.first_index == 1 + len(earlier) and scores.tokens, f"{scores} after {len(earlier)}"
        seen = [self.delivered[life.request.id, i] for i in range(life.request.num_choices)]
        assert not any(seen), f"{scores} after the first token"
        earlier += scores.tokens

    def end(self, life: RequestState, outcome: Finished | TandemError) -> None:
        name = life.request.id
        assert name not in self.outcomes, f"{name} ended twice"
        self.outcomes[name] = outcome
        if isinstance(outcome, TandemError) and outcome.kind not in (ErrorKind.CANCELLED, ErrorKind.CONTEXT_LENGTH):
            assert "attempts in a row" in outcome.message, outcome
            self.num_given_up += 1
        for index in range(life.request.num_choices):
            delivered, expected = tuple(self.delivered[name, index]), self.expected[name, index]
            assert delivered == expected[: len(delivered)], f"{name}: {delivered} instead of {expected}"
        if isinstance(outcome, Finished):
            self.end_choice(life, outcome)
            choices = {(name, index) for index in range(life.request.num_choices)}
            assert choices <= self.choice_ends.keys(), f"{name} ended without {choices - self.choice_ends.keys()}"

    def end_choice(self, life: RequestState, outcome: Finished) -> None:
        place, alone = (life.request.id, outcome.key.choice), GenerateJob(request=life.request, attempt=1)
        assert place not in self.choice_ends, f"{place} ended twice"
        self.choice_ends[place] = "finished"
        delivered, expected = tuple(self.delivered[place]), self.expected[place]
        assert delivered == expected, f"{place} finished with {delivered} instead of {expected}"
        expected_logprobs = () if life.request.prompt_logprobs is None else expected_scores(alone)
        assert tuple(self.scored[life.request.id]) == expected_logprobs, f"{place}: scores"

    def leave(self, life: RequestState, index: int) -> None:
        """The client has enough of one choice."""
        place = life.request.id, index
        if life.phase is not JobGroupPhase.ENDED and place not in self.choice_ends:
            self.choice_ends[place] = "left"
            self.obey(life, life.finished(index))

    def submit(self, life: RequestState, ref: WorkerRef, job: Job) -> None:
        """A call that may be lost on its way or on its way back; either way the gateway hears of a lost worker."""
        job = self.with_prefix(job)

        def arrive(worker: Worker) -> None:
            answer: TandemError | None = None
            for key in job.keys:
                worker.next_index.setdefault(key, len(job.output_tokens))
            try:
                self.effects(worker, worker.engine.submit(job, self.agenda.now))
            except TandemError as refusal:
                answer = refusal
            if not self.chance(self.knobs.lost_calls):
                self.agenda.after(self.delay(), lambda: self.answer(life, ref, job, answer))
            elif self.chance(0.5):
                arrive(worker)

        if self.chance(self.knobs.lost_calls):
            self.lose_call(life, ref, job)
            return
        self.call(ref, arrive)
        # Whatever becomes of the call, its deadline answers; a true answer that came before makes this one void.
        self.agenda.after(8.0, lambda: self.lose_call(life, ref, job))

    def with_prefix(self, job: Job) -> Job:
        """Some jobs are to read a prefix from a worker, mostly one that lives."""
        if isinstance(job, ResumeJob) or self.random.random() >= self.knobs.prefix_fetches:
            return job
        self.num_prefix_fetches += 1
        prefix_fetch = HandoffId(f"loan-{self.random.choice(['a', 'b', self.num_prefix_fetches])}")
        source = self.random.choice([worker.ref for worker in [*self.workers, *self.workers, *self.dead]])
        num_blocks = self.random.randint(1, 1 + job.num_known_tokens // self.knobs.block_size)
        return replace(job, prefix=RemotePrefix(handoff=prefix_fetch, source=source, num_blocks=num_blocks))

    def lose_call(self, life: RequestState, ref: WorkerRef, job: Job) -> None:
        self.agenda.after(1.0, lambda: self.answer(life, ref, job, TandemError(ErrorKind.WORKER_LOST, "no answer")))

    def answer(self, life: RequestState, ref: WorkerRef, job: Job, error: TandemError | None) -> None:
        if error is None:
            self.obey(life, life.accepted(ref, job.key))
        else:
            self.obey(life, life.refused(ref, job.key, error))

    def report(self, worker: Worker, event: JobEvent) -> None:
        """The Watch stream: ordered, and lost with its worker."""
        life = self.lives[event.key.request]

        def arrive() -> None:
            if worker.is_alive:
                self.obey(life, life.reported(worker.ref, event))

        self.deliver("watch", self.links[worker.ref, worker.ref], arrive)

    # ---- the network

    def delay(self) -> float:
        return self.random.choice([0.01, 0.05, 0.05, 0.3])

    def deliver(self, direction: str, link: Link, action: Action) -> None:
        life = link.life
        at = max(self.agenda.now + self.delay(), link.last.get(direction, 0.0))
        link.last[direction] = at
        self.agenda.after(at - self.agenda.now, lambda: action() if link.life == life else None)

    def call(self, ref: WorkerRef, action: Callable[[Worker], None]) -> None:
        def arrive() -> None:
            worker = self.find(ref)
            if worker is not None:
                worker.inbox.append(lambda: action(worker))

        self.agenda.after(self.delay(), arrive)

    def find(self, ref: WorkerRef) -> Worker | None:
        return next((w for w in self.workers if w.ref == ref and w.is_alive), None)

    # ---- one round

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.mishap()
            self.round(ROUND_S)

    def settle(self, rounds: int, is_done: Callable[[], bool], seconds: float = ROUND_S) -> bool:
        self.has_faults = False
        for _ in range(rounds):
            if is_done():
                return True
            for worker in self.workers:
                worker.stalled_until = 0.0
            self.round(seconds)
        return is_done()

    def is_quiet(self) -> bool:
        done = len(self.outcomes) == len(self.lives)
        return done and all(w.engine.is_idle and not w.plans and not w.inbox for w in self.workers)

    def round(self, seconds: float) -> None:
        if self.random.random() < self.knobs.moves:
            self.move()
        self.agenda.advance(seconds)
        for worker in list(self.workers):
            if worker.is_alive and worker.stalled_until <= self.agenda.now:
                self.step(worker)

    def step(self, worker: Worker) -> None:
        """What a driver does between two looks at its inbox."""
        inbox, worker.inbox = worker.inbox, []
        for action in inbox:
            action()
            self.check(worker)
        now = self.agenda.now
        self.effects(worker, worker.engine.tick(now))
        while len(worker.plans) < self.knobs.plan_depth:
            plan, effects = worker.engine.begin(now)
            self.effects(worker, effects)
            if plan is None:
                break
            worker.plans.append(plan)
        self.check(worker)
        if worker.plans:
            plan = worker.plans.pop(0)
            failing = [s.seq for s in plan.slices if self.chance(self.knobs.failed_slices)]
            self.effects(worker, worker.engine.finish(worker.executor.execute(plan, failing), now))
            self.check(worker)

    def check(self, worker: Worker) -> None:
        worker.engine.check()
        reads = [b for w, r in self.hung if w is worker for b in r.local]
        assert set(reads) <= set(worker.engine._consumer.blocks()), "a block under a read was given back"

    # ---- moves

    def move(self) -> None:
        """Some running choice is to move to a worker that lives."""
        movable = [
            (life, one.key) for life in self.lives.values() for ref in life.workers() for one in life.movable(ref)
        ]
        if not movable:
            return
        life, key = self.random.choice(movable)
        target = self.workers[self.any_worker()].ref
        if target not in life.workers():
            self.obey(life, life.relocate(key.choice, target))

    # ---- mishaps

    def mishap(self) -> None:
        worker = self.random.choice(self.workers)
        if self.chance(self.knobs.stalls):
            worker.stalled_until = self.agenda.now + self.random.choice([0.5, 2.0, 5.0, 12.0])
        if self.chance(self.knobs.deaths):
            self.kill(worker)
        if self.chance(self.knobs.broken_links) and self.links:
            self.break_link(*self.random.choice(list(self.links)))
        if self.chance(self.knobs.cancels) and self.lives:
            life = self.random.choice(list(self.lives.values()))
            self.obey(life, life.cancelled())
        if self.chance(self.knobs.cancels) and self.lives:
            life = self.random.choice(list(self.lives.values()))
            self.leave(life, self.random.randrange(life.request.num_choices))
        if self.chance(self.knobs.drains):
            worker.engine.draining = not worker.engine.draining

    def kill(self, worker: Worker) -> None:
        worker.is_alive = False
        self.dead.append(worker)
        self.workers[worker.index] = Worker(worker.index, worker.ref.incarnation + 1, self.knobs)
        self.hung = [(w, r) for w, r in self.hung if w is not worker]
        for life in list(self.lives.values()):
            self.obey(life, life.worker_lost(worker.ref, "killed"))
        for other in self.workers:
            self.agenda.after(0.2, lambda w=other: w.inbox.append(lambda: self.lose_peer(w, worker.ref, True)))  # type: ignore[misc]

    def break_link(self, consumer: WorkerRef, producer: WorkerRef) -> None:
        """The StreamHandoff stream breaks; after a while the consumer follows again whatever it still needs."""
        link = self.links[consumer, producer]
        if consumer == producer:
            return
        link.life += 1
        self.agenda.after(self.random.choice([0.1, 1.0]), lambda: self.reconnect(consumer, producer))

    def reconnect(self, consumer: WorkerRef, producer: WorkerRef) -> None:
        worker = self.find(consumer)
        if worker is not None:
            for key, prefix_request in sorted(self.links[consumer, producer].following.items()):
                follow = partial(self.send_to_source, worker, producer, "follow", (key,), prefix_request=prefix_request)
                worker.inbox.append(follow)

    # ---- what engines want done

    def effects(self, worker: Worker, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case event if isinstance(event, JobEvent):
                    worker.times.on_event(event)
                    self.witness(worker, event)
                    self.report(worker, event)
                case JobEnded(times):
                    worker.times.ended(times, worker.engine.num_preempted)
                case SendAnnouncement(consumer, message):
                    self.send_to_consumer(worker, consumer, lambda w, m=message: w.engine.announced(m, self.agenda.now))  # type: ignore[misc]
                case SendHandoffEnded(consumer, key, kind, text):
                    self.send_handoff_end(worker, consumer, key, kind, text)
                case FollowHandoff() | SendRemainderRequest() | ReleaseHandoff() | RenewLeases():
                    self.execute_at_source(worker, effect)
                case StartRead():
                    self.start_read(worker, effect)
                case ReadFiles() | WriteFiles():
                    self.use_files(worker, effect)
                case TearDownPeer(source):
                    # The transport answers; only then is it known whether its reads have really ended.
                    proven = self.random.random() < 0.5
                    self.agenda.after(0.2, lambda s=source, p=proven: self.lose_peer_later(worker, s, p))  # type: ignore[misc]

    def execute_at_source(
        self, worker: Worker, effect: FollowHandoff | SendRemainderRequest | ReleaseHandoff | RenewLeases
    ) -> None:
        following = self.links[worker.ref, effect.source].following
        match effect:
            case FollowHandoff(source, key, prefix_request):
                following[key] = prefix_request
                self.send_to_source(worker, source, "follow", (key,), prefix_request=prefix_request)
            case SendRemainderRequest(source, key, num_known):
                self.send_to_source(worker, source, "take", (key,), num_known)
            case ReleaseHandoff(source, key, is_taken):
                following.pop(key, None)
                self.send_to_source(worker, source, "taken" if is_taken else "release", (key,))
            case RenewLeases(source, keys):
                self.send_to_source(worker, source, "renew", keys)

    def send_to_consumer(self, producer: Worker, consumer: WorkerRef, action: Callable[[Worker], list[Effect]]) -> None:
        link = self.links[consumer, producer.ref]

        def arrive() -> None:
            worker = self.find(consumer)
            if worker is not None:
                worker.inbox.append(lambda: self.effects(worker, action(worker)))

        self.deliver("down", link, arrive)

    def send_handoff_end(
        self, producer: Worker, consumer: WorkerRef, key: HandoffKey, kind: ErrorKind, text: str
    ) -> None:
        def on_end(worker: Worker) -> list[Effect]:
            self.links[consumer, producer.ref].following.pop(key, None)
            return worker.engine.handoff_ended(key, kind, text, self.agenda.now)

        self.send_to_consumer(producer, consumer, on_end)

    def send_to_source(
        self,
        consumer: Worker,
        source: WorkerRef,
        what: str,
        keys: tuple[HandoffKey, ...],
        num_known: int = 0,
        prefix_request: RemotePrefixRequest | None = None,
    ) -> None:
        """A message of the consumer on the stream, and the producer's answer to it."""
        sent_at = self.agenda.now

        def on_message(producer: Worker) -> None:
            now = self.agenda.now
            for key in keys if what == "follow" else ():
                self.effects(producer, producer.engine.follow(key, consumer.ref, now, prefix_request))
            if what == "renew":
                self.effects(producer, producer.engine.renew(keys, consumer.ref, now))
            for key in keys if what == "take" else ():
                self.effects(producer, producer.engine.request_remainder(key, num_known, now))
            for key in keys if what in ("release", "taken") else ():
                released = producer.engine.release(key, now, is_taken=what == "taken", consumer=consumer.ref)
                self.effects(producer, released)
            if what in ("follow", "renew"):
                self.send_to_consumer(producer, consumer.ref, lambda w: self.renew(w, keys, sent_at))

        def arrive() -> None:
            producer = self.find(source)
            if producer is not None:
                producer.inbox.append(lambda: on_message(producer))
            elif consumer.is_alive:
                consumer.inbox.append(
                    lambda: self.effects(consumer, consumer.engine.source_lost(source, "unreachable", self.agenda.now))
                )

        self.deliver("up", self.links[consumer.ref, source], arrive)

    def renew(self, consumer: Worker, keys: tuple[HandoffKey, ...], sent_at: float) -> list[Effect]:
        consumer.engine.renewed(keys, sent_at, self.knobs.lease_s)
        return []

    # ---- files

    def use_files(self, worker: Worker, effect: ReadFiles | WriteFiles) -> None:
        if isinstance(effect, ReadFiles):
            self.read_files(worker, effect, 0)
            return
        for slot, block_hash in effect.writes:
            self.agenda.after(self.delay(), partial(self.write_file, worker, slot, block_hash))

    def write_file(self, worker: Worker, slot: HostSlot, block_hash: BlockHash) -> None:
        """Write what the slot holds now, and let the other workers find the file later."""
        is_done = not self.chance(self.knobs.lost_files)
        if is_done:
            self.files[block_hash] = list(worker.store.host[slot])
        worker.inbox.append(lambda: self.end_write(worker, slot, block_hash, is_done))
        for other in self.workers if is_done else ():
            self.call(other.ref, lambda seen: seen.engine.files_changed([block_hash], []))

    def end_write(self, worker: Worker, slot: HostSlot, block_hash: BlockHash, is_done: bool) -> None:
        self.effects(worker, worker.engine.file_written(slot, block_hash, self.agenda.now, is_done=is_done))

    def read_files(self, worker: Worker, order: ReadFiles, first: int) -> None:
        """Read up to three blocks after a while, and go on with the rest."""

        def arrive() -> None:
            number = 0
            for block_hash, slot in list(zip(order.hashes, order.slots, strict=True))[first : first + 3]:
                if self.chance(self.knobs.lost_files):
                    self.files.pop(block_hash, None)
                if block_hash not in self.files:
                    break
                worker.store.host[slot] = list(self.files[block_hash])
                number += 1
            is_over = number < 3 or first + number == len(order.hashes)
            self.num_file_hits += number
            worker.inbox.append(lambda: self.take_files(worker, order, number, is_over))
            if not is_over:
                self.read_files(worker, order, first + number)

        self.agenda.after(self.delay() * (8 if self.random.random() < self.knobs.slow_reads else 1), arrive)

    def take_files(self, worker: Worker, order: ReadFiles, number: int, is_over: bool) -> None:
        self.effects(
            worker, worker.engine.files_read(order.read, number, 0.01 * number, self.agenda.now, is_over=is_over)
        )

    # ---- the transport

    def start_read(self, worker: Worker, read: StartRead) -> None:
        seconds = self.random.uniform(0.5, 6.0) if self.random.random() < self.knobs.slow_reads else 0.05
        self.hung.append((worker, read))
        self.agenda.after(self.random.uniform(0.0, seconds), lambda: self.copy(worker, read))
        if not self.chance(self.knobs.hung_reads):
            self.agenda.after(seconds, lambda: self.end_read(worker, read))

    def copy(self, worker: Worker, read: StartRead) -> None:
        """The bytes move, whoever is stalled, and whatever stands there now."""
        producer = self.find(read.source)
        if producer is None or (worker, read) not in self.hung:
            return
        for offered, mine in zip(read.offered, read.local, strict=True):
            worker.store.cells[mine] = list(producer.store.cells[offered.block])

    def end_read(self, worker: Worker, read: StartRead) -> None:
        if (worker, read) not in self.hung:
            return
        if self.find(read.source) is None or self.chance(self.knobs.broken_reads):
            drained = self.random.random() < 0.7
            if drained:
                self.hung.remove((worker, read))
            worker.inbox.append(lambda: self.fail_read(worker, read, drained))
            return
        self.hung.remove((worker, read))
        worker.inbox.append(lambda: self.finish_read(worker, read))

    def finish_read(self, worker: Worker, read: StartRead) -> None:
        right = all(
            not self.knobs.digests or worker.store.digest(mine) == offered.heads
            for offered, mine in zip(read.offered, read.local, strict=True)
        )
        if right:
            self.effects(worker, worker.engine.read_done(read.read, self.agenda.now))
            return
        pull = next((p for p in worker.engine._consumer if read.read in p.open_reads), None)
        is_good = pull is not None and pull.lease_until is not None and self.agenda.now < pull.lease_until
        assert not is_good, f"{pull!r} finds other KV than was announced"
        self.fail_read(worker, read, True)

    def fail_read(self, worker: Worker, read: StartRead, drained: bool) -> None:
        self.effects(worker, worker.engine.read_failed(read.read, "broken", drained=drained, now=self.agenda.now))
        if not drained:
            self.agenda.after(2.0, lambda: self.lose_peer_later(worker, read.source, True))

    def lose_peer_later(self, worker: Worker, source: WorkerRef, proven: bool) -> None:
        worker.inbox.append(lambda: self.lose_peer(worker, source, proven))
        if not proven:
            self.agenda.after(2.0, lambda: self.lose_peer_later(worker, source, True))

    def lose_peer(self, worker: Worker, source: WorkerRef, proven: bool) -> None:
        if proven:
            self.hung = [(w, r) for w, r in self.hung if w is not worker or r.source != source]
        lost = worker.engine.peer_lost(source, "lost", proven=proven, now=self.agenda.now)
        self.effects(worker, lost)

    # ---- what engines say

    def witness(self, worker: Worker, event: JobEvent) -> None:
        key = event.key
        assert key not in worker.ends, f"{worker.ref}: {event} after the end of {key} ({worker.ends[key]})"
        match event:
            case Token(_, index, token):
                assert index == worker.next_index[key], f"{worker.ref}: {event} is out of turn"
                assert token.id == self.expected[key.request, key.choice][index], (
                    f"{worker.ref}: {event} is not what the model says"
                )
                worker.next_index[key] = index + 1
            case PromptLogprobs(_, first_index, tokens):
                # Prompt log probabilities are sent for a choice that is open; other choices may be open by then.
                job = JobKey(key.request, key.attempt)
                known = worker.num_scored.get(job, 0)
                assert 1 <= first_index <= 1 + known, f"{worker.ref}: a gap before {event}"
                worker.num_scored[job] = max(known, first_index - 1 + len(tokens))
            case KVReceived():
                self.num_pulled += event.source is None
                self.num_remote_hit += event.num_blocks if event.source is not None else 0
            case Finished():
                worker.ends[key] = "finished"
            case Failed():
                worker.ends[key] = "failed"
                self.failures.append(event)
            case Cancelled():
                worker.ends[key] = "cancelled"


def blocks_of(worker: Worker) -> list[BlockId]:
    """Every block that anybody holds."""
    pool = worker.engine._pool
    return [block for block in map(BlockId, range(pool.num_blocks)) if any(pool.holders(block))]

"""Engines that drain one after the other while requests run on them, and a gateway that lets every choice go on
elsewhere. Faults are those of `Cluster`; it knows no more of moves than that an offer is answered with a
`ResumeJob`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import (
    Cancelled,
    Failed,
    Finished,
    JobEvent,
    KVReceived,
    MigrationOffered,
    PromptLogprobs,
    Token,
)
from tandem.core.ids import HandoffKey, JobKey, RequestId
from tandem.core.request import GenerateJob, Job, Request, ResumeJob
from tests.property.cluster import Cluster
from tests.property.model import expected_output
from tests.property.workers import Knobs, Worker

DRAIN_S = 15.0
"""After it what is left of a worker is killed."""
ANSWER_S = 8.0


@dataclass(eq=False, slots=True)
class Story:
    """One choice as its client sees it, and the attempts at it that are open."""

    request: Request
    choice: int
    tokens: list[int] = field(default_factory=list)
    open: dict[int, Worker] = field(default_factory=dict)
    attempt: int = 0
    end: Finished | None = None


class MovingCluster(Cluster):
    """`num_moved`: choices whose KV another worker took, as the workers count them."""

    def __init__(self, seed: int, knobs: Knobs) -> None:
        super().__init__(seed, knobs)
        self.stories: dict[tuple[RequestId, int], Story] = {}
        self.num_moved = 0

    # ---- the gateway

    def begin(self, request: Request, at: int) -> None:
        for choice in range(request.num_choices):
            story = self.stories[request.id, choice] = Story(request, choice)
            alone = GenerateJob(request=request, attempt=1, choice=choice)
            self.expected[request.id, choice], _ = expected_output(alone)
            story.attempt = 1
        self.send(self.workers[at], GenerateJob(request=request, attempt=1, num_choices=request.num_choices))

    def send(self, worker: Worker, job: Job) -> None:
        """A call that is answered, or whose deadline is."""
        job = self.with_prefix(job)
        stories = [self.stories[key.request, key.choice] for key in job.keys]
        for story in stories:
            story.open[job.attempt] = worker

        def arrive(worker: Worker) -> None:
            for key in job.keys:
                worker.next_index.setdefault(key, len(job.output_tokens))
            try:
                self.effects(worker, worker.engine.submit(job, self.agenda.now))
            except TandemError:
                for story in stories:
                    self.agenda.after(self.delay(), lambda s=story: self.lose(s, job.attempt))  # type: ignore[misc]

        self.call(worker.ref, arrive)

    def place(self, story: Story) -> None:  # type: ignore[override]
        """All of it anew, at whoever takes it."""
        story.attempt += 1
        known = tuple(story.tokens)
        job = GenerateJob(request=story.request, attempt=story.attempt, choice=story.choice, output_tokens=known)
        self.send(self.random.choice(self.workers), job)

    def lose(self, story: Story, attempt: int) -> None:
        """An attempt is no more; with the last one the choice is placed again."""
        if story.open.pop(attempt, None) is not None and not story.open and story.end is None:
            self.agenda.after(self.random.uniform(0.1, 1.0), lambda: self.replace(story))

    def replace(self, story: Story) -> None:
        if story.open or story.end is not None:
            return
        if tuple(story.tokens) == self.expected[story.request.id, story.choice]:
            # Only the word of its end was lost.
            story.end = Finished(JobKey(story.request.id, story.attempt, story.choice), None, len(story.tokens), 0)
        else:
            self.place(story)

    def report(self, worker: Worker, event: JobEvent) -> None:
        def arrive() -> None:
            if worker.is_alive:
                self.on_job_event(worker, event)

        self.deliver("watch", self.links[worker.ref, worker.ref], arrive)

    def on_job_event(self, worker: Worker, event: JobEvent) -> None:
        story, attempt = self.stories[event.key.request, event.key.choice], event.key.attempt
        if story.open.get(attempt) is not worker:
            return
        match event:
            case Token(_, index, token):
                assert index <= len(story.tokens), f"{event} came when {len(story.tokens)} was due"
                if index == len(story.tokens):
                    story.tokens.append(token.id)
            case MigrationOffered(_, offer):
                if attempt == max(story.open):
                    self.move(story, worker, offer)
            case KVReceived(source=None):
                self.end_attempts(story, [a for a in story.open if a < attempt])
            case Finished(_, None, _, _) | Cancelled() | Failed():
                self.lose(story, attempt)
            case Finished():
                assert story.end is None and len(story.tokens) == event.num_output_tokens
                story.end = event
                self.end_attempts(story, list(story.open))
            case PromptLogprobs() | KVReceived():
                pass

    def move(self, story: Story, producer: Worker, offer: HandoffKey) -> None:
        story.attempt += 1
        job = ResumeJob(
            request=story.request,
            attempt=story.attempt,
            choice=story.choice,
            output_tokens=tuple(story.tokens),
            handoff=offer.handoff,
            offer_attempt=offer.attempt,
            source=producer.ref,
        )
        others = [worker for worker in self.workers if worker is not producer]
        self.send(self.random.choice(others), job)

    def end_attempts(self, story: Story, attempts: Sequence[int]) -> None:
        for attempt in attempts:
            worker = story.open.pop(attempt)
            key = JobKey(story.request.id, attempt, story.choice)
            self.call(worker.ref, lambda w, k=key: self.cancel(w, (k,)))  # type: ignore[misc]

    # ---- workers come and go

    def drain(self, index: int, *, is_undone: bool = False) -> None:
        """Drain a worker, which is replaced once it is empty or when its time is over, or soon takes jobs again."""
        worker = self.workers[index]
        if not worker.engine.draining:
            self.call(worker.ref, lambda w: self.effects(w, w.engine.start_drain(self.agenda.now)))
            if is_undone:
                self.agenda.after(2.0, lambda: self.call(worker.ref, lambda w: w.engine.end_drain()))
            else:
                self.agenda.after(DRAIN_S, lambda: self.kill(worker))

    def kill(self, worker: Worker) -> None:
        if not worker.is_alive:
            return
        self.num_moved += worker.engine.drained().num_migrated
        super().kill(worker)
        for story in self.stories.values():
            for attempt in [a for a, at in story.open.items() if at is worker]:
                self.agenda.after(0.5, lambda s=story, a=attempt: self.lose(s, a))  # type: ignore[misc]

    def is_quiet(self) -> bool:
        busy = any(w.engine.num_live or w.plans or w.inbox or not w.engine.is_idle for w in self.workers)
        return not busy and all(story.end is not None for story in self.stories.values())

    def witness(self, worker: Worker, event: JobEvent) -> None:
        if not isinstance(event, MigrationOffered):
            super().witness(worker, event)
        elif event.key in worker.ends:
            raise AssertionError(f"{event} after the end of {event.key}: {ErrorKind.INTERNAL}")

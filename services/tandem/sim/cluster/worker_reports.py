"""Pass workers' reports, and their answers to jobs, to the director of a simulated gateway."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, Preempted, SampledToken, Token
from tandem.core.ids import RequestId, WorkerRef
from tandem.core.request import Job
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration.commands import Command
from tandem.orchestration.director import RequestDirector
from tandem.sim.cluster.client_trace import ClientStreams, ignore
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.worker import SimWorker, StepRun
from tandem.sim.cluster.worker_pool import GatewayLink, SimWorkerPool
from tandem.sim.kernel.event_queue import Actor, SimEventQueue


class WorkerReports:
    """Receive workers' reports for one gateway, as its `Listener`, and pass them to its director.

    `party`: the gateway's actor. `execute`: function that carries out commands of the director at a virtual time.
    Workers report series of decode steps ahead of the clock. The reports of each worker are applied in order, as far as
    they have reached the gateway by now. Before an event that may end a request, the reports of all workers of that
    request are applied (`catch_up`).
    """

    def __init__(
        self,
        agenda: SimEventQueue,
        network: Network,
        party: Actor,
        director: RequestDirector,
        workers: SimWorkerPool,
        streams: ClientStreams,
        execute: Callable[[Sequence[Command], float], None],
    ) -> None:
        self.party = party
        self._agenda = agenda
        self._network = network
        self._director = director
        self._workers = workers
        self._streams = streams
        self._execute = execute
        self.on_preempted: Callable[[RequestId], None] = ignore
        """Called with each of the gateway's requests of which a worker has reported a preemption."""

    # ---- what workers report

    def streamed(self, worker: WorkerRef, steps: StepRun) -> None:
        link = self._workers.find(worker)
        if link is not None:
            link.coming.append(steps)

    def on_worker_events(self, worker: WorkerRef, events: Sequence[JobEvent], load: WorkerLoad | None) -> None:
        link, now = self._workers.find(worker), self._agenda.now
        if link is None or not link.is_live:
            return
        self._take_in(link)
        has_room = load is not None and load.may_take_more_than(link.load)
        if load is not None:
            link.load = load
            self._workers.changed(link)
        self.catch_up([event.key.request for event in events if _may_end(event)], but=worker)
        self._execute(self._director.on_worker_events(worker, events, now), now)
        for event in events:
            if isinstance(event, Preempted) and self._streams.workers(event.key.request):
                self.on_preempted(event.key.request)
        if has_room:
            self._execute(self._director.on_capacity(self._workers.view(link), now), now)

    def submit(self, ref: WorkerRef, job: Job) -> Sequence[Command]:
        """Send a job to a worker, whose answer arrives later as an event.

        Returns no commands, or the director's commands when the worker is already lost.
        """
        link = self._workers.find(ref)
        if link is None or not link.is_live:
            if link is not None:
                link.inflight.answered(job)
            gone = TandemError(ErrorKind.WORKER_LOST, f"worker {ref.id} is gone")
            return self._director.on_submit_result(ref, job.key, gone, self._agenda.now)

        def answered(refusal: TandemError | None, load: WorkerLoad) -> None:
            if not link.is_live or self._workers.find(ref) is not link:
                return
            link.inflight.answered(job)
            self._take_in(link)
            link.load = load
            self._workers.changed(link)
            now = self._agenda.now
            self._execute(self._director.on_submit_result(ref, job.key, refusal, now), now)

        self._network.submit(link.worker, job, answered, self.party)
        return ()

    # ---- discovery and loss of workers

    def met(self, worker: SimWorker) -> None:
        """Add a worker that the gateway has discovered: a new worker, a new incarnation, or one that was out of reach.
        Requests that wait are placed if possible."""
        self._workers.met(worker)
        self._execute(self._director.place_queued(self._agenda.now), self._agenda.now)

    def lost(self, worker: WorkerRef, reason: str) -> None:
        """Remove a lost worker, apply the reports of it that have arrived by now, and then report the loss of the
        worker and its jobs to the director. `reason`: a text for errors."""
        link = self._workers.lost(worker)
        if link is None:
            return
        self._take_in(link)
        states = [one.state for one in self._director.requests()]
        self.catch_up([s.request.id for s in states if worker in s.workers() or s.seeks()], but=worker)
        self._execute(self._director.on_worker_lost(worker, reason, self._agenda.now), self._agenda.now)

    # ---- steps that workers took ahead of the clock

    def catch_up(self, requests: Iterable[RequestId], but: WorkerRef | None = None) -> None:
        """Apply the reports that have reached the gateway by now from the workers of these requests.

        `but`: a worker whose reports have already been applied.
        """
        for ref in [ref for request in requests for ref in self._streams.workers(request) if ref != but]:
            link = self._workers.find(ref)
            if link is not None:
                link.worker.settle()
                self._take_in(link)

    def _take_in(self, link: GatewayLink) -> None:
        """Pass the tokens of one worker's steps, as far as their reports have arrived by now, to the director and the
        clients."""
        for steps in self._workers.take_reported(link):
            times = array("d", [end + self._network.latency_s for end in steps.ends])
            for run in steps.tokens:
                if self._director.on_tokens(link.worker.ref, run.key, run.first_index, run.ids, times[-1]):
                    self._streams.deliver_run(run, times)
                    continue
                for i, token in enumerate(run.ids):
                    event = Token(run.key, run.first_index + i, SampledToken(token))
                    self._execute(self._director.on_worker_events(link.worker.ref, [event], times[i]), times[i])


def _may_end(event: JobEvent) -> bool:
    """Return whether an event may end a request for which another worker has taken steps ahead."""
    return isinstance(event, Failed | Cancelled) or (isinstance(event, Finished) and event.reason is not None)

"""Take in what workers have reported of steps that they took ahead of the clock, as far as it has reached a gateway."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tandem.core.events import SampledToken, Token
from tandem.core.ids import RequestId, WorkerRef
from tandem.orchestration.commands import Command
from tandem.orchestration.director import RequestDirector
from tandem.sim.cluster.client_streams import ClientStreams
from tandem.sim.cluster.lookahead import StepRun
from tandem.sim.cluster.worker_pool import SimWorkerPool
from tandem.sim.cluster.worker_view import GatewayLink


class StepIntake:
    """Feeds one gateway's director with runs of decode steps, each worker's in order.

    `execute` carries out commands as of a time. Whatever may end a request first takes in what all its workers have
    reported by then (`catch_up`).
    """

    def __init__(
        self,
        director: RequestDirector,
        workers: SimWorkerPool,
        streams: ClientStreams,
        latency_s: float,
        execute: Callable[[Sequence[Command], float], None],
    ) -> None:
        self._director = director
        self._workers = workers
        self._streams = streams
        self._latency_s = latency_s
        self._execute = execute

    def catch_up(self, requests: Iterable[RequestId], but: WorkerRef | None = None) -> None:
        """Take in what the workers of these requests have reported by now; `but`'s reports have been taken in."""
        for ref in [ref for request in requests for ref in self._streams.workers(request) if ref != but]:
            link = self._workers.find(ref)
            if link is not None:
                link.worker.settle()
                self.take_in(link)

    def take_in(self, link: GatewayLink) -> None:
        """Take in what one worker's steps have reported by now."""
        while link.coming and (num_reported := self._workers.num_reported(link, link.coming[0])):
            steps = link.coming.popleft()
            if num_reported < len(steps.ends):
                steps, rest = steps.split(num_reported)
                link.coming.appendleft(rest)
            self._take_steps(link, steps)

    def _take_steps(self, link: GatewayLink, steps: StepRun) -> None:
        link.load = steps.load
        if steps.num_free[-1] != link.load.num_free_blocks:
            link.load = replace(link.load, num_free_blocks=steps.num_free[-1])
        times = array("d", [end + self._latency_s for end in steps.ends])
        for run in steps.tokens:
            if self._director.on_tokens(link.worker.ref, run.key, run.first_index, run.ids, times[-1]):
                self._streams.deliver_run(run, times)
                continue
            for i, token in enumerate(run.ids):
                event = Token(run.key, run.first_index + i, SampledToken(token))
                self._execute(self._director.on_worker_events(link.worker.ref, [event], times[i]), times[i])

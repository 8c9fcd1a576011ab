"""Track the workers that a simulated gateway knows, and what each has reported by now."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from tandem.core.config import GatewayConfig
from tandem.core.ids import BlockHash, RequestId, WorkerRef
from tandem.core.request import Request
from tandem.core.worker_load import WorkerLoad
from tandem.kv.hashing import prompt_hashes, root_hash
from tandem.orchestration.director import probe_request
from tandem.orchestration.known_workers import InflightJobs, KnownWorkers
from tandem.routing.pd_pairs import PROBE_RETRY_S
from tandem.routing.worker_view import Pair, WorkerView
from tandem.sim.cluster.worker import FINGERPRINT, SimWorker, StepRun
from tandem.sim.kernel.event_queue import Actor, SimEventQueue
from tandem.workload.scheduled_request import MODEL

PROBE = "probe-"
"""Beginning of the ids of probes; the rank of their gateway's actor follows."""


@dataclass(slots=True)
class GatewayLink:
    """Hold what a simulated gateway knows of one worker.

    - `load`: the load that the worker reported last.
    - `inflight`: prompts and decodes of jobs that were placed at the worker and that it has not accepted yet.
    - `coming`: reports of steps that have ended; some of them may not have reached the gateway yet.
    - `is_live`: whether the worker's stream of reports is up.
    """

    worker: SimWorker
    load: WorkerLoad
    inflight: InflightJobs = field(default_factory=InflightJobs)
    coming: deque[StepRun] = field(default_factory=deque)
    is_live: bool = True


class SimWorkerPool(KnownWorkers[GatewayLink]):
    """Track the workers that one simulated gateway knows, and between which pairs of them KV may move.

    `party`: the gateway's actor. `probe`: function that sends a probe request through a pair of workers; `probed` must
    be called when the probe has ended. `goes_on`: function that returns whether requests of clients are open or due;
    while it returns False, no pair is probed, so that a run ends.
    """

    def __init__(
        self,
        agenda: SimEventQueue,
        latency_s: float,
        config: GatewayConfig,
        party: Actor,
        probe: Callable[[Pair, Request], None],
    ) -> None:
        super().__init__(config)
        self._agenda = agenda
        self._latency_s = latency_s
        self._party = party
        self._probe = probe
        self.goes_on: Callable[[], bool] = lambda: True
        self._links: dict[WorkerRef, GatewayLink] = {}
        self._num_probes = 0
        self._num_probing = 0

    def check(self) -> None:
        """Raise AssertionError where a request that has ended still counts at a worker, or a probe has no end."""
        assert not self._num_probing, f"{self._num_probing} probes have no end"
        for link in self._links.values():
            assert not link.inflight.decodes, (
                f"{link.inflight.decodes} were to decode at {link.worker!r} and never accepted"
            )
            assert not link.inflight.tokens, f"{link.inflight.tokens} were placed at {link.worker!r} and never accepted"

    def find(self, worker: WorkerRef) -> GatewayLink | None:
        return self._links.get(worker)

    def links(self) -> Iterable[GatewayLink]:
        return self._links.values()

    # ---- discovery and loss of workers

    def begin(self, workers: Iterable[SimWorker]) -> None:
        """Add the workers that a cluster starts with. KV may move between every pair of them without a probe."""
        for worker in workers:
            self._add(worker)
        for pair, _ in self._due_pairs():
            self.pairs.ended(pair, moved=True, retry_at=self._agenda.now)

    def met(self, worker: SimWorker) -> None:
        """Add a worker that the gateway has discovered and probe its pairs; do nothing when it is known and live."""
        known = self._links.get(worker.ref)
        if known is None or not known.is_live:
            self._add(worker)
            self._probe_pairs()

    def missed(self, worker: WorkerRef) -> None:
        """Stop using a worker whose stream to the gateway has ended; do nothing when the gateway has not discovered the
        worker yet."""
        if worker in self._links:
            self._links[worker].is_live = False
            self._ranking.remove(worker)

    def lost(self, worker: WorkerRef) -> GatewayLink | None:
        """Remove a lost worker, and return what the gateway knew of it; None when the gateway had not discovered the
        worker yet."""
        self.missed(worker)
        self.pairs.drop(worker)
        self.routing.links.forget(worker)
        return self._links.pop(worker, None)

    def _add(self, worker: SimWorker) -> None:
        self._links[worker.ref] = link = GatewayLink(worker, worker.engine.load())
        self.changed(link)

    # ---- pairs of workers

    def suspect(self, workers: Set[WorkerRef]) -> None:
        """Stop using the pairs among these workers, because KV between them may have been lost; a pair is used again
        once a probe of it succeeds."""
        self.pairs.suspect(workers, self._agenda.now)
        self._probe_pairs()

    def probed(self, pair: Pair, *, moved: bool) -> None:
        """Record that the probe of a pair has ended. `moved`: whether it moved KV between the two workers.

        After a failure other pairs are probed now, and this pair again after `PROBE_RETRY_S` seconds.
        """
        self._num_probing -= 1
        if not all(ref in self._links for ref in pair):
            self.pairs.gone(pair)
            return
        self.pairs.ended(pair, moved=moved, retry_at=self._agenda.now + PROBE_RETRY_S)
        if not moved:
            self._probe_pairs()
            self._agenda.after(PROBE_RETRY_S, "", self._probe_pairs, by=self._party)

    def _probe_pairs(self) -> None:
        for pair, model in self._due_pairs() if self.goes_on() else ():
            self._num_probes += 1
            self._num_probing += 1
            request = probe_request(RequestId(f"{PROBE}{self._party.rank}-{self._num_probes}"), model)
            self._agenda.after(0.0, "", partial(self._probe, pair, request), by=self._party)

    def _due_pairs(self) -> list[tuple[Pair, str]]:
        """Return the pairs to probe, in an order that does not depend on the hashes of their names."""
        views = [self.view(link) for link in self._links.values() if link.is_live]
        return sorted(self.pairs.due(views, self._agenda.now))

    # ---- what is known

    def changed(self, link: GatewayLink) -> None:
        """Update the ranking of a worker after its report or a submission to it; a change of only its free blocks needs
        no call."""
        if link.is_live:
            self._ranking.put(partial(self.view, link))

    def take_reported(self, link: GatewayLink) -> Iterator[StepRun]:
        """Yield and remove those steps of a worker whose reports have arrived by now, and store the latest load in
        these reports."""
        while link.coming and (num_reported := self._num_reported(link, link.coming[0])):
            steps = link.coming.popleft()
            if num_reported < len(steps.ends):
                steps, rest = steps.split(num_reported)
                link.coming.appendleft(rest)
            link.load = _with_free(steps.load, steps.num_free[-1])
            yield steps

    def view(self, link: GatewayLink) -> WorkerView:
        """Return what routing sees of a worker now, with the free blocks after the last step whose report has arrived.

        Does not remove reports from `coming`, unlike `take_reported`.
        """
        worker, layout = link.worker, link.worker.spec.layout
        num_free = worker.num_free_seen(self._latency_s)
        if num_free is None:
            num_free = link.load.num_free_blocks
            for steps in reversed(link.coming):
                num_reported = self._num_reported(link, steps)
                if num_reported:
                    num_free = steps.num_free[num_reported - 1]
                    break
        return WorkerView(
            worker.ref, worker.spec.pool, MODEL, FINGERPRINT, _with_free(link.load, num_free),
            tuple(link.inflight.tokens.values()), worker.step_cost, num_inflight=len(link.inflight.decodes),
            block_size=layout.block_size, block_bytes=layout.block_bytes, lanes=worker.spec.lanes,
            max_num_seqs=worker.spec.config.engine.max_num_seqs,
        )  # fmt: skip

    def names(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes of the blocks of a request's prompt; empty while the gateway knows no worker.

        All simulated workers have the same block size.
        """
        link = next(iter(self._links.values()), None)
        if link is None:
            return ()
        block_size = link.worker.spec.layout.block_size
        return prompt_hashes(root_hash(FINGERPRINT, block_size, request.cache_salt), request, block_size)

    def _num_reported(self, link: GatewayLink, steps: StepRun) -> int:
        """Return how many of the steps have been reported to the gateway by now."""
        agenda, delay_s, party = self._agenda, self._latency_s, link.worker.party
        if agenda.now > steps.ends[-1] + delay_s:
            return len(steps.ends)
        return bisect_left(steps.ends, True, key=lambda end: not agenda.has_passed(end + delay_s, party))


def _with_free(load: WorkerLoad, num_free: int) -> WorkerLoad:
    return load if num_free == load.num_free_blocks else replace(load, num_free_blocks=num_free)

"""Hold the workers that a simulated gateway knows, and what each has reported by now."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial

from tandem.core.config import GatewayConfig
from tandem.core.events import KVReceived
from tandem.core.ids import BlockHash, RequestId, WorkerRef
from tandem.core.request import Job, PrefillJob, Request
from tandem.kv.hashing import prompt_hashes, root_hash
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.placement import Placement
from tandem.routing.router import Routing
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import Pair, WorkerView
from tandem.sim.cluster.lookahead import StepRun
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.worker import FINGERPRINT, SimWorker
from tandem.sim.cluster.worker_view import GatewayLink, pairs
from tandem.sim.kernel.event_queue import Actor, SimEventQueue

PROBE_S = 1.0
"""Seconds until a suspected pair is probed; the real gateway looks for pairs to probe once a second."""
PROBE_RETRY_S = 5.0
"""Seconds between two failed probes of a pair, as in the real gateway."""


class SimWorkerPool:
    """Own one simulated gateway's links to workers and its usable pairs of workers.

    Every pair of live workers counts as probed, as it is some seconds after a real start. `party`: the gateway's actor.
    `proven`: called when a suspected pair has passed its probe."""

    def __init__(
        self, agenda: SimEventQueue, network: Network, config: GatewayConfig, party: Actor, proven: Callable[[], None]
    ) -> None:
        self._agenda = agenda
        self._network = network
        self._latency_s = network.latency_s
        self._config = config
        self._party = party
        self._proven = proven
        self._links: dict[WorkerRef, GatewayLink] = {}
        self._pairs: set[Pair] = set()
        self._suspected: set[Pair] = set()
        self.routing = Routing(config.routing_policy, LinkBandwidth(), config.remote_prefix)
        self._ranking = WorkerRanking(self._pairs, self._suspected)

    def candidates(self) -> WorkerRanking:
        """Return the live workers as requests are placed among them."""
        return self._ranking

    def check(self) -> None:
        """Raise AssertionError where a request that has ended still counts at a worker."""
        for link in self._links.values():
            assert not link.decoding, f"{link.decoding} were to decode at {link.worker!r} and never accepted"
            assert not link.placed, f"{link.placed} were placed at {link.worker!r} and never accepted"

    def find(self, worker: WorkerRef) -> GatewayLink | None:
        return self._links.get(worker)

    def links(self) -> Iterable[GatewayLink]:
        return self._links.values()

    # ---- discovery and loss of workers

    def met(self, worker: SimWorker) -> None:
        """Add a discovered worker; do nothing when it is known and live."""
        known = self._links.get(worker.ref)
        if known is not None and known.is_live:
            return
        others = [link.worker for link in self._links.values() if link.is_live]
        self._links[worker.ref] = link = GatewayLink(worker, worker.engine.load())
        self._pairs |= pairs(worker, others, self._config)
        self.changed(link)

    def missed(self, worker: WorkerRef) -> None:
        """Stop the use of a worker whose stream ended; do nothing when it was not discovered yet."""
        if worker in self._links:
            self._links[worker].is_live = False
            self._ranking.remove(worker)

    def lost(self, worker: WorkerRef) -> GatewayLink | None:
        """Remove a lost worker and return its link; None when it was not discovered yet."""
        self.missed(worker)
        for pair in [pair for pair in self._suspected if worker in pair]:
            self._suspected.discard(pair)
        return self._links.pop(worker, None)

    def suspect(self, workers: Set[WorkerRef]) -> None:
        """Suspect the pairs among these workers, between which KV may have been lost; a pair is unused until a probe
        passes."""
        for pair in sorted(pair for pair in self._pairs if workers >= set(pair)):
            self._pairs.discard(pair)
            self._suspected.add(pair)
            self._agenda.after(PROBE_S, "", partial(self._probe, pair), by=self._party)

    def _probe(self, pair: Pair) -> None:
        """Probe a suspected pair; do nothing when one of its workers was lost meanwhile."""
        producer, consumer = (self._links.get(ref) for ref in pair)
        if pair not in self._suspected or producer is None or consumer is None:
            return
        if self._network.is_cut(producer.worker.party, consumer.worker.party):
            self._agenda.after(PROBE_RETRY_S, "", partial(self._probe, pair), by=self._party)
            return
        self._suspected.discard(pair)
        self._pairs.add(pair)
        self._proven()

    # ---- what is known

    def changed(self, link: GatewayLink) -> None:
        """Update the ranking after a report or a submission; a change of only the free blocks needs no call."""
        if link.is_live:
            self._ranking.put(partial(self.view, link))

    def num_reported(self, link: GatewayLink, steps: StepRun) -> int:
        """Return how many of the steps have been reported to the gateway by now."""
        agenda, delay_s, party = self._agenda, self._latency_s, link.worker.party
        if agenda.now > steps.ends[-1] + delay_s:
            return len(steps.ends)
        return bisect_left(steps.ends, True, key=lambda end: not agenda.has_passed(end + delay_s, party))

    def view(self, link: GatewayLink) -> WorkerView:
        """Return the view of a worker as of now, with the free blocks after the last reported step; pending reports
        stay pending."""
        num_free = link.worker.num_free_seen(self._latency_s)
        if num_free is None:
            num_free = link.load.num_free_blocks
            for steps in reversed(link.coming):
                num_reported = self.num_reported(link, steps)
                if num_reported:
                    num_free = steps.num_free[num_reported - 1]
                    break
        return link.view(num_free)

    def names(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes of a prompt's blocks; all workers have blocks of one size."""
        block_size = next(iter(self._links.values())).worker.spec.layout.block_size
        return prompt_hashes(root_hash(FINGERPRINT, block_size, request.cache_salt), request, block_size)

    def measured(self, placement: Placement, event: KVReceived) -> None:
        """Observe the bandwidth of a pull from the prefill worker, as the real gateway does."""
        producer, consumer = self.find(placement.prefill), self.find(placement.decode)
        if event.source is None and producer is not None and consumer is not None:
            self.routing.links.observe(self.view(producer), self.view(consumer), event.num_bytes, event.busy_s)

    # ---- in flight

    def add_inflight(self, worker: WorkerRef, request: RequestId, num_tokens: int) -> None:
        """Count the prompt tokens of a request at a worker until the worker has answered; 0 removes them."""
        link = self.find(worker)
        if link is None:
            return
        if num_tokens:
            link.placed[request] = num_tokens
            self.changed(link)
        elif link.placed.pop(request, 0):
            self.changed(link)

    def add_inflight_job(self, worker: WorkerRef, job: Job) -> None:
        """Count a job's decode at a worker until the worker has answered."""
        link = self.find(worker)
        if link is not None and not isinstance(job, PrefillJob):
            link.decoding.add(job.request.id)
            self.changed(link)

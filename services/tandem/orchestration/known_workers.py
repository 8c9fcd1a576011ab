"""Rank the workers of one gateway for its director, and count the load that the director's placements add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from tandem.core.config import GatewayConfig
from tandem.core.events import KVReceived
from tandem.core.ids import RequestId, WorkerRef
from tandem.core.request import Job, PrefillJob, ResumeJob
from tandem.routing.pd_pairs import PairRegistry
from tandem.routing.placement import Placement
from tandem.routing.router import Routing
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import WorkerView

DISCOVERY_PERIOD_S = 1.0
"""Seconds between two reads of the registry, in which a gateway finds workers."""


class InflightJobs:
    """Hold the load of the jobs that were placed at one worker and that it has neither accepted nor refused yet,
    because its load reports do not contain them. `tokens`: by request, the prompt tokens to compute. `decodes`: the
    requests that the worker will decode."""

    def __init__(self) -> None:
        self.tokens: dict[RequestId, int] = {}
        self.decodes: set[RequestId] = set()

    def answered(self, job: Job) -> None:
        """Remove the load of a job, because the worker has accepted or refused it."""
        if not isinstance(job, ResumeJob):
            self.tokens.pop(job.request.id, None)
        if not isinstance(job, PrefillJob):
            self.decodes.discard(job.request.id)


class Link(Protocol):
    """Connection of a gateway to one worker, over which it sends jobs and receives reports; no KV moves over it.
    `inflight`: the load of the jobs that the gateway has placed there and the worker has not answered yet."""

    @property
    def inflight(self) -> InflightJobs: ...


LinkT = TypeVar("LinkT", bound=Link)


class KnownWorkers(ABC, Generic[LinkT]):
    """Rank the workers that one gateway knows, and record between which pairs of them KV may move (`pairs`).

    The load of a worker includes the prompt tokens and decodes of requests that are placed there but whose jobs the
    worker has not accepted yet (`add_inflight`, `add_inflight_job`), so that many placements in a row do not all choose
    one worker. `routing`: the settings by which a router compares workers, with the measured bandwidths between them.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.pairs = PairRegistry(config.disaggregation)
        self.routing = Routing(
            config.routing_policy,
            remote_prefix=config.remote_prefix,
            mixed_pairs=config.disaggregation == "strict",
        )
        self._ranking = WorkerRanking(self.pairs.linked, self.pairs.failed.keys(), self.pairs.refused.keys())

    @abstractmethod
    def find(self, worker: WorkerRef) -> LinkT | None:
        """Return the gateway's connection to a worker; None where the worker is gone."""

    @abstractmethod
    def view(self, link: LinkT) -> WorkerView | None:
        """Return the properties and load of the worker at the other end of the connection `link`, as the router sees
        them; None while the worker is not live."""

    @abstractmethod
    def changed(self, link: LinkT) -> None:
        """Update the ranking, because the properties or the load of the worker at the other end of the connection
        `link` have changed."""

    def candidates(self) -> WorkerRanking:
        """Return the ranking of the live workers, by load, from which workers are chosen for requests. It is updated in
        place as workers and their load change; callers must not change it."""
        return self._ranking

    def add_inflight(self, worker: WorkerRef, request: RequestId, num_tokens: int) -> None:
        """Count `num_tokens` prompt tokens of a request as load of a worker, until the worker has accepted or rejected
        the request's job. 0 stops counting the request. Does nothing where the worker is gone."""
        link = self.find(worker)
        if link is None:
            return
        if num_tokens:
            link.inflight.tokens[request] = num_tokens
            self.changed(link)
        elif link.inflight.tokens.pop(request, 0):
            self.changed(link)

    def add_inflight_job(self, worker: WorkerRef, job: Job) -> None:
        """Count a job as one of the sequences that a worker decodes, until the worker has accepted or rejected the job.
        Does nothing for a prefill job or where the worker is gone."""
        link = self.find(worker)
        if link is not None and not isinstance(job, PrefillJob):
            link.inflight.decodes.add(job.request.id)
            self.changed(link)

    def measured(self, placement: Placement, pulled: KVReceived) -> None:
        """Update the estimated bandwidth of the link from the prefill to the decode worker of `placement`. `pulled`:
        the decode worker's report of the bytes that it has read and the seconds in which it read them. Does nothing
        where either worker is gone.

        Not called for remote prefix fetches, during which the reader also computes prompts, which would distort the
        estimate."""
        producer, consumer = self.find(placement.prefill), self.find(placement.decode)
        source = None if producer is None else self.view(producer)
        target = None if consumer is None else self.view(consumer)
        if source is not None and target is not None:
            self.routing.links.observe(source, target, pulled.num_bytes, pulled.busy_s)

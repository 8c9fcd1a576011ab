"""Shortlist the workers that are compared for one request: those that hold most of its prompt and the least loaded few.

A comparison of all (prefill, decode) pairs would take time that grows with the square of the number of workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import islice, takewhile
from typing import NamedTuple

from tandem.core.ids import WorkerRef
from tandem.core.lane import Lane
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import WorkerView, can_serve_prefix

NUM_BY_LOAD = 4
"""Least loaded workers that are compared for each role."""
NUM_BY_HITS = 8
"""Workers with the longest cached prefixes that are compared, for all roles together."""
NUM_SOURCES = 2
"""Most workers that are compared as the source of a prefix for one worker: those that hold most of it. Others hold
less, and are seldom so much nearer that this pays."""


class PrefillCandidate(NamedTuple):
    """A worker that may compute the prompt of a request, and the workers that may decode after it.

    `decode_workers`: the workers that may decode; for a placement on a single worker, `worker` alone. `prefix_sources`:
    other workers from which `worker` may fetch the beginning of the prompt, because their device or host memory holds
    more of it than `worker` has cached.
    """

    worker: WorkerView
    decode_workers: Sequence[WorkerView]
    prefix_sources: Sequence[WorkerView] = ()


class Shortlist:
    """Select the few workers whose costs are compared for one request: `prefill_workers` for a placement on two
    workers, `mixed_workers` for a placement on a single one.

    `candidates`: the usable workers, ranked by load. `may_fetch_prefix`: whether the worker that computes the prompt
    may fetch the beginning of it from another worker's cache.
    """

    def __init__(self, candidates: WorkerRanking, request: RoutingRequest, *, may_fetch_prefix: bool) -> None:
        self._candidates = candidates
        self._request = request
        longest = self._find_holders(request.hits or {})
        producers = longest if may_fetch_prefix else []
        self._prefix_sources = [(view, request.held(view).num_tokens) for view in producers]
        self._holders = longest if len(candidates.lanes(request.model)) == 1 else self._find_holders(self._lane_hits())

    def prefill_workers(self) -> list[PrefillCandidate]:
        """Return workers that may compute the prompt, each with the decode workers that it may hand over to; empty when
        there is no usable pair.

        First come, by rising load, up to `NUM_BY_LOAD` workers that probably accept the prompt now, and a few that do
        not; then, of the workers with the longest cached prefixes, those that compute prompts. The search ends at
        `NUM_BY_LOAD` workers that accept, so it examines all workers that compute prompts when fewer accept.
        """
        few = self._few_consumers()
        holders = [worker for worker in self._holders if worker.prefills]
        ranking = self._candidates.prefill_workers(self._request.model, self._request.lane)
        with closing(ranking):
            return self._select(ranking, holders, lambda worker: self._partners(worker, few))

    def mixed_workers(self) -> list[PrefillCandidate]:
        """Return workers that may run the whole request, prefill and decode; empty when no usable worker serves its
        model and lane.

        They are the least loaded ones and those with the longest cached prefixes. Workers of the prefill pool are
        returned only when no usable worker decodes.
        """
        pools = self._candidates.pools(self._request.model, self._request.lane)
        decodes = bool(pools["decode"] or pools["mixed"])
        holders = [worker for worker in self._holders if worker.decodes is decodes]
        with closing(self._candidates.mixed_workers(self._request.model, self._request.lane)) as ranking:
            workers = takewhile(lambda worker: worker.decodes is decodes, ranking)
            return self._select(workers, holders, lambda worker: (worker,))

    # ---- selection

    def _select(
        self,
        ranking: Iterable[WorkerView],
        holders: Iterable[WorkerView],
        decode_workers: Callable[[WorkerView], Sequence[WorkerView]],
    ) -> list[PrefillCandidate]:
        found: dict[WorkerRef, PrefillCandidate] = {}
        num_ready = 0
        for worker in ranking:
            candidate = self._candidate(worker, decode_workers(worker))
            is_ready = self._accepts_now(candidate)
            if candidate.decode_workers and (is_ready or len(found) < 2 * NUM_BY_LOAD):
                found[worker.ref] = candidate
                num_ready += is_ready
            if num_ready == NUM_BY_LOAD:
                break
        for worker in holders:
            if worker.ref not in found and (partners := decode_workers(worker)):
                found[worker.ref] = self._candidate(worker, partners)
        return list(found.values())

    def _find_holders(self, hits: Mapping[WorkerRef, PrefixHit]) -> list[WorkerView]:
        if not hits:
            return []
        # Not those that drain, for example: the prefix index has them until they are gone.
        usable = (item for item in hits.items() if self._candidates.contains(self._request.model, item[0]))
        best = heapq.nsmallest(NUM_BY_HITS, usable, key=lambda item: (-item[1].num_blocks, item[0].id))
        views = (self._candidates.find(self._request.model, ref) for ref, _ in best)
        return [view for view in views if view is not None]

    def _lane_hits(self) -> Mapping[WorkerRef, PrefixHit]:
        """Return the hits of workers that serve the request's lane. Only these may run the request, while a prefix may
        be fetched from others too."""
        model, lane = self._request.model, self._request.lane
        hits = self._request.hits or {}
        return {ref: hit for ref, hit in hits.items() if self._candidates.serves(model, lane, ref)}

    def _few_consumers(self) -> list[WorkerView]:
        """Return the least loaded decode workers, up to `NUM_BY_LOAD`, and the decode workers among those with the
        longest cached prefixes.

        Of the least loaded ones, only those with a seat for the request are returned if there are any. All decode
        workers are examined when fewer than `NUM_BY_LOAD` have a seat.
        """
        found: dict[WorkerRef, WorkerView] = {}
        without_seat: list[WorkerView] = []
        with closing(self._candidates.decode_workers(self._request.model, self._request.lane)) as consumers:
            for view in consumers:
                if view.has_seat(self._request.lane):
                    found[view.ref] = view
                elif len(without_seat) < NUM_BY_LOAD:
                    without_seat.append(view)
                if len(found) == NUM_BY_LOAD:
                    break
        found = found or {view.ref: view for view in without_seat}
        found.update({view.ref: view for view in self._holders if view.decodes})
        return list(found.values())

    def _candidate(self, worker: WorkerView, decode_workers: Sequence[WorkerView]) -> PrefillCandidate:
        if not self._prefix_sources:
            return PrefillCandidate(worker, decode_workers)
        num_held = self._request.held(worker).num_tokens
        sources = (
            source for source, num in self._prefix_sources if num > num_held and self._can_serve_prefix(source, worker)
        )
        return PrefillCandidate(worker, decode_workers, tuple(islice(sources, NUM_SOURCES)))

    def _can_serve_prefix(self, producer: WorkerView, consumer: WorkerView) -> bool:
        """Return whether `consumer` may fetch a prefix from `producer`. A link that failed for hand-offs in either
        direction is not used."""
        link = (producer.ref, consumer.ref)
        back = (consumer.ref, producer.ref)
        failed = self._candidates.unlinked
        return (
            can_serve_prefix(producer, consumer)
            and link not in self._request.blocked_links
            and link not in failed
            and back not in failed
        )

    def _accepts_now(self, candidate: PrefillCandidate) -> bool:
        """Return whether the worker will probably accept the prompt now if it fetches the longest prefix that it may
        fetch."""
        held = (self._request.held(source).num_tokens for source in candidate.prefix_sources)
        return self._request.fits(candidate.worker, max(held, default=0))

    def _partners(self, producer: WorkerView, few: Iterable[WorkerView]) -> list[WorkerView]:
        """Return the decode workers among `few` to which `producer` may hand over; where there are none, up to
        `NUM_BY_LOAD` such workers among all."""
        linked = [consumer for consumer in few if self._is_pair(producer, consumer)]
        if linked:
            return linked
        with closing(self._candidates.decode_workers(self._request.model, self._request.lane)) as consumers:
            return list(islice((consumer for consumer in consumers if self._is_pair(producer, consumer)), NUM_BY_LOAD))

    def _is_pair(self, producer: WorkerView, consumer: WorkerView) -> bool:
        return (producer.ref, consumer.ref) in self._candidates.linked and _may_pair(producer, consumer)


def why_no_pair(candidates: WorkerRanking, request: RoutingRequest, *, mixed_pairs: bool) -> tuple[str, bool]:
    """Return (reason, whether waiting may help): why no prefill worker can be paired with a decode worker for the
    request's model and lane, as text.

    Waiting may help when the link between the workers of some pair has not failed a test yet. `mixed_pairs`: as in
    `Routing`; where it is False, a pair of two mixed workers does not count.
    """
    consumers = list(candidates.decode_workers(request.model, request.lane))
    producers = candidates.prefill_workers(request.model, request.lane)
    pairs = [
        (p.ref, d.ref) for p in producers for d in consumers if _may_pair(p, d) and (mixed_pairs or p.pool != d.pool)
    ]
    if not pairs:
        return "no worker of the same model build", False
    if all(pair in candidates.refused for pair in pairs):
        return "no link between the workers meets the requirements", False
    return "no link between the workers", any(pair not in candidates.unlinked for pair in pairs)


def pick_migration_target(candidates: WorkerRanking, model: str, lane: Lane, source: WorkerRef) -> WorkerRef | None:
    """Return the least loaded decode worker of `model` to which the worker `source` may migrate sequences of `lane`;
    None when there is none.

    A worker is left out when it has another fingerprint than `source`, or when its link from `source` has failed a
    test. Whether the target has free blocks is not checked here: it rejects the migration itself.
    """
    fingerprint = candidates.fingerprint(source)
    with closing(candidates.decode_workers(model, lane)) as consumers:
        for consumer in consumers:
            is_alike = consumer.ref != source and fingerprint in (None, consumer.fingerprint)
            if is_alike and (source, consumer.ref) not in candidates.unlinked:
                return consumer.ref
    return None


def _may_pair(producer: WorkerView, consumer: WorkerView) -> bool:
    return producer.ref != consumer.ref and producer.fingerprint == consumer.fingerprint

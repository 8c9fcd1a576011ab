"""Which workers one request is compared over: those that hold most of its prompt and the least loaded few, not all
pairs, of which there are as many as the square of the workers; never says what one costs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Set
from contextlib import closing
from itertools import islice
from typing import NamedTuple, Protocol

from tandem.core.ids import WorkerRef
from tandem.routing.remote_prefix import NUM_LENDERS, can_serve_prefix
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_view import Pair, Pool, Ranking, WorkerView

NUM_BY_LOAD = 4
"""Least loaded workers that are compared for each part."""
NUM_BY_HITS = 8
"""Workers with the longest prefixes that are compared, for all parts together."""


class Candidates(Protocol):
    """What a choice is made from: workers that serve a model and take new work, by rising load, of which
    mostly little is taken; nothing may change while a ranking is open, and none may be opened twice."""

    @property
    def linked(self) -> Set[Pair]: ...

    @property
    def unlinked(self) -> Set[Pair]: ...

    @property
    def refused(self) -> Set[Pair]:
        """Those of the unlinked whose link is not as required."""
        ...

    def pools(self, model: str) -> Counter[Pool]:
        """How many there are with each label."""
        ...

    def find(self, model: str, ref: WorkerRef) -> WorkerView | None: ...

    def prefill_workers(self, model: str) -> Ranking:
        """Those that prefill."""
        ...

    def decode_workers(self, model: str) -> Ranking:
        """Those that decode."""
        ...

    def mixed_workers(self, model: str) -> Ranking:
        """All, for both in one place: those that decode first."""
        ...


class ExcludingCandidates:
    """Candidates as if some were not there."""

    def __init__(self, among: Candidates, absent: Set[WorkerRef]) -> None:
        self._among = among
        self._absent = absent

    @property
    def linked(self) -> Set[Pair]:
        return self._among.linked

    @property
    def unlinked(self) -> Set[Pair]:
        return self._among.unlinked

    @property
    def refused(self) -> Set[Pair]:
        return self._among.refused

    def pools(self, model: str) -> Counter[Pool]:
        found = (self._among.find(model, ref) for ref in self._absent)
        return self._among.pools(model) - Counter(view.pool for view in found if view is not None)

    def find(self, model: str, ref: WorkerRef) -> WorkerView | None:
        return None if ref in self._absent else self._among.find(model, ref)

    def prefill_workers(self, model: str) -> Ranking:
        return _left(self._among.prefill_workers(model), self._absent)

    def decode_workers(self, model: str) -> Ranking:
        return _left(self._among.decode_workers(model), self._absent)

    def mixed_workers(self, model: str) -> Ranking:
        return _left(self._among.mixed_workers(model), self._absent)


class PrefillSite(NamedTuple):
    """One that may compute the prompt, and those from which it may read what it lacks of it."""

    worker: WorkerView
    producers: tuple[WorkerView, ...] = ()


class PrefillCandidate(NamedTuple):
    """One that may prefill, and those that may then decode."""

    site: PrefillSite
    decode_workers: tuple[WorkerView, ...]


class Shortlist:
    """One request's, while it is placed."""

    def __init__(
        self, among: Candidates, want: RoutingRequest, excluded: Set[WorkerRef], *, may_prefix_request: bool = True
    ) -> None:
        self._among = among
        self._want = want
        self._excluded = excluded
        self._holders = self._find_holders()
        producers = self._holders if may_prefix_request else []
        self._lenders = [(view, want.held(view).num_device_tokens) for view in producers]

    def prefill_workers(self) -> list[PrefillCandidate]:
        """Those that have a partner. All are walked over until enough are ready."""
        few = self._few_consumers()
        found: dict[WorkerRef, PrefillCandidate] = {}
        num_ready = 0
        with closing(self._left(self._among.prefill_workers(self._want.model))) as producers:
            for worker in producers:
                producer = self._producer(worker, few)
                is_ready = self._suits(producer.site)
                if producer.decode_workers and (is_ready or len(found) < 2 * NUM_BY_LOAD):
                    found[worker.ref] = producer
                    num_ready += is_ready
                if num_ready == NUM_BY_LOAD:
                    break
        for worker in self._holders:
            if worker.prefills and worker.ref not in found and (producer := self._producer(worker, few)).decode_workers:
                found[worker.ref] = producer
        return list(found.values())

    def mixed_workers(self) -> list[PrefillSite]:
        """Those that may do all of it: a prefill worker decodes only where none other is left."""
        found: dict[WorkerRef, PrefillSite] = {}
        num_ready, has_decoder = 0, False
        with closing(self._left(self._among.mixed_workers(self._want.model))) as workers:
            for worker in workers:
                if has_decoder and not worker.decodes:
                    break
                has_decoder = worker.decodes
                site = self._site(worker)
                is_ready = self._suits(site)
                if is_ready or len(found) < 2 * NUM_BY_LOAD:
                    found[worker.ref] = site
                    num_ready += is_ready
                if num_ready == NUM_BY_LOAD:
                    break
        for worker in self._holders:
            if worker.ref not in found and (worker.decodes or not has_decoder):
                found[worker.ref] = self._site(worker)
        return list(found.values())

    # ---- inside

    def _find_holders(self) -> list[WorkerView]:
        hits, want = self._want.hits, self._want
        if not hits:
            return []
        best = heapq.nsmallest(NUM_BY_HITS, hits.items(), key=lambda item: (-item[1].num_blocks, item[0].id))
        views = (self._among.find(want.model, ref) for ref, _ in best if ref not in self._excluded)
        return [view for view in views if view is not None]

    def _few_consumers(self) -> list[WorkerView]:
        with closing(self._left(self._among.decode_workers(self._want.model))) as consumers:
            found = {view.ref: view for view in islice(consumers, NUM_BY_LOAD)}
        found.update({view.ref: view for view in self._holders if view.decodes})
        return list(found.values())

    def _producer(self, worker: WorkerView, few: Iterable[WorkerView]) -> PrefillCandidate:
        return PrefillCandidate(self._site(worker), tuple(self._partners(worker, few)))

    def _site(self, worker: WorkerView) -> PrefillSite:
        if not self._lenders:
            return PrefillSite(worker)
        num_held = self._want.held(worker).num_tokens
        fit = (
            producer for producer, num in self._lenders if num > num_held and self._can_serve_prefix(producer, worker)
        )
        return PrefillSite(worker, tuple(islice(fit, NUM_LENDERS)))

    def _can_serve_prefix(self, producer: WorkerView, consumer: WorkerView) -> bool:
        """A way that has failed for hand-offs in one direction is not taken in the other."""
        link, back = (producer.ref, consumer.ref), (consumer.ref, producer.ref)
        failed = self._among.unlinked
        return (
            can_serve_prefix(producer, consumer)
            and link not in self._want.blocked_links
            and link not in failed
            and back not in failed
        )

    def _suits(self, site: PrefillSite) -> bool:
        """Whether it will probably accept the prompt now, with what it may read."""
        lent = max((self._want.held(producer).num_device_tokens for producer in site.producers), default=0)
        return self._want.fits(site.worker, lent)

    def _partners(self, producer: WorkerView, few: Iterable[WorkerView]) -> list[WorkerView]:
        """Of a few, or of all where none of those is linked."""
        linked = [consumer for consumer in few if self._is_pair(producer, consumer)]
        if linked:
            return linked
        with closing(self._left(self._among.decode_workers(self._want.model))) as consumers:
            return list(islice((consumer for consumer in consumers if self._is_pair(producer, consumer)), NUM_BY_LOAD))

    def _is_pair(self, producer: WorkerView, consumer: WorkerView) -> bool:
        return (producer.ref, consumer.ref) in self._among.linked and _may_pair(producer, consumer)

    def _left(self, workers: Ranking) -> Ranking:
        return _left(workers, self._excluded)


def why_no_pair(among: Candidates, model: str, excluded: Set[WorkerRef]) -> tuple[str, bool]:
    """What keeps every prefill worker from every decode worker, and whether that may pass."""
    producers = [worker for worker in among.prefill_workers(model) if worker.ref not in excluded]
    consumers = [worker for worker in among.decode_workers(model) if worker.ref not in excluded]
    pairs = [(p.ref, d.ref) for p in producers for d in consumers if _may_pair(p, d)]
    if not pairs:
        return "no worker of the same model build", False
    if all(pair in among.refused for pair in pairs):
        return "no link between the workers is as promised", False
    return "no link between the workers", any(pair not in among.unlinked for pair in pairs)


def _left(workers: Ranking, absent: Set[WorkerRef]) -> Ranking:
    with closing(workers):
        for worker in workers:
            if worker.ref not in absent:
                yield worker


def _may_pair(producer: WorkerView, consumer: WorkerView) -> bool:
    return producer.ref != consumer.ref and producer.fingerprint == consumer.fingerprint

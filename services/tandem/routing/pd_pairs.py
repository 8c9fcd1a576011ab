"""Track, for one gateway, between which workers KV may move: pairs to be tested, usable pairs, refused pairs.

A test sends a request through both workers of a pair. Each worker is tested with NUM_PEERS peers of each zone. A pair
that is not chosen for a test becomes usable once each of its workers has moved a block with some peer, and is judged by
its own transfers from then on. So the cost of a worker that joins grows with the number of workers, not with the number
of pairs. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import permutations, product

from tandem.core.ids import WorkerRef
from tandem.core.lane import Lane
from tandem.core.link import LinkReport
from tandem.routing.link_policy import NUM_PEERS, peers_to_probe
from tandem.routing.worker_view import Pair, WorkerView

PROBE_RETRY_S = 5.0
"""Seconds until a pair whose test has failed is tested again."""


class LinkedPairs(Set[Pair]):
    """Set of the (prefill, decode) pairs of workers between which KV may move now, by the registry `registry`. The time
    of a look-up does not depend on the number of workers; iteration and `len` visit every pair. Only for use on the
    thread that changes the registry."""

    def __init__(self, registry: PairRegistry) -> None:
        self._registry = registry
        self._found: set[Pair] = set()

    def __contains__(self, pair: object) -> bool:
        if pair in self._found:
            return True
        is_linked = self._registry.is_linked(pair)  # type: ignore[arg-type] # anything else is in no collection of it
        if is_linked:
            self._found.add(pair)  # type: ignore[arg-type]
        return is_linked

    def forget(self, pair: Pair | None = None) -> None:
        """Drop the stored answer for a pair, or for every pair if `pair` is None, because the registry has changed; the
        next look-up computes it again."""
        if pair is None:
            self._found.clear()
        else:
            self._found.discard(pair)

    def __iter__(self) -> Iterator[Pair]:
        return filter(self._registry.is_linked, self._registry.proven_pairs())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class PairRegistry:
    """Record between which prefill and decode workers KV may move, and choose the pairs (prefill, decode) to test.

    `mode`: the value of `gateway.disaggregation`. `linked`: pairs that may be used. `failed`: pairs that may not be
    used, each with the time at which it is tested again. `refused`: those of the failed pairs whose link misses its
    requirements, each with the problem as text; they are not tested again. No pair is both linked and failed. These
    collections change in place.
    """

    def __init__(self, mode: str) -> None:
        self.linked = LinkedPairs(self)
        self.failed: dict[Pair, float] = {}
        self.refused: dict[Pair, str] = {}
        self._mode = mode
        self._reports: dict[Pair, LinkReport] = {}
        self._proven_producers: set[WorkerRef] = set()
        self._proven_consumers: set[WorkerRef] = set()
        self._testing: set[Pair] = set()
        self._views: dict[WorkerRef, WorkerView] = {}
        self._chosen: defaultdict[WorkerRef, set[Pair]] = defaultdict(set)
        """Pairs of each worker that were chosen for a test and have not failed."""
        self._population: Sequence[object] = ()
        self._untested: set[Pair] = set()
        """Chosen pairs whose first test has not ended."""
        self._short: set[WorkerRef] = set()
        """Workers for which further pairs may have to be chosen."""

    def __repr__(self) -> str:
        return f"<{len(self.linked)} pairs linked, {len(self.failed)} failed, {len(self.refused)} of them refused>"

    def is_linked(self, pair: Pair) -> bool:
        """Return whether KV may move between the two workers of a pair (prefill, decode). That is so if each of the two
        has moved a block with some peer, and no test of the pair itself has failed or is awaited. False when one of
        them is not live. May be called on any thread."""
        producer, consumer = pair
        if producer not in self._proven_producers or consumer not in self._proven_consumers:
            return False
        return pair not in self.failed and pair not in self._untested and self._is_possible(pair)

    def proven_pairs(self) -> Iterator[Pair]:
        """Yield all pairs of a producer and a consumer that have each moved a block with some peer, whether the pair is
        linked or not."""
        return product(self._proven_producers.copy(), self._proven_consumers.copy())

    def due(self, views: Iterable[WorkerView], now: float) -> list[tuple[Pair, str]]:
        """Replace the live workers by `views`, and return the pairs to test at the time `now`, each as ((prefill,
        decode), the model that both workers serve).

        A returned pair counts as being tested, and is not returned again, until the caller passes it to `ended` or
        `gone`. Draining workers do not count as live.
        """
        self._update_views([view for view in views if not view.load.draining])
        again = [pair for pair, retry_at in self.failed.items() if now >= retry_at]
        pairs = [pair for pair in (*self._untested, *again) if pair not in self._testing and self._is_possible(pair)]
        self._testing.update(pairs)
        return [(pair, self._views[pair[0]].model) for pair in pairs]

    def ended(self, pair: Pair, *, moved: bool, retry_at: float) -> None:
        """Record the end of a pair's test. `moved`: True if a block was transferred, so that the pair becomes linked.
        Otherwise it becomes failed, until it is tested again at the time `retry_at`. A refused pair stays refused."""
        self._testing.discard(pair)
        if pair in self.refused:
            return
        if not moved:
            self._fail(pair, retry_at)
            return
        self.failed.pop(pair, None)
        self._untested.discard(pair)
        producer, consumer = pair
        self._proven_producers.add(producer)
        self._proven_consumers.add(consumer)

    def gone(self, pair: Pair) -> None:
        """Record that the test of a pair ended without a result, as when one of its workers left meanwhile. `due` may
        return the pair again."""
        self._testing.discard(pair)

    def suspect(self, workers: Set[WorkerRef], now: float) -> list[Pair]:
        """Mark as failed the linked pairs whose workers are both in `workers`, because KV between them may have been
        lost, and return these pairs. Each pair is due for a test at the time `now`, and is used again once a test
        succeeds."""
        pairs = [pair for pair in permutations(sorted(workers), 2) if pair in self.linked]
        for pair in pairs:
            self._fail(pair, now)
        return pairs

    def on_link_report(self, consumer: WorkerRef, report: LinkReport) -> bool:
        """Store the report of the worker `consumer` on the link over which it reads the worker `report.source`.

        Returns True when the report changes whether the pair is refused. A pair that is no longer refused is used once
        a test succeeds.
        """
        pair = (report.source, consumer)
        self._reports[pair] = report
        was_refused = pair in self.refused
        if report.refused:
            self.refused[pair] = report.problem
            self._fail(pair, math.inf)
        elif was_refused:
            del self.refused[pair], self.failed[pair]
            if self._is_possible(pair):
                self._choose_pair(pair)
                self._untested.add(pair)
                self.linked.forget(pair)
        return report.refused != was_refused

    def report(self, pair: Pair) -> LinkReport | None:
        return self._reports.get(pair)

    def links(self) -> Mapping[tuple[str, bool], int]:
        """Return the number of reported links by (link type, whether the link meets its requirements)."""
        return Counter((report.link_type, not report.problem) for report in list(self._reports.values()))

    def problem(self) -> str | None:
        """Return a text for people that describes one link that misses its requirements and counts the others; None if
        none does."""
        bad = [(pair, report) for pair, report in list(self._reports.items()) if report.problem]
        if not bad:
            return None
        (producer, consumer), report = min(bad, key=lambda item: item[0])
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        use = "is not used" if report.refused else "misses its requirements"
        return f"the link from {producer.id} to {consumer.id} {use}: {report.problem}{more}"

    def drop(self, worker: WorkerRef) -> None:
        """Forget all pairs and link reports of a worker that no longer exists."""
        for pair in [pair for pair in (*self.failed, *self._reports) if worker in pair]:
            self.failed.pop(pair, None)
            self.refused.pop(pair, None)
            self._reports.pop(pair, None)
        self.linked.forget()
        self._unchoose(worker)
        self._views.pop(worker, None)
        self._proven_producers.discard(worker)
        self._proven_consumers.discard(worker)

    # ---- choice of pairs

    def _fail(self, pair: Pair, retry_at: float) -> None:
        self.linked.forget(pair)
        self._untested.discard(pair)
        if pair not in self.failed:
            # Other pairs are tested in its place.
            for worker in pair:
                self._chosen[worker].discard(pair)
            self._short.update(pair)
        self.failed[pair] = retry_at

    def _update_views(self, views: Sequence[WorkerView]) -> None:
        """Replace the live workers by `views`, and choose pairs to test for workers that are new, have changed or have
        lost a peer."""
        population = [(view.ref, *_traits(view)) for view in views]
        if population == self._population and not self._short:
            return
        self._population = population
        self.linked.forget()
        known, self._views = self._views, {view.ref: view for view in views}
        for ref, view in known.items():
            now = self._views.get(ref)
            if now is None or _traits(now) != _traits(view):
                self._unchoose(ref)
                self._short.add(ref)
        self._short.update(self._views.keys() - known.keys())
        for ref in sorted(self._short & self._views.keys()):
            self._choose(self._views[ref])
        self._short.clear()

    def _choose(self, view: WorkerView) -> None:
        """Choose pairs until `view` has NUM_PEERS peers in each zone, and each possible peer has NUM_PEERS peers in the
        zone of `view`. A peer whose pair has failed does not count, so that a working peer is found."""
        for is_producer in (True, False):
            others: dict[WorkerRef, Pair] = {}
            for other in self._views.values():
                ends = (view, other) if is_producer else (other, view)
                if self._fits(*ends) and (pair := (ends[0].ref, ends[1].ref)) not in self.failed:
                    others[other.ref] = pair
            zones = (
                (ref, self._views[ref].topology.zone) for ref in others if others[ref] not in self._chosen[view.ref]
            )
            for ref in peers_to_probe(view.ref.id, zones):
                if self._num_peers(view.ref, is_producer, self._views[ref].topology.zone) < NUM_PEERS:
                    self._choose_pair(others[ref])
            for ref, pair in others.items():
                if self._num_peers(ref, not is_producer, view.topology.zone) < NUM_PEERS:
                    self._choose_pair(pair)

    def _num_peers(self, worker: WorkerRef, is_producer: bool, zone: str) -> int:
        """Return the number of peers in `zone` that were chosen for a worker in one of its two roles."""
        role = 0 if is_producer else 1
        peers = (pair[1 - role] for pair in self._chosen[worker] if pair[role] == worker)
        return sum(self._views[peer].topology.zone == zone for peer in peers)

    def _choose_pair(self, pair: Pair) -> None:
        """Add a pair to the chosen pairs of both its workers, and mark it to be tested unless it is linked already."""
        if not self.is_linked(pair):
            self._untested.add(pair)
        for worker in pair:
            self._chosen[worker].add(pair)

    def _unchoose(self, worker: WorkerRef) -> None:
        for pair in self._chosen.pop(worker, ()):
            self._untested.discard(pair)
            for other in pair:
                if other != worker:
                    self._chosen[other].discard(pair)
                    self._short.add(other)

    def _is_possible(self, pair: Pair) -> bool:
        producer, consumer = self._views.get(pair[0]), self._views.get(pair[1])
        return producer is not None and consumer is not None and self._fits(producer, consumer)

    def _fits(self, producer: WorkerView, consumer: WorkerView) -> bool:
        """Return whether hand-offs may move KV from `producer` to `consumer` at all."""
        if self._mode == "off" or producer.ref == consumer.ref or producer.fingerprint != consumer.fingerprint:
            return False
        if producer.lanes.isdisjoint(consumer.lanes):
            return False
        return producer.prefills and consumer.decodes and (producer.pool != consumer.pool or self._mode == "strict")


def _traits(view: WorkerView) -> tuple[str, str, str, frozenset[Lane]]:
    """Return the properties of a worker on which the choice of its pairs depends: pool, fingerprint, zone and lanes."""
    return view.pool, view.fingerprint, view.topology.zone, view.lanes

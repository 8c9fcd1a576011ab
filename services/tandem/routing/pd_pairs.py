"""Track, for one gateway, between which workers KV may move: pairs to be tested, usable pairs, refused pairs.

A test sends a request through both workers. Each worker is tested with NUM_PEERS peers of each zone. A pair that is not
tested becomes usable once both of its ends have moved a block with some peer, and is judged by its own transfers from
then on. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set

from tandem.core.ids import WorkerRef
from tandem.core.link import LinkReport
from tandem.routing.link_policy import peers_to_probe
from tandem.routing.worker_view import Pair, WorkerView

PROBE_RETRY_S = 5.0
"""Seconds until a pair whose test has failed is tested again."""


class PairRegistry:
    """Record between which prefill and decode workers KV may move, and choose the pairs to test.

    `mode` is `gateway.disaggregation`. `linked`: pairs that may be used. `failed`: pairs that may not, each with the
    time at which it is tested again. `suspected`: failed pairs that have moved blocks before. `refused`: failed pairs
    whose link misses its requirements, each with the problem; they are not tested again. No pair is both linked and
    failed. These collections change in place.
    """

    def __init__(self, mode: str) -> None:
        self.linked: set[Pair] = set()
        self.failed: dict[Pair, float] = {}
        self.suspected: set[Pair] = set()
        self.refused: dict[Pair, str] = {}
        self._mode = mode
        self._reports: dict[Pair, LinkReport] = {}
        self._proven_producers: set[WorkerRef] = set()
        self._proven_consumers: set[WorkerRef] = set()
        self._testing: set[Pair] = set()
        self._views: dict[WorkerRef, WorkerView] = {}
        self._population: object = None
        self._chosen: Set[Pair] = frozenset()

    def __repr__(self) -> str:
        return f"<{len(self.linked)} pairs linked, {len(self.failed)} failed, {len(self.refused)} of them refused>"

    def due(self, views: Iterable[WorkerView], now: float) -> list[tuple[Pair, str]]:
        """Replace the live workers by `views`, and return the pairs to test now, each with the model that both workers
        serve.

        A returned pair counts as being tested, and is not returned again, until the caller passes it to `ended` or
        `gone`.
        """
        self._update_views(tuple(view for view in views if not view.load.draining))
        new = [pair for pair in self._chosen if pair not in self.linked and pair not in self.failed]
        again = [pair for pair, retry_at in self.failed.items() if now >= retry_at]
        pairs = [pair for pair in (*new, *again) if pair not in self._testing and self._is_possible(pair)]
        self._testing.update(pairs)
        return [(pair, self._views[pair[0]].model) for pair in pairs]

    def ended(self, pair: Pair, *, moved: bool, retry_at: float) -> None:
        """Record the end of a pair's test. `moved`: a block was transferred, so the pair becomes linked; otherwise it
        becomes failed until it is tested again at the time `retry_at`. A refused pair stays refused."""
        self._testing.discard(pair)
        if pair in self.refused:
            return
        if not moved:
            self._fail(pair, retry_at)
            return
        self.failed.pop(pair, None)
        self.suspected.discard(pair)
        self.linked.add(pair)
        producer, consumer = pair
        if producer not in self._proven_producers:
            self._proven_producers.add(producer)
            self._link_proven({producer}, self._proven_consumers)
        if consumer not in self._proven_consumers:
            self._proven_consumers.add(consumer)
            self._link_proven(self._proven_producers, {consumer})

    def gone(self, pair: Pair) -> None:
        """Record that the transfer of a test block between a pair ended without a result, as when a worker left
        meanwhile; `due` may return the pair again."""
        self._testing.discard(pair)

    def suspect(self, workers: Set[WorkerRef], now: float) -> list[Pair]:
        """Mark the linked pairs of which both workers are in `workers` as failed, and return them.

        KV between these workers may have been lost. A further test, which is due at `now`, must succeed before the
        pairs are used again.
        """
        pairs = [pair for pair in self.linked if workers >= set(pair)]
        for pair in pairs:
            self._fail(pair, now)
            self.suspected.add(pair)
        return pairs

    def on_link_report(self, consumer: WorkerRef, report: LinkReport) -> bool:
        """Store a consumer's report on its link from `report.source`.

        Returns True when the report makes the pair refused, or makes a refused pair usable again.
        """
        pair = (report.source, consumer)
        self._reports[pair] = report
        was_refused = pair in self.refused
        if report.refused:
            self.refused[pair] = report.problem
            self._fail(pair, math.inf)
        elif was_refused:
            del self.refused[pair], self.failed[pair]
            self._population = None
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
        """Forget all pairs and reports of a worker that no longer exists."""
        for pair in [pair for pair in (*self.linked, *self.failed, *self._reports) if worker in pair]:
            self.linked.discard(pair)
            self.suspected.discard(pair)
            self.failed.pop(pair, None)
            self.refused.pop(pair, None)
            self._reports.pop(pair, None)
        self._proven_producers.discard(worker)
        self._proven_consumers.discard(worker)

    # ---- choice of pairs

    def _fail(self, pair: Pair, retry_at: float) -> None:
        self.linked.discard(pair)
        if pair not in self.failed:
            # Other pairs are tested in its place.
            self._population = None
        self.failed[pair] = retry_at

    def _update_views(self, views: tuple[WorkerView, ...]) -> None:
        """Update the views and choose the pairs to test anew, unless the workers are unchanged, no further pair has
        failed and none has ceased to be refused."""
        self._views = {view.ref: view for view in views}
        population = tuple((view.ref, view.pool, view.fingerprint, view.topology.zone) for view in views)
        if population != self._population:
            self._population = population
            self._chosen = frozenset(self._choose())
            self._link_proven(self._proven_producers, self._proven_consumers)

    def _choose(self) -> Iterator[Pair]:
        """Yield the pairs to test. Failed peers of a worker do not count, so that a working peer is found."""
        for views in self._by_fingerprint():
            producers = [view for view in views if view.prefills]
            consumers = [view for view in views if view.decodes]
            for producer in producers:
                open_consumers = [consumer for consumer in consumers if self._is_open(producer, consumer)]
                yield from ((producer.ref, consumer) for consumer in _peers(producer, open_consumers))
            for consumer in consumers:
                open_producers = [producer for producer in producers if self._is_open(producer, consumer)]
                yield from ((producer, consumer.ref) for producer in _peers(consumer, open_producers))

    def _by_fingerprint(self) -> Iterable[list[WorkerView]]:
        builds: defaultdict[str, list[WorkerView]] = defaultdict(list)
        for view in self._views.values():
            builds[view.fingerprint].append(view)
        return builds.values()

    def _link_proven(self, producer_refs: Set[WorkerRef], consumer_refs: Set[WorkerRef]) -> None:
        """Link the untested pairs of these workers, both ends of which have moved a block with some peer."""
        producers, consumers = (
            [self._views[ref] for ref in refs if ref in self._views] for refs in (producer_refs, consumer_refs)
        )
        for producer in producers:
            pairs = ((producer.ref, consumer.ref) for consumer in consumers if self._is_open(producer, consumer))
            self.linked.update(pair for pair in pairs if pair not in self._chosen)

    def _is_possible(self, pair: Pair) -> bool:
        producer, consumer = (self._views.get(ref) for ref in pair)
        return producer is not None and consumer is not None and self._fits(producer, consumer)

    def _is_open(self, producer: WorkerView, consumer: WorkerView) -> bool:
        return (producer.ref, consumer.ref) not in self.failed and self._fits(producer, consumer)

    def _fits(self, producer: WorkerView, consumer: WorkerView) -> bool:
        """Return whether hand-offs may move KV from `producer` to `consumer` at all."""
        if self._mode == "off" or producer.ref == consumer.ref or producer.fingerprint != consumer.fingerprint:
            return False
        return producer.prefills and consumer.decodes and (producer.pool != consumer.pool or self._mode == "strict")


def _peers(worker: WorkerView, others: Iterable[WorkerView]) -> list[WorkerRef]:
    return peers_to_probe(worker.ref.id, ((other.ref, other.topology.zone) for other in others))

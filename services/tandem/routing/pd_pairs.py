"""Between which workers KV may move, as one gateway knows it: pairs to be tested, used, refused; pure, never tests one.

Of each worker NUM_PEERS of each zone are tested by a request. A pair that nobody tests is used once both of its ends
have moved a block with somebody, and is judged by what it moves then. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set

from tandem.core.ids import WorkerRef
from tandem.core.link import LinkReport
from tandem.routing.link_policy import peers_to_probe
from tandem.routing.worker_view import Pair, WorkerView


class PairRegistry:
    """`mode` is `gateway.disaggregation`. `linked` may be used; `failed` may not, and are tested at the time given;
    `doubted` are those of the failed that have moved blocks before, `refused` those whose link is not as required,
    and why: no test changes that. No pair is linked and failed. Who was given the sets sees them change."""

    def __init__(self, mode: str) -> None:
        self.linked: set[Pair] = set()
        self.failed: dict[Pair, float] = {}
        self.doubted: set[Pair] = set()
        self.refused: dict[Pair, str] = {}
        self._mode = mode
        self._reports: dict[Pair, LinkReport] = {}
        self._gave: set[WorkerRef] = set()
        self._took: set[WorkerRef] = set()
        self._testing: set[Pair] = set()
        self._views: dict[WorkerRef, WorkerView] = {}
        self._met: object = None
        self._chosen: Set[Pair] = frozenset()

    def __repr__(self) -> str:
        return f"<{len(self.linked)} pairs linked, {len(self.failed)} failed, {len(self.refused)} of them refused>"

    def due(self, views: Iterable[WorkerView], now: float) -> list[tuple[Pair, str]]:
        """Take in which workers live. Returns the pairs between which a block is to move now, with the model that both
        serve; of each `ended` or `gone` is to be said."""
        self._meet(tuple(view for view in views if not view.load.draining))
        new = [pair for pair in self._chosen if pair not in self.linked and pair not in self.failed]
        again = [pair for pair, at in self.failed.items() if now >= at]
        found = [pair for pair in (*new, *again) if pair not in self._testing and self._is_possible(pair)]
        self._testing.update(found)
        return [(pair, self._views[pair[0]].model) for pair in found]

    def ended(self, pair: Pair, *, moved: bool, retry_at: float) -> None:
        """A test has ended, in which a block has moved or not."""
        self._testing.discard(pair)
        if pair in self.refused:
            return
        if not moved:
            self._fail(pair, retry_at)
            return
        self.failed.pop(pair, None)
        self.doubted.discard(pair)
        self.linked.add(pair)
        producer, consumer = pair
        if producer not in self._gave:
            self._gave.add(producer)
            self._link_proven({producer}, self._took)
        if consumer not in self._took:
            self._took.add(consumer)
            self._link_proven(self._gave, {consumer})

    def gone(self, pair: Pair) -> None:
        """A test has ended of which nothing is to be kept."""
        self._testing.discard(pair)

    def doubt(self, workers: Set[WorkerRef], now: float) -> list[Pair]:
        """KV may have been lost between two of these: their pairs are to be tested before they are used again."""
        found = [pair for pair in self.linked if workers >= set(pair)]
        for pair in found:
            self._fail(pair, now)
            self.doubted.add(pair)
        return found

    def reported(self, consumer: WorkerRef, report: LinkReport) -> bool:
        """A consumer says by what way it reads. Whether that is refused from now on, or is no more."""
        pair = (report.source, consumer)
        self._reports[pair] = report
        was_refused = pair in self.refused
        if report.refused:
            self.refused[pair] = report.problem
            self._fail(pair, math.inf)
        elif was_refused:
            del self.refused[pair], self.failed[pair]
            self._met = None
        return report.refused != was_refused

    def report(self, pair: Pair) -> LinkReport | None:
        return self._reports.get(pair)

    def links(self) -> Mapping[tuple[str, bool], int]:
        """How many reports name a way, and are as promised."""
        return Counter((report.link_type, not report.problem) for report in list(self._reports.values()))

    def problem(self) -> str | None:
        """What is wrong with links, for people."""
        bad = [(pair, report) for pair, report in list(self._reports.items()) if report.problem]
        if not bad:
            return None
        (producer, consumer), report = min(bad, key=lambda item: item[0])
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        use = "is not used" if report.refused else "is not as promised"
        return f"the link from {producer.id} to {consumer.id} {use}: {report.problem}{more}"

    def drop(self, worker: WorkerRef) -> None:
        """Forget what was known of a worker's pairs."""
        for pair in [pair for pair in (*self.linked, *self.failed, *self._reports) if worker in pair]:
            self.linked.discard(pair)
            self.doubted.discard(pair)
            self.failed.pop(pair, None)
            self.refused.pop(pair, None)
            self._reports.pop(pair, None)
        self._gave.discard(worker)
        self._took.discard(worker)

    # ---- inside

    def _fail(self, pair: Pair, retry_at: float) -> None:
        self.linked.discard(pair)
        if pair not in self.failed:
            # Others are tested in its place.
            self._met = None
        self.failed[pair] = retry_at

    def _meet(self, views: tuple[WorkerView, ...]) -> None:
        """Chooses nothing while the workers are the same, and no pair has begun to fail or is refused no more."""
        self._views = {view.ref: view for view in views}
        met = tuple((view.ref, view.pool, view.fingerprint, view.topology.zone) for view in views)
        if met != self._met:
            self._met = met
            self._chosen = frozenset(self._choose())
            self._link_proven(self._gave, self._took)

    def _choose(self) -> Iterator[Pair]:
        """A worker's peers that have failed do not count, so that one is found that works."""
        for builds in self._by_fingerprint():
            producers = [view for view in builds if view.prefills]
            consumers = [view for view in builds if view.decodes]
            for producer in producers:
                peers = ((t.ref, t.topology.zone) for t in consumers if self._is_open(producer, t))
                yield from ((producer.ref, consumer) for consumer in peers_to_probe(producer.ref.id, peers))
            for consumer in consumers:
                peers = ((g.ref, g.topology.zone) for g in producers if self._is_open(g, consumer))
                yield from ((producer, consumer.ref) for producer in peers_to_probe(consumer.ref.id, peers))

    def _by_fingerprint(self) -> Iterable[list[WorkerView]]:
        found: defaultdict[str, list[WorkerView]] = defaultdict(list)
        for view in self._views.values():
            found[view.fingerprint].append(view)
        return found.values()

    def _link_proven(self, gave: Set[WorkerRef], took: Set[WorkerRef]) -> None:
        """Pairs that nobody tests, of these, both ends of which have moved a block with somebody."""
        producers, consumers = ([self._views[ref] for ref in refs if ref in self._views] for refs in (gave, took))
        for producer in producers:
            pairs = ((producer.ref, consumer.ref) for consumer in consumers if self._is_open(producer, consumer))
            self.linked.update(pair for pair in pairs if pair not in self._chosen)

    def _is_possible(self, pair: Pair) -> bool:
        producer, consumer = (self._views.get(ref) for ref in pair)
        return producer is not None and consumer is not None and self._fits(producer, consumer)

    def _is_open(self, producer: WorkerView, consumer: WorkerView) -> bool:
        return (producer.ref, consumer.ref) not in self.failed and self._fits(producer, consumer)

    def _fits(self, producer: WorkerView, consumer: WorkerView) -> bool:
        """Whether KV of hand-offs may move between them at all."""
        if self._mode == "off" or producer.ref == consumer.ref or producer.fingerprint != consumer.fingerprint:
            return False
        return producer.prefills and consumer.decodes and (producer.pool != consumer.pool or self._mode == "strict")

"""Read the current state of a worker for its gauges, from any thread, without delaying the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.core.lane import Lane
from tandem.core.worker_load import EngineStats
from tandem.obs.metrics import instruments as on
from tandem.obs.metrics.metrics import Metrics, Values
from tandem.worker.engine.driver import EngineSnapshot

READ_TIMEOUT_S = 0.25
"""Seconds for which a reader waits for the engine, which answers between two steps; after that the previous statistics
are used."""
FRESH_S = 0.1
"""Seconds for which statistics are reused, so that one collection reads them once for all its gauges."""
WINDOW_S = 60.0
"""Shortest window, in seconds, in which the load of experts is compared; it ends when the imbalance is next read after
this time. In shorter windows tokens are too few to be spread evenly."""


class StatsReader:
    """Read the engine's statistics, and reuse them for `FRESH_S` seconds.

    `request_stats`: requests the statistics from the engine, which computes them between two steps, and returns their
    future.
    """

    def __init__(self, request_stats: Callable[[], Future[EngineStats]], clock: Clock) -> None:
        self._request_stats = request_stats
        self._clock = clock
        self._lock = threading.Lock()
        self._books = EngineStats()
        self._good_until = -1.0

    def read(self) -> EngineStats:
        """Return the engine's statistics. If they are older than `FRESH_S` seconds, requests new ones from the engine
        and blocks up to `READ_TIMEOUT_S` seconds; if the engine does not answer in that time, the old ones are
        returned."""
        with self._lock:
            if self._clock.now() >= self._good_until:
                with suppress(TimeoutError, TandemError):
                    self._books = self._request_stats().result(READ_TIMEOUT_S)
                self._good_until = self._clock.now() + FRESH_S
            return self._books


class ExpertLoad:
    """Read how many tokens each expert of a model has computed, and measure the imbalance between experts in the last
    complete window.

    `read_tokens`: returns by layer how many tokens each expert has computed so far, and raises RuntimeError when the
    device has failed. Methods may be called on any thread.
    """

    def __init__(self, read_tokens: Callable[[], Mapping[int, Sequence[int]]], clock: Clock) -> None:
        self._read_tokens = read_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._first: Mapping[int, Sequence[int]] = {}
        self._ends_at = clock.now()
        self._imbalance: Mapping[int, float] = {}

    def tokens(self) -> Mapping[int, Sequence[int]]:
        """Return by layer how many tokens each expert has computed so far. Returns an empty mapping when the device has
        failed; the engine reports that failure."""
        with suppress(RuntimeError):
            return self._read_tokens()
        return {}

    def imbalance(self) -> Mapping[int, float]:
        """Return by layer how unevenly the experts have computed tokens in the last complete window: 1 if all computed
        equally many, more otherwise (`imbalance_of`). The first window begins with the first call; until it has ended,
        the mapping is empty."""
        with self._lock:
            now = self._clock.now()
            if now >= self._ends_at:
                last = self.tokens()
                self._imbalance = imbalance_of(self._first, last)
                self._first, self._ends_at = last, now + WINDOW_S
            return self._imbalance

    def __repr__(self) -> str:
        return f"ExpertLoad(window ends at {self._ends_at:g}, {self._imbalance})"


def imbalance_of(first: Mapping[int, Sequence[int]], last: Mapping[int, Sequence[int]]) -> dict[int, float]:
    """Return by layer how unevenly the experts have computed tokens between two counts. The value is the number of
    tokens of the expert with the most, divided by the mean of the layer's experts: 1 if all computed equally many.
    Layers that computed no token are left out.

    `first`, `last`: the earlier and the later count; by layer, how many tokens each expert has computed so far.
    """
    found: dict[int, float] = {}
    for layer, counts in last.items():
        computed = [late - early for early, late in zip(first.get(layer, counts), counts, strict=True)]
        if total := sum(computed):
            found[layer] = max(computed) * len(computed) / total
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """Hold the functions that return the values of a worker's gauges; all may be called on any thread.

    `snapshot`: the engine's newest snapshot. `books`: the engine's statistics; the only function that may block, for a
    fraction of a second. `is_healthy`: whether the worker is healthy. `num_gateways`: number of gateways that the
    worker serves. `expert_tokens`, `expert_imbalance`: by layer, the tokens of each expert and their imbalance, see
    `ExpertLoad`.
    """

    snapshot: Callable[[], EngineSnapshot]
    books: Callable[[], EngineStats]
    is_healthy: Callable[[], bool]
    num_gateways: Callable[[], int]
    expert_tokens: Callable[[], Mapping[int, Sequence[int]]]
    expert_imbalance: Callable[[], Mapping[int, float]]


def watch_worker(metrics: Metrics, sources: MetricSources, info: Values, block_size: int) -> None:
    """Register all gauges of a worker in `metrics`. The gauges read their values from `sources` at each collection.
    `info`: label values of the metric WORKER_INFO. `block_size`: tokens of a KV block."""
    metrics.watch(on.WORKER_INFO, lambda: {info: 1})
    metrics.watch(on.KV_INFO, lambda: {(str(block_size), str(sources.snapshot().load.num_blocks)): 1})
    metrics.watch(on.SEQUENCES, lambda: _sequences(sources.snapshot()))
    metrics.watch(on.QUEUED_TOKENS, lambda: _queued_tokens(sources.snapshot().load.lane_tokens))
    metrics.watch(on.LANE_SEQUENCES, lambda: _by_lane(sources.snapshot().load.lane_seqs))
    metrics.watch(on.LANE_KV_BLOCKS, lambda: _by_lane(sources.snapshot().load.lane_blocks))
    metrics.watch(on.KV_CAPACITY, lambda: {(): sources.books().num_blocks})
    metrics.watch(on.KV_BLOCKS, lambda: _blocks(sources.books(), sources.snapshot().load.num_reserved_blocks))
    metrics.watch(on.KV_UNUSED, lambda: _unused(sources.snapshot()))
    metrics.watch(on.EXPERT_TOKENS, lambda: _of_all_layers(sources.expert_tokens()))
    metrics.watch(on.EXPERT_IMBALANCE, lambda: _by_layer(sources.expert_imbalance()))
    metrics.watch(on.LEASES, lambda: {(): sources.books().num_leases})
    metrics.watch(on.PULLS, lambda: {(): sources.books().num_pulls})
    metrics.watch(on.WORKER_HEALTHY, lambda: {(): sources.is_healthy()})
    metrics.watch(on.WORKER_DRAINING, lambda: {(): sources.snapshot().load.draining})
    metrics.watch(on.WORKER_GATEWAYS, lambda: {(): sources.num_gateways()})
    metrics.watch(on.DRAFTED_TOKENS, lambda: {(): sources.snapshot().load.num_drafted_tokens})
    metrics.watch(on.ACCEPTED_TOKENS, lambda: {(): sources.snapshot().load.num_accepted_tokens})
    metrics.watch(on.PREFIX_REMOTE_HIT_TOKENS, lambda: {(): sources.snapshot().load.num_remote_hit_tokens})
    metrics.watch(on.PREFIX_FILE_HIT_TOKENS, lambda: {(): sources.books().num_file_hit_tokens})
    metrics.watch(on.GENERATED_TOKENS, lambda: {(): sources.snapshot().num_generated})


def _sequences(snapshot: EngineSnapshot) -> Mapping[Values, float]:
    """Return the number of sequences in each state. Waiting sequences that have run before count as `paused` only."""
    load, num_paused = snapshot.load, sum(snapshot.load.lane_paused)
    return {("running",): load.num_running, ("waiting",): load.num_waiting - num_paused, ("paused",): num_paused}


def _queued_tokens(up_to: tuple[int, ...]) -> Mapping[Values, float]:
    """Return the queued tokens of each lane. `up_to`: for each lane, the queued tokens of this lane and of all more
    urgent ones together."""
    own = [more - less for less, more in pairwise((0, *up_to))]
    return _by_lane(own)


def _by_lane(values: Sequence[int]) -> Mapping[Values, float]:
    return {(lane.label,): value for lane, value in zip(Lane, values, strict=False)}


def _blocks(books: EngineStats, num_reserved: int) -> Mapping[Values, float]:
    """Return the block counts by state. `used` and `free` add up to all blocks; the other states overlap with them."""
    return {
        ("used",): books.num_blocks - books.num_free_blocks,
        ("free",): books.num_free_blocks,
        ("cached",): books.num_cached_blocks,
        ("retained",): books.num_retained_blocks,
        ("leased",): books.num_leased_blocks,
        ("promised",): num_reserved,
        ("reading",): books.num_reading_blocks,
        ("quarantined",): books.num_quarantined_blocks,
        ("host",): books.num_host_blocks,
        ("file",): books.num_file_blocks,
    }


def _of_all_layers(tokens: Mapping[int, Sequence[int]]) -> Mapping[Values, float]:
    """Return the tokens of each expert, summed over the layers. `tokens`: by layer and expert."""
    return {(str(expert),): sum(each) for expert, each in enumerate(zip_longest(*tokens.values(), fillvalue=0))}


def _by_layer(imbalance: Mapping[int, float]) -> Mapping[Values, float]:
    return {(str(layer),): value for layer, value in imbalance.items()}


def _unused(snapshot: EngineSnapshot) -> Mapping[Values, float]:
    load = snapshot.load
    return {(): max(0, load.num_free_blocks - load.num_reserved_blocks) / load.num_blocks} if load.num_blocks else {}

"""Whole engines handing KV to each other: under faults every request ends once and no token is wrong; without faults
nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.core.errors import ErrorKind
from tandem.core.events import Finished
from tandem.core.ids import RequestId
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams
from tests.effort import effort
from tests.property.cluster import Cluster, blocks_of
from tests.property.model import STOP_TOKEN
from tests.property.workers import Knobs

NEVER = 1e9


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request and where it is placed; equal workers compute all of it in one place."""

    prefill: int
    decode: int
    length: int
    shared: int
    max_tokens: int
    may_stop: bool = False
    priority: int = 0
    looks_back: bool = False
    num_top: int | None = None
    pause: int = 0
    """Rounds before the next one comes."""
    num_choices: int = 1
    lane: Lane = Lane.INTERACTIVE

    def request(self, number: int) -> Request:
        shared = min(self.shared, self.length)
        return Request(
            id=RequestId(f"r{number}"),
            model="model",
            prompt_tokens=(0,) * shared + (1 + number % 5,) * (self.length - shared),
            priority=self.priority,
            lane=self.lane,
            num_choices=self.num_choices,
            prompt_logprobs=self.num_top,
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                seed=number,
                frequency_penalty=float(self.looks_back),
                stop_token_ids=frozenset(range(STOP_TOKEN)) if self.may_stop else frozenset(),
            ),
        )


def request_specs(num_workers: int, max_length: int, max_tokens: int = 6) -> st.SearchStrategy[list[RequestSpec]]:
    spec = st.builds(
        RequestSpec,
        prefill=st.integers(0, num_workers - 1),
        decode=st.integers(0, num_workers - 1),
        length=st.integers(1, max_length),
        shared=st.integers(0, max_length),
        max_tokens=st.integers(0, max_tokens),
        may_stop=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1]),
        looks_back=st.sampled_from([False, False, True]),
        num_top=st.sampled_from([None, None, 1]),
        pause=st.sampled_from([0, 0, 0, 1, 3, 12]),
        num_choices=st.sampled_from([1, 1, 1, 2, 3, 7]),
        lane=st.sampled_from([Lane.INTERACTIVE, Lane.BATCH]),
    )
    return st.lists(spec, min_size=2, max_size=14)


def shapes(least_blocks: int = 8, most_blocks: int = 16, **fixed: object) -> st.SearchStrategy[Knobs]:
    """How workers are built."""
    return st.builds(
        Knobs,
        num_blocks=st.lists(st.integers(least_blocks, most_blocks), min_size=3, max_size=3).map(tuple),
        num_host_slots=st.sampled_from([0, 0, 3, 20]),
        block_size=st.sampled_from([1, 2, 3]),
        budget=st.integers(2, 9),
        max_num_seqs=st.integers(2, 6),
        chunked=st.booleans(),
        itl_s=st.sampled_from([0.0, 1e-9, 0.01]),
        plan_depth=st.sampled_from([1, 2]),
        right_guesses=st.sampled_from([None, 1.0, 0.6]),
        lane_preemptions=st.sampled_from([0, 1, 3]),
        batch_max_share=st.sampled_from([1.0, 1.0, 0.5, 0.2]),
        files=st.booleans(),
        **{name: st.just(value) for name, value in fixed.items()},
    )


def check_silence(cluster: Cluster) -> None:
    """Everything has ended, and nothing is left of it anywhere."""
    assert cluster.settle(700, cluster.is_quiet, 0.3), [repr(w.engine) for w in cluster.workers]
    assert not cluster.hung
    for worker in cluster.workers:
        books = worker.engine.books()
        assert blocks_of(worker) == [] and books.num_free_blocks == books.num_blocks, books
        assert books.num_sequences == books.num_leases == books.num_pulls == books.num_quarantined_blocks == 0
        assert worker.engine.num_live == 0 and not worker.engine.is_transferring
        worker.times.check_quiet()


def check_all_that_fits_finished(cluster: Cluster) -> None:
    for outcome in cluster.outcomes.values():
        assert isinstance(outcome, Finished) or outcome.kind is ErrorKind.CONTEXT_LENGTH, outcome
    check_silence(cluster)


def run(seed: int, knobs: Knobs, specs: list[RequestSpec], rounds: int) -> Cluster:
    cluster = Cluster(seed, knobs)
    for number, spec in enumerate(specs):
        cluster.submit_request(spec.request(number), spec.prefill, spec.decode)
        cluster.run(spec.pause)
    cluster.run(rounds)
    return cluster


@effort(75)
@given(
    seed=st.integers(0, 2**32),
    knobs=shapes(
        lost_calls=0.05,
        broken_links=0.04,
        broken_reads=0.05,
        hung_reads=0.05,
        failed_slices=0.004,
        stalls=0.02,
        deaths=0.02,
        cancels=0.01,
        drains=0.01,
        prefix_fetches=0.5,
        lost_files=0.05,
    ),
    specs=request_specs(3, 12),
)
def test_every_request_ends_once_and_no_token_is_wrong(seed: int, knobs: Knobs, specs: list[RequestSpec]) -> None:
    cluster = run(seed, knobs, specs, 60)
    for worker in cluster.workers:
        worker.engine.draining = False
    check_silence(cluster)
    for worker in cluster.workers:
        worker.engine.draining = True
    cluster.submit_request(RequestSpec(0, 0, 3, 0, 2).request(len(specs)), 0, 0)
    assert not cluster.settle(30, cluster.is_quiet) and cluster.num_refused, "a draining worker takes no new work"
    assert all(worker.engine.is_idle for worker in cluster.workers)


@pytest.mark.slow
@effort(80)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.tuples(st.integers(6, 10), st.integers(6, 10)),
    plan_depth=st.sampled_from([1, 2]),
    places=st.lists(st.sampled_from([(0, 1), (0, 1), (1, 0), (0, 0), (1, 1)]), min_size=10, max_size=20),
)
@example(
    seed=93,
    num_blocks=(9, 10),
    plan_depth=2,
    places=[(n // 10, n % 10) for n in (1, 1, 10, 1, 1, 0, 1, 1, 11, 1, 11, 11, 1, 11, 10, 0, 1, 1, 1, 1)],
)  # fails where a lapsed lease is taken for a good one
def test_without_digests_the_lease_keeps_wrong_kv_out(
    seed: int, num_blocks: tuple[int, int], plan_depth: int, places: list[tuple[int, int]]
) -> None:
    """A producer reuses the blocks of a lapsed lease for work of its own; a consumer that stalled meanwhile may have
    read either, and the message that would tell it was lost."""
    knobs = Knobs(
        num_blocks=num_blocks,
        budget=12,
        max_num_seqs=6,
        plan_depth=plan_depth,
        digests=False,
        stalls=0.06,
        broken_links=0.3,
        slow_reads=0.9,
        prefix_fetches=0.5,
        cancels=0.05,
    )
    specs = [
        RequestSpec(
            prefill, decode, length=2 + i * 5 % 7, shared=0, max_tokens=2 + i % 3, pause=(1, 3, 8)[(i + seed) % 3]
        )
        for i, (prefill, decode) in enumerate(places)
    ]
    check_silence(run(seed, knobs, specs, 60))


@effort(80)
@given(
    seed=st.integers(0, 2**32),
    knobs=shapes(pull_timeout_s=NEVER, drain_timeout_s=NEVER, slow_reads=0.1, prefix_fetches=0.5),
    specs=request_specs(3, 16, 12),
    mutual=st.booleans(),
)
def test_without_faults_every_request_finishes(seed: int, knobs: Knobs, specs: list[RequestSpec], mutual: bool) -> None:
    """No deadline for room is set, so that a circle of waiting would last for ever. With `mutual`, two workers give
    and take at once."""
    if mutual:
        specs = [replace(spec, prefill=i % 2, decode=(i + 1) % 2, priority=0) for i, spec in enumerate(specs)]
    cluster = run(seed, knobs, specs, 0)
    assert cluster.settle(1500, cluster.is_quiet), [repr(w.engine) for w in cluster.workers]
    assert not cluster.failures, cluster.failures
    check_all_that_fits_finished(cluster)


@effort(40)
@given(
    seed=st.integers(0, 2**32),
    knobs=shapes(
        20, 40, pull_timeout_s=NEVER, drain_timeout_s=NEVER, slow_reads=0.1, prefix_fetches=0.2, moves=0.7, lease_s=30.0
    ),
    specs=request_specs(3, 12, 40),
)
def test_sequences_move_between_workers_and_every_request_finishes(
    seed: int, knobs: Knobs, specs: list[RequestSpec]
) -> None:
    cluster = run(seed, knobs, specs, 0)
    assert cluster.settle(3000, cluster.is_quiet), [repr(w.engine) for w in cluster.workers]
    full = {ErrorKind.OVERLOADED, ErrorKind.DRAINING}
    assert {failed.kind for failed in cluster.failures} <= full, cluster.failures
    check_all_that_fits_finished(cluster)


@effort(40)
@given(
    seed=st.integers(0, 2**32),
    knobs=shapes(
        20, 40, moves=0.7, lost_calls=0.05, broken_links=0.04, broken_reads=0.05, hung_reads=0.02, stalls=0.02,
        deaths=0.01, cancels=0.01,
    ),
    specs=request_specs(3, 12, 40),
)  # fmt: skip
def test_sequences_move_under_faults_and_no_token_is_wrong(seed: int, knobs: Knobs, specs: list[RequestSpec]) -> None:
    check_silence(run(seed, knobs, specs, 60))


def test_a_sequence_moves_back_and_forth_with_its_kv() -> None:
    num_moves = 0
    for seed in range(4):
        cluster = Cluster(seed, Knobs(num_blocks=(30, 30), budget=12, slow_reads=0.0, moves=0.3))
        cluster.submit_request(RequestSpec(0, 0, length=6, shared=0, max_tokens=40).request(0), 0, 0)
        check_all_finish(cluster)
        (state,) = cluster.lives.values()
        assert state.num_retries == cluster.num_pulled, "each move is one pull, and nothing was computed again"
        num_moves += cluster.num_pulled
        check_silence(cluster)
    assert num_moves >= 4


def test_a_prefix_is_read_from_files_also_by_other_workers() -> None:
    """Prompts of which a pool holds one take turns, at one worker first and then at the other."""
    knobs = Knobs(num_blocks=(10, 10), num_host_slots=12, budget=12, files=True, slow_reads=0.0)
    cluster = Cluster(1, knobs)
    for number in range(12):
        place = number // 6
        spec = RequestSpec(place, place, length=14, shared=0, max_tokens=2)
        cluster.submit_request(replace(spec.request(number % 3), id=RequestId(f"q{number}")), place, place)
        cluster.run(40)
    check_all_finish(cluster)
    assert cluster.num_file_hits > 0
    assert cluster.workers[1].engine.books().num_file_hit_tokens > 0
    check_silence(cluster)


class PromptCluster(Cluster):
    """Every message takes the same short time, so that both sides of a pair do the same at once."""

    def delay(self) -> float:
        return 0.01


def mutual(length: int, num_pairs: int, budget: int) -> PromptCluster:
    """Two workers of ten blocks of eight tokens, and requests of `length` tokens from each to the other."""
    knobs = Knobs(
        num_blocks=(10, 10), block_size=8, budget=budget, max_num_seqs=4, pull_timeout_s=NEVER, slow_reads=0.0
    )
    cluster = PromptCluster(1, knobs)
    for number in range(2 * num_pairs):
        producer, consumer = number % 2, (number + 1) % 2
        cluster.submit_request(RequestSpec(producer, consumer, length, 0, 3).request(number), producer, consumer)
    return cluster


def check_all_finish(cluster: Cluster) -> None:
    assert cluster.settle(2000, cluster.is_quiet), [repr(w.engine) for w in cluster.workers]
    assert not cluster.failures
    assert all(isinstance(outcome, Finished) for outcome in cluster.outcomes.values()), cluster.outcomes


def test_two_pools_that_exclude_each_other_s_reservations_do_not_deadlock() -> None:
    """Each prompt takes six of ten blocks: a worker cannot lease that beside a promise of seven, and the one who was
    promised it waits for the other's lease."""
    cluster = mutual(48, 2, budget=16)
    check_all_finish(cluster)


def test_two_pools_do_not_fill_up_with_leases_for_each_other() -> None:
    """Two leases of four blocks each would leave too little for the promise of five at both, and both would start in
    one step."""
    cluster = mutual(32, 2, budget=33)
    check_all_finish(cluster)
    assert cluster.num_pulled == 4


def test_urgent_work_that_waits_for_leases_does_not_hold_up_the_pulls_that_end_them() -> None:
    """It arrives before the first chunk is announced, and goes ahead of the pull."""
    cluster = mutual(32, 1, budget=4)
    while min(worker.engine.books().num_leased_blocks for worker in cluster.workers) == 0:
        cluster.run(1)
    for index in (0, 1):
        spec = RequestSpec(index, index, length=55, shared=0, max_tokens=1, priority=-1)
        cluster.submit_request(spec.request(2 + index), index, index)
    check_all_finish(cluster)
    assert cluster.num_pulled == 2

"""Workers that drain one after the other, under faults: every choice ends once with the right tokens, wherever it went,
and nothing is left of it anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.worker_load import DrainResult
from tests.effort import effort
from tests.property.moving_cluster import DRAIN_S, MovingCluster
from tests.property.test_cluster import RequestSpec, check_silence, request_specs
from tests.property.workers import Knobs


def run(seed: int, knobs: Knobs, specs: list[RequestSpec], drains: list[tuple[int, int, bool]]) -> MovingCluster:
    """`drains`: (rounds to wait, which worker, whether its drain is undone)."""
    cluster = MovingCluster(seed, knobs)
    for number, spec in enumerate(specs):
        request = spec.request(number)
        cluster.begin(replace(request, prompt_logprobs=None), spec.decode)
        cluster.run(spec.pause)
    for rounds, index, is_undone in drains:
        cluster.run(rounds)
        cluster.drain(index, is_undone=is_undone)
    cluster.run(20)
    return cluster


def check_reported(cluster: MovingCluster) -> None:
    """Nothing is left, and every choice has the right tokens."""
    check_silence(cluster)
    for place, story in cluster.stories.items():
        assert tuple(story.tokens) == cluster.expected[place], place


def calm(seed: int, knobs: Knobs, lengths: Iterable[int]) -> MovingCluster:
    """Return a cluster without faults, with requests of these lengths and 50 tokens at the first worker."""
    cluster = MovingCluster(seed, knobs)
    cluster.has_faults = False
    for number, length in enumerate(lengths):
        cluster.begin(RequestSpec(prefill=0, decode=0, length=length, shared=0, max_tokens=50).request(number), 0)
    return cluster


@effort(40)
@given(
    seed=st.integers(0, 2**32),
    knobs=st.builds(
        Knobs,
        num_blocks=st.lists(st.integers(20, 40), min_size=3, max_size=3).map(tuple),
        block_size=st.sampled_from([2, 3]),
        budget=st.integers(2, 9),
        max_num_seqs=st.integers(2, 6),
        plan_depth=st.sampled_from([1, 2]),
        right_guesses=st.sampled_from([None, 0.6]),
        broken_links=st.just(0.04),
        broken_reads=st.just(0.05),
        hung_reads=st.just(0.03),
        failed_slices=st.just(0.01),
        deaths=st.just(0.01),
        stalls=st.just(0.02),
        prefix_fetches=st.just(0.5),
    ),
    specs=request_specs(3, 10, 24),
    drains=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2), st.booleans()), min_size=1, max_size=5),
)
def test_whatever_happens_while_workers_drain_every_choice_ends_right(
    seed: int, knobs: Knobs, specs: list[RequestSpec], drains: list[tuple[int, int, bool]]
) -> None:
    cluster = run(seed, knobs, [replace(spec, pause=spec.pause % 3) for spec in specs], drains)
    check_reported(cluster)


@effort(24)
@given(
    seed=st.integers(0, 2**32),
    depth=st.sampled_from([1, 2]),
    lengths=st.lists(st.integers(1, 10), min_size=1, max_size=5),
)
def test_with_room_elsewhere_all_that_runs_moves(seed: int, depth: int, lengths: list[int]) -> None:
    """Without faults nothing that runs and has far to go is computed anew."""
    knobs = Knobs(num_blocks=(80, 160, 160), max_num_seqs=8, plan_depth=depth, budget=60, slow_reads=0.0)
    cluster = calm(seed, knobs, lengths)
    cluster.run(5)
    producer = cluster.workers[0]
    cluster.drain(0)
    check_reported(cluster)
    assert producer.engine.drained() == DrainResult(0, len(lengths), 0)


@effort(24)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(26, 40),
    depth=st.sampled_from([1, 2]),
    digests=st.booleans(),
    rounds=st.integers(5, 30),
)
def test_a_drain_of_a_full_pool_does_not_wait_for_its_end(
    seed: int, num_blocks: int, depth: int, digests: bool, rounds: int
) -> None:
    """Sequences that others read give way to nobody, and must draw once more to be gone: where that takes more blocks
    than there are, some are computed anew."""
    knobs = Knobs(
        num_blocks=(num_blocks, 300, 300), max_num_seqs=8, plan_depth=depth, budget=60, slow_reads=0.0, digests=digests
    )
    cluster = calm(seed, knobs, [3] * 4)
    cluster.run(rounds)
    producer, began = cluster.workers[0], cluster.agenda.now
    cluster.drain(0)
    while producer.is_alive and producer.engine.num_live:
        cluster.run(1)
        assert cluster.agenda.now - began < DRAIN_S / 2, producer.engine
    check_reported(cluster)

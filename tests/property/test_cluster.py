"""Whole engines handing KV to each other: under faults every request ends once and no token is wrong; without faults
nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ErrorKind
from tandem.core.events import Finished
from tandem.core.ids import RequestId
from tandem.core.request import Request, SamplingParams
from tests.property.cluster import Cluster, Knobs, blocks_of
from tests.property.effort import effort
from tests.property.model import STOP_TOKEN

NEVER = 1e9


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and where it is placed; equal workers compute all of it in one place."""

    prefill: int
    decode: int
    length: int
    shared: int
    max_tokens: int
    may_stop: bool = False
    priority: int = 0
    pause: int = 0
    """Rounds before the next one comes."""

    def request(self, number: int) -> Request:
        shared = min(self.shared, self.length)
        return Request(
            id=RequestId(f"r{number}"),
            model="model",
            prompt_tokens=(0,) * shared + (1 + number % 3,) * (self.length - shared),
            priority=self.priority,
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                seed=number,
                stop_token_ids=frozenset(range(STOP_TOKEN)) if self.may_stop else frozenset(),
            ),
        )


def asks(num_workers: int, max_length: int, max_tokens: int = 6) -> st.SearchStrategy[list[Ask]]:
    ask = st.builds(
        Ask,
        prefill=st.integers(0, num_workers - 1),
        decode=st.integers(0, num_workers - 1),
        length=st.integers(1, max_length),
        shared=st.integers(0, max_length),
        max_tokens=st.integers(1, max_tokens),
        may_stop=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1]),
        pause=st.sampled_from([0, 0, 0, 1, 3, 12]),
    )
    return st.lists(ask, min_size=2, max_size=14)


def shapes(**fixed: object) -> st.SearchStrategy[Knobs]:
    """How workers are built."""
    return st.builds(
        Knobs,
        num_blocks=st.lists(st.integers(8, 16), min_size=3, max_size=3).map(tuple),
        block_size=st.sampled_from([1, 2, 3]),
        budget=st.integers(2, 9),
        max_num_seqs=st.integers(2, 6),
        chunked=st.booleans(),
        plan_depth=st.sampled_from([1, 2]),
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
        assert worker.engine.num_live == 0 and not worker.engine.is_moving


def run(seed: int, knobs: Knobs, wanted: list[Ask], rounds: int) -> Cluster:
    cluster = Cluster(seed, knobs)
    for number, ask in enumerate(wanted):
        cluster.ask(ask.request(number), ask.prefill, ask.decode)
        cluster.run(ask.pause)
    cluster.run(rounds)
    return cluster


@effort(150)
@given(
    seed=st.integers(0, 2**32),
    knobs=shapes(
        lost_calls=0.05,
        broken_links=0.04,
        broken_reads=0.05,
        hung_reads=0.05,
        failed_slices=0.004,
        stalls=0.02,
        deaths=0.005,
        cancels=0.01,
        drains=0.01,
    ),
    wanted=asks(3, 12),
)
def test_every_request_ends_once_and_no_token_is_wrong(seed: int, knobs: Knobs, wanted: list[Ask]) -> None:
    cluster = run(seed, knobs, wanted, 60)
    for worker in cluster.workers:
        worker.engine.draining = False
    check_silence(cluster)


@effort(150)
@given(
    seed=st.integers(0, 2**32),
    knobs=shapes(digests=False, stalls=0.08, broken_links=0.02, slow_reads=0.8),
    wanted=asks(3, 12),
)
def test_without_digests_the_lease_keeps_wrong_kv_out(seed: int, knobs: Knobs, wanted: list[Ask]) -> None:
    """A giver that wakes up late has reused blocks which a taker may still be reading."""
    check_silence(run(seed, knobs, wanted, 60))


@effort(250)
@given(
    seed=st.integers(0, 2**32),
    knobs=shapes(pull_timeout_s=NEVER, drain_timeout_s=NEVER, slow_reads=0.1),
    wanted=asks(3, 16, 12),
    mutual=st.booleans(),
)
def test_without_faults_every_request_finishes(seed: int, knobs: Knobs, wanted: list[Ask], mutual: bool) -> None:
    """No deadline for room is set, so that a circle of waiting would last for ever. With `mutual`, two workers give
    and take at once."""
    if mutual:
        wanted = [replace(ask, prefill=i % 2, decode=(i + 1) % 2, priority=0) for i, ask in enumerate(wanted)]
    cluster = run(seed, knobs, wanted, 0)
    assert cluster.settle(1500, cluster.is_quiet), [repr(w.engine) for w in cluster.workers]
    assert not cluster.failures, cluster.failures
    for outcome in cluster.outcomes.values():
        assert isinstance(outcome, Finished) or outcome.kind is ErrorKind.CONTEXT_LENGTH, outcome
    check_silence(cluster)
